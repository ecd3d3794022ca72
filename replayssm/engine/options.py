"""How an engine is set up, checked without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replayssm.errors import InputError
from replayssm.options import (
    BACKENDS,
    MAX_DRAFT,
    MAX_RING_LEN,
    RING_DTYPES,
    STATE_DTYPES,
    check_between,
    check_one_of,
)

SPECULATE = ("ngram", "mtp")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine decodes, what memory it may take, and what bounds a step.

    Attributes:
        ring_len: L, the flush period in tokens.
        state_dtype: dtype of checkpoints and snapshots.
        ring_dtype: dtype of the ring's updates, or "auto".
        backend: of the operators, see :mod:`replayssm.ops`.
        max_rows: sequences that run at once; None: as many as fit, within reason.
        max_context: tokens of prompt and output together, one of each at least, more than the model was made for with
            a warning; None: what it was made for, as far as memory goes.
        page_size: tokens of a page of keys and values.
        memory_bytes: for states, snapshots, pages and the sampler; None: a share of what is free, on a CPU 1 GiB at
            most.
        snapshot_share: of that memory, for snapshots; sequences in need take their place.
        chunk_tokens: the longest piece of one prompt in a step beside sequences that decode, whole pages.
        max_step_tokens: tokens of all sequences in a step; None: 2,048, on a GPU up to 8,192, if their forward takes a
            tenth of the memory at most.
        snapshot_every: tokens between snapshots of a sequence that decodes, whole pages.
        prefix_cache: keep prefixes for later requests.
        replay: False writes the state at every token, as without this package.
        speculate: None, "ngram" or "mtp".
        num_draft: tokens drafted ahead, at most.
        fixed_draft: draft so many in every step; else none where steps without drafts give more tokens per second.
        graphs: CUDA graphs for decode steps; "auto" has them on a GPU.
        batch_invariant: a request's logits are bit-equal whatever shares its batch. Prompts are then cut at multiples
            of `chunk_tokens` alone, where others' prefixes are taken up, too, and a request runs only when there is
            room for all that it may become.
        run_ahead: launch a step before the tokens of the one before are read, or where each must be read first, before
            they become text; "auto" does so on a GPU.
        max_queue: samples that may wait.

    Raises:
        InputError: a value out of its range; the message names the option.
    """

    ring_len: int = 16
    state_dtype: str = "float32"
    ring_dtype: str = "auto"
    backend: str = "auto"
    max_rows: int | None = None
    max_context: int | None = None
    page_size: int = 16
    memory_bytes: int | None = None
    snapshot_share: float = 0.3
    chunk_tokens: int = 512
    max_step_tokens: int | None = None
    snapshot_every: int = 256
    prefix_cache: bool = True
    replay: bool = True
    speculate: Literal["ngram", "mtp"] | None = None
    num_draft: int = 3
    fixed_draft: bool = False
    graphs: Literal["auto"] | bool = "auto"
    batch_invariant: bool = False
    run_ahead: Literal["auto"] | bool = "auto"
    max_queue: int = 4096

    def __post_init__(self) -> None:
        _integer("ring_len", self.ring_len, 1, MAX_RING_LEN)
        check_one_of("state_dtype", self.state_dtype, STATE_DTYPES)
        check_one_of("ring_dtype", self.ring_dtype, RING_DTYPES)
        check_one_of("backend", self.backend, BACKENDS)
        for name, least in (("max_rows", 1), ("max_context", 2), ("memory_bytes", 1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), least)
        _integer("page_size", self.page_size, 1, 1024)
        for name in ("chunk_tokens", "snapshot_every"):
            _integer(name, getattr(self, name), self.page_size)
            if getattr(self, name) % self.page_size:
                raise InputError(
                    f"{name} is {getattr(self, name)}: a multiple of page_size = {self.page_size} is wanted"
                )
        _integer("max_queue", self.max_queue, 1)
        if not 0 <= self.snapshot_share < 1:
            raise InputError(f"snapshot_share is {self.snapshot_share}: it must be at least 0 and below 1")
        for name in ("prefix_cache", "replay", "batch_invariant", "fixed_draft"):
            check_one_of(name, getattr(self, name), (True, False))
        for name in ("graphs", "run_ahead"):
            check_one_of(name, getattr(self, name), ("auto", True, False))
        self._check_speculation()
        self._check_step()

    def _check_step(self) -> None:
        if self.max_step_tokens is None:
            return
        _integer("max_step_tokens", self.max_step_tokens, 1)
        least = self.least_step_tokens
        if self.max_step_tokens < least:
            rows = "" if self.max_rows is None else f" for max_rows = {self.max_rows}"
            raise InputError(f"max_step_tokens is {self.max_step_tokens}: it must be at least {least}{rows}")

    def _check_speculation(self) -> None:
        _integer("num_draft", self.num_draft, 1, MAX_DRAFT)
        if self.speculate is None:
            return
        check_one_of("speculate", self.speculate, SPECULATE)
        if not self.replay:
            raise InputError("speculate and replay=False were both given: drafts are rolled back by replay, choose one")
        if self.batch_invariant:
            raise InputError("speculate and batch_invariant were both given: what is drafted changes a step's sizes")

    @property
    def flush_period(self) -> int:
        """Tokens between writes of a state."""
        return self.ring_len if self.replay else 1

    @property
    def least_piece(self) -> int:
        """Tokens of a prompt that a step has room for, at least."""
        return self.chunk_tokens if self.batch_invariant else self.page_size

    @property
    def least_step_tokens(self) -> int:
        """Room for all rows, as far as their number is given, and for a piece of a prompt."""
        return (self.max_rows or 1) * self.max_window + self.least_piece

    @property
    def max_window(self) -> int:
        """The longest verify window: the last token and the drafts behind it."""
        return 1 + self.num_draft if self.speculate else 1


def _integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} is {value!r}: a whole number is wanted")
    check_between(name, value, least, most)
