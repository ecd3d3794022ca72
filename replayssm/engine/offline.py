"""Some requests served to their end, while nothing else is asked of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from replayssm.engine.outputs import Completion, RequestOutput, Update
from replayssm.engine.request import Request

if TYPE_CHECKING:
    from replayssm.engine.engine import Engine


def serve(
    engine: Engine, requests: list[Request], on_update: Callable[[Update], None] | None, *, progress: bool
) -> list[RequestOutput]:
    """The outputs of requests, which are queued as the engine has room for them, in their order.

    If it breaks off, by a failure or from the keyboard, those that are not done are cancelled.

    Args:
        engine: that prepared them. Updates of its other requests come with its next step.
        requests: from :meth:`Engine.prepare`.
        on_update: is called with each update.
        progress: show a bar on standard error.
    """
    collectors = {request.id: _Collector(request) for request in requests}
    todo = list(reversed(requests))
    others: list[Update] = []
    with _bar(len(requests), shown=progress) as advance:
        try:
            while todo or any(not collector.finished for collector in collectors.values()):
                while todo and engine.has_room_for(todo[-1]):
                    engine.enqueue(todo.pop())
                for update in engine.step():
                    collector = collectors.get(update.request_id)
                    if collector is None:
                        others.append(update)
                        continue
                    collector.take(update)
                    if collector.finished:
                        advance()
                    if on_update is not None:
                        on_update(update)
        finally:
            engine.drop(set(collectors), others)
    return [collector.output() for collector in collectors.values()]


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """A function to call after each request."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


class _Collector:
    """The output of one request, from its updates."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completions = [
            Completion(index, "", [], None if request.params.logprobs is None else [], None, None)
            for index in range(request.params.n)
        ]

    def take(self, update: Update) -> None:
        """Add what a step brought."""
        completion = self.completions[update.index]
        completion.text += update.text
        completion.token_ids += update.token_ids
        if completion.logprobs is not None:
            completion.logprobs += update.logprobs
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        completion.message = update.message

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """The whole of it."""
        request = self.request

        def since_arrival(time: float | None) -> float:
            return 0.0 if time is None else time - request.arrived

        return RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            completions=self.completions,
            cached_tokens=request.cached_tokens or 0,
            queue_seconds=since_arrival(request.started),
            ttft_seconds=since_arrival(request.first_token),
            seconds=since_arrival(request.ended),
        )
