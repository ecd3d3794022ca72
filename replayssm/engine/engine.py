"""The engine: requests in, steps, updates out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from collections.abc import Sequence as Sequence_
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from replayssm.engine.contents import is_finite
from replayssm.engine.draft_length import Pace
from replayssm.engine.errors import EngineClosed, QueueFull
from replayssm.engine.handover import Imported, export_prefix, export_request, import_session
from replayssm.engine.intake import Intake, Prompt
from replayssm.engine.launch import Launched, Launcher
from replayssm.engine.offline import serve
from replayssm.engine.options import EngineOptions
from replayssm.engine.outputs import FinishReason, RequestOutput, Update
from replayssm.engine.params import SamplingParams
from replayssm.engine.reader import Reader
from replayssm.engine.request import Request, Sequence
from replayssm.engine.scheduler import STEPS_PER_PRIORITY, Plan
from replayssm.engine.session import fingerprint
from replayssm.engine.setup import build
from replayssm.engine.stats import EngineStats, Tally
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel, load_model
from replayssm.options import LoadOptions

logger = logging.getLogger(__name__)

OnUpdate = Callable[[Update], None]


class Engine:
    """Serves many requests at once with one model.

    Methods are for one thread; :class:`AsyncEngine` runs an engine beside an event loop.

    Args:
        model: a bundled model's name, a folder in transformers' format, or a loaded model, which then belongs to the
            engine until :meth:`close`. An engine that is garbage gives it back, too, with replay enabled.
        options: how it is set up.
        load: how the model is loaded, if it isn't yet.
        runner: the class that runs the model; tests have one of their own.

    Raises:
        InputError: the model can't be served, or not with these options.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        options: EngineOptions | None = None,
        load: LoadOptions | None = None,
        *,
        runner: Any = None,
    ) -> None:
        self.options = options if options is not None else EngineOptions()
        _check_given(model, self.options, load)
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, load)
        parts = build(self.loaded, self.options, runner)
        self.plan = parts.plan
        self.max_context = parts.plan.max_context
        self.runner, self.pages, self.cache, self.scheduler = parts.runner, parts.pages, parts.cache, parts.scheduler
        self.intake = Intake(self.loaded, self.runner.vocab_size, self.max_context)
        self.launcher = Launcher(
            self.runner,
            parts.sampler,
            parts.tables,
            self.intake.constraints,
            parts.drafts,
            parts.lengths,
            self.loaded.eos_token_ids,
        )
        self.run_ahead = self.options.run_ahead
        if self.run_ahead == "auto":
            self.run_ahead = self.loaded.device != "cpu"
        self.pace = Pace(parts.lengths) if parts.lengths is not None else None
        self.requests: dict[str, Request] = {}
        self.closed = False
        self._arrivals = 0
        self._pending: list[Update] = []  # that the next step gives, or this one at its end
        self._launched: list[Launched] = []  # by the last step, not read yet
        self._tally = Tally()
        self.reader = Reader(self._tally, self.pace, self._leave, self._discard, self._close)
        self._log_start()

    def _log_start(self) -> None:
        name, made_for = self.loaded.name, self.loaded.max_context
        logger.info("%s on %s, %s", name, self.loaded.device, self.plan, extra={"event": "engine_ready"})
        if made_for is not None and self.max_context > made_for:
            told = "contexts may have %d tokens: %s was made for %d, and may write nonsense behind those"
            logger.warning(told, self.max_context, name, made_for, extra={"event": "context_beyond_model"})

    # Requests

    def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> str:
        """Queue a request.

        Args:
            prompt: text or token ids.
            params: how its samples are drawn.
            request_id: a name that no other request has, until its last update was given; None makes one up.
            priority: from −100 to 100. A point more is worth waiting for `STEPS_PER_PRIORITY` steps.

        Returns:
            Its name.

        Raises:
            QueueFull: as many samples wait as may.
            InputError: the request can't be served; nothing was queued.
        """
        request = self.prepare(prompt, params or SamplingParams(), request_id, priority)
        self.enqueue(request)
        return request.id

    def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int) -> Request:
        """A request that was checked, but isn't queued."""
        if self.closed:
            raise EngineClosed("the engine is closed and takes no more requests")
        if not isinstance(params, SamplingParams):
            raise InputError(f"params is a {type(params).__name__}: SamplingParams are wanted")
        if params.n > self.options.max_queue:
            raise InputError(f"n is {params.n}: at most max_queue = {self.options.max_queue} samples may wait")
        return self.intake.request(prompt, params, request_id, priority)

    def enqueue(self, request: Request) -> None:
        """Queue a request from :meth:`prepare`."""
        if request.id in self.requests:
            raise InputError(f"request_id {request.id!r} is that of a request that isn't finished: another is wanted")
        if any(update.request_id == request.id for update in self._pending):
            raise InputError(
                f"request_id {request.id!r} is that of a request whose last updates the next step gives: "
                "another is wanted, or that step first"
            )
        if not self.has_room_for(request):
            raise QueueFull(
                f"{self.scheduler.num_waiting} samples wait already and the request has {request.params.n}: "
                f"at most max_queue = {self.options.max_queue} may"
            )
        self._arrivals += 1
        request.turn = (self._tally.steps - STEPS_PER_PRIORITY * request.priority, self._arrivals)
        request.arrived = time.monotonic()
        request.open = len(request.sequences)
        self.requests[request.id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def has_room_for(self, request: Request) -> bool:
        """Whether a request's samples may wait."""
        return self.scheduler.num_waiting + request.params.n <= self.options.max_queue

    def cancel(self, request_id: str) -> bool:
        """End a request; the next step gives an update with finish reason "abort" for each sample that wasn't done.

        Returns:
            Whether there was such a request.
        """
        self._tell()
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._tally.cancelled += 1
        self._end_request(request, "abort")
        return True

    def drop(self, request_ids: Set[str], later: Sequence_[Update] = ()) -> None:
        """Cancel requests without a word.

        Args:
            request_ids: those that are done already are left alone.
            later: updates of others, for the next step to give.
        """
        for request_id in request_ids:
            self.cancel(request_id)
        self._pending = [*later, *(update for update in self._pending if update.request_id not in request_ids)]

    def end_all(self, reason: FinishReason, message: str | None = None) -> None:
        """End all requests; the next step gives their last updates."""
        self._tell()
        for request in list(self.requests.values()):
            self._end_request(request, reason, message)

    def take_updates(self) -> list[Update]:
        """What the next step would give without doing anything, to have it before or without that step."""
        updates, self._pending = self._pending, []
        return updates

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; of a closed engine none does."""
        if self.closed:
            return False
        return bool(self._pending or self._launched or self.reader.has_more) or self.scheduler.has_work

    @property
    def waited_seconds(self) -> float:
        """Seconds in which the host did nothing but wait for the device."""
        return self._tally.waited_seconds

    def generate(
        self,
        prompts: Sequence_[Prompt],
        params: SamplingParams | Sequence_[SamplingParams] | None = None,
        *,
        on_update: OnUpdate | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Serve some prompts and wait for all of them.

        Args:
            prompts: texts or lists of token ids.
            params: for all of them, or for each its own.
            on_update: called with each update as it comes.
            progress: show a bar on standard error.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InputError: one of the requests can't be served; none was begun.
        """
        if isinstance(prompts, str):
            raise InputError("prompts is one string: a list of prompts is wanted")
        each = params if isinstance(params, Sequence_) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(prompts)} prompts and {len(each)} params were given: one for each is wanted")
        requests = [self.prepare(prompt, one, None, 0) for prompt, one in zip(prompts, each, strict=True)]
        return serve(self, requests, on_update, progress=progress)

    # Steps

    def step(self) -> list[Update]:
        """One step: decode what runs, go on with prompts, let waiting requests join.

        Running ahead, the tokens that it returns are those of the step before, which the device has computed while the
        host got this one ready.

        Raises:
            Exception: the step failed. All samples that ran end, with updates that the next step gives; the engine can
                go on.
        """
        if self.closed:
            raise EngineClosed("the engine is closed")
        try:
            self._step()
        except BaseException as error:
            self._fail(error)
            raise
        return self.take_updates()

    def _step(self) -> None:
        self._tally.steps += 1
        drafting = self._is_drafting()
        ahead = self.run_ahead and not drafting and not any(sequence.constraint for sequence in self.scheduler.running)
        busy = False if ahead else self._read_launched()
        if self.pace is not None:
            self.pace.begin()
        plan = self.scheduler.plan()
        launched = self._launch(plan, ahead=ahead, drafting=drafting)
        busy |= self._tell()  # while the device computes
        if ahead:
            busy |= self._read_launched()
            self._launched = launched
        else:
            self._launched = launched
            busy |= self._read_launched()
        if ahead or not self.run_ahead:
            self._tell()
        self._note_pace(plan, launched, ahead=ahead, drafting=drafting)
        for sequence in plan.decode:
            if self.scheduler.at_snapshot(sequence):
                self.scheduler.keep(sequence)
        if plan.empty and not busy and self.scheduler.has_work:
            raise RuntimeError("the engine stands still: requests wait, and none can run")

    def _is_drafting(self) -> bool:
        """Whether the next step may have drafts."""
        if self.pace is None:
            return self.launcher.drafts is not None
        running = len(self.scheduler.running)
        return running > 0 and self.pace.lengths.begin(running)

    def _note_pace(self, plan: Plan, launched: list[Launched], *, ahead: bool, drafting: bool) -> None:
        if self.pace is not None:
            rows = 0 if plan.rounds or plan.joined else len(plan.decode)
            num_drafts = max(launched[0].num_drafts or [0]) if rows else 0
            self.pace.end(rows, num_drafts, ahead=ahead, drafting=drafting)

    def _launch(self, plan: Plan, *, ahead: bool, drafting: bool) -> list[Launched]:
        """Everything that the device has to do for a plan."""
        now = time.monotonic()
        for sequence in plan.joined:
            self._joined(sequence.request, now)
            self.launcher.join(sequence)
        launched: list[Launched] = []
        pieces = [piece for of_round in plan.rounds for piece in of_round]
        if pieces:
            launched += self.launcher.prefill(pieces, ahead=ahead)
        for piece in pieces:
            self.scheduler.prefilled(piece)
            self._tally.prefilled_tokens += piece.end - piece.start
        if plan.decode:
            launched.append(self.launcher.decode(plan.decode, plan.windows, ahead=ahead, drafting=drafting))
        self._tally.batch = len(plan.decode)
        return launched

    def _joined(self, request: Request, now: float) -> None:
        if request.started is None:
            request.started = now
            cached = request.cached_tokens or 0
            self._tally.prompt_tokens += len(request.prompt)
            self._tally.cached_tokens += cached
            self._tally.cache_hits += cached > 0

    def _read_launched(self) -> bool:
        """Take the tokens of the last step that was launched, waiting for them. Says whether there were any."""
        launched, self._launched = self._launched, []
        self.reader.take(launched)
        return bool(launched)

    def _tell(self) -> bool:
        """Make updates of what was taken. Says whether there was anything."""
        told = self.reader.has_more
        for update in self.reader.tell():
            self._pending.append(update)
        return told

    # Ends

    def _leave(self, sequence: Sequence) -> None:
        """A sequence is done: give back what it holds."""
        if sequence.row >= 0:
            self.launcher.leave(sequence.row)
        self.scheduler.finish(sequence)
        if sequence.request.finished:
            sequence.request.ended = time.monotonic()

    def _discard(self, sequence: Sequence) -> None:
        """A sequence's logits were broken: nothing that it has left may serve another."""
        pages = sequence.pages
        self._leave(sequence)
        if self.cache is not None:
            self.cache.drop(sequence.tokens, lambda slot, its: not is_finite(self.runner, slot, its))
        self.launcher.wipe([page for page in pages if self.pages.is_free(page)])

    def _close(self, request: Request) -> None:
        """The last update of one of a request's samples is made."""
        request.open -= 1
        if not request.open:
            del self.requests[request.id]

    def _end_request(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        for sequence in request.sequences:
            if not sequence.finished:
                self._pending.append(self._end(sequence, reason, message))

    def _end(self, sequence: Sequence, reason: FinishReason, message: str | None = None) -> Update:
        """End a sequence before its time."""
        text = sequence.text.finish()
        if not sequence.finished:
            self._leave(sequence)
        self._close(sequence.request)
        return Update(sequence.request.id, sequence.index, text, (), (), reason, None, message)

    def _fail(self, error: BaseException) -> None:
        """A step broke off: nobody knows what slots and pages hold, so all that ran end, and prefixes are forgotten."""
        message = f"the engine failed: {type(error).__name__}: {one_line(error)}"
        self._launched = []
        self.scheduler.failed()
        with suppress(Exception):  # what failed may fail here, too
            self._tell()
        for sequence in [*self.reader.forget(), *self.scheduler.running]:
            self._pending.append(self._end(sequence, "error", message))
        for request in self.requests.values():
            for sequence in request.sequences:
                sequence.in_flight = 0  # of those that were preempted: what is lost is drawn again
        if self.cache is not None:
            self.cache.clear()

    # Sessions

    def export_session(self, what: str | Sequence_[int], path: str | Path) -> int:
        """Write tokens with their states, keys and values to a file, to go on from in another process.

        Args:
            what: the name of a request that isn't finished, which goes on here, too; or token ids, of which the prefix
                cache has a prefix.
            path: of the safetensors file.

        Returns:
            How many tokens it holds.

        Raises:
            InputError: there is nothing to write, or it can't be written.
        """
        self._read_launched()
        if isinstance(what, str):
            return export_request(self, what, path)
        return export_prefix(self, what, path)

    def import_session(self, path: str | Path, *, request_id: str | None = None) -> Imported:
        """Take a session in: a request goes on where it was, with new tokens only; a prefix waits in the cache.

        Args:
            path: of a file that :meth:`export_session` wrote.
            request_id: a new name for the request; None makes one up.

        Raises:
            InputError: the file isn't whole, or not of this model and setup, or there is no room; nothing has changed.
        """
        return import_session(self, path, request_id)

    @cached_property
    def fingerprint(self) -> str:
        """What tells this engine's model from others."""
        return fingerprint(self.loaded)

    def stats(self) -> EngineStats:
        """What the engine has done and holds. It waits for the device, so don't ask at every step."""
        pool, scheduler = self.runner.pool, self.scheduler
        return EngineStats(
            queued=scheduler.num_waiting,
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            pages_total=self.pages.num_pages,
            pages_free=self.pages.num_free,
            slots_total=pool.num_slots,
            slots_free=pool.num_free,
            snapshots=len(self.cache.recent) if self.cache else 0,
            evictions=self.cache.evictions if self.cache else 0,
            counters=pool.counters(),
            **asdict(self._tally),
        )

    def close(self) -> None:
        """Give the model back as it was. Requests that aren't done are dropped. The memory goes with the engine."""
        if not self.closed:
            self.closed = True
            self.requests.clear()
            self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_given(model: Any, options: Any, load: Any) -> None:
    """Refuse other objects than the constructor wants, such as a transformers model or a dict of options."""
    for name, value, kinds, wanted in (
        ("model", model, (str, Path, LoadedModel), "a name, a folder, or a model from replayssm.loading.load_model"),
        ("options", options, (EngineOptions,), "EngineOptions"),
        ("load", load, (LoadOptions, type(None)), "LoadOptions"),
    ):
        if not isinstance(value, kinds):
            raise InputError(f"{name} is a {type(value).__name__}: {wanted} is wanted")
