"""What the server needs of an engine: :class:`replayssm.engine.AsyncEngine` has it, and so has the tests' stand-in."""

from collections.abc import Sequence
from typing import Protocol, Self

from replayssm.engine.outputs import Update
from replayssm.engine.params import SamplingParams
from replayssm.engine.stats import EngineStats


class UpdateStream(Protocol):
    """The updates of one request, until each of its samples has a finish reason."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Update: ...

    async def aclose(self) -> None:
        """Cancel the request, if it isn't done."""


class ServedEngine(Protocol):
    """An engine that runs beside the event loop.

    Attributes:
        failed: why it gave up for good; None as long as it works.
    """

    failed: str | None

    async def start(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> UpdateStream:
        """Queue a request.

        Raises:
            QueueFull: try again later.
            InputError: the request can't be served; nothing is queued.
        """

    def stats(self) -> EngineStats:
        """What it has done and holds; from any thread."""

    async def shutdown(self, *, drain_seconds: float) -> None:
        """Take no more requests, give the others time to finish, then end them with an "abort"."""
