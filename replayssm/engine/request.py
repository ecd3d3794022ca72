"""A request and its samples: what was asked, the tokens so far, and what of them is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from replayssm.engine.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from replayssm.engine.constraints import Constraint
    from replayssm.engine.text import TextStream


class Phase(Enum):
    """Where a sequence is: the scheduler moves it from one to the next, and back to WAITING when it is preempted."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Saved(NamedTuple):
    """What a session file has of a sequence: tokens that need no computing, and their states, keys and values."""

    done: int
    tensors: dict[str, Tensor]


@dataclass(eq=False)
class Request:
    """What was asked for.

    Attributes:
        id: its name.
        prompt: its tokens, one at least.
        params: how its samples are drawn.
        seed: of its random streams, kept so that a preempted sample goes on with the same one.
        priority: the higher, the earlier.
        turn: its place in the order of all requests; the smaller, the earlier. See `scheduler.py`.
        sequences: one for each sample.
        cached_tokens: tokens of the prompt that the prefix cache had; None before the first step.
        open: samples whose last update hasn't been made.
        arrived, started, first_token, ended: seconds of the monotonic clock; None before it happened.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    turn: tuple[int, int] = (0, 0)
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    open: int = 0
    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One sample of a request.

    A token that was sampled is *in flight* until the host has read it. A sequence that decodes has one token, in flight
    or not, that isn't in its slot yet: the next step's input.

    Attributes:
        request: that it is a sample of.
        index: which one.
        tokens: the prompt's, then what was sampled and read.
        text: what the tokens become.
        constraint: what may come next, where the request has a schema or a pattern.
        phase: see :class:`Phase`.
        done: how many of its tokens are in its slot and its pages, once all steps that were launched have run.
        in_flight: how many tokens were sampled that `tokens` doesn't have yet.
        row: its row in the sampler, while it runs.
        slot: its slot in the pool, while it runs.
        pages: that hold its keys and values, in order, while it runs.
        stops: places where its prefill stops for a snapshot.
        saved: from a session file, until it runs.
    """

    request: Request
    index: int
    tokens: list[int]
    text: TextStream
    constraint: Constraint | None = None
    phase: Phase = Phase.WAITING
    done: int = 0
    in_flight: int = 0
    row: int = -1
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    stops: set[int] = field(default_factory=set)
    saved: Saved | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sequences are served in this order."""
        return (*self.request.turn, self.index)

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        request = self.request  # asked for each row at each step
        return request.params.max_tokens + len(request.prompt) - len(self.tokens) - self.in_flight
