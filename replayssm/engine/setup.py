"""The parts of an engine, made for a model and its options."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from replayssm.engine.draft_length import DraftLength
from replayssm.engine.drafts import Drafts, NgramDrafts
from replayssm.engine.memory import (
    CPU_ROWS,
    GPU_ROWS,
    Costs,
    MemoryPlan,
    budget_bytes,
    check_free,
    plan_memory,
    step_tokens,
)
from replayssm.engine.mtp import MtpDrafts
from replayssm.engine.options import EngineOptions
from replayssm.engine.pages import PagePool
from replayssm.engine.prefix import PrefixCache
from replayssm.engine.sampler import Sampler
from replayssm.engine.scheduler import Limits, Scheduler
from replayssm.engine.tables import RowTables
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel

UNBOUNDED_CONTEXT = 131_072  # of a model that sets no limit itself: without attention there is none


class Parts(NamedTuple):
    """What an engine is made of."""

    plan: MemoryPlan
    runner: Any
    pages: PagePool
    cache: PrefixCache | None
    scheduler: Scheduler
    sampler: Sampler
    tables: RowTables
    drafts: Drafts | None
    lengths: DraftLength | None


def build(loaded: LoadedModel, options: EngineOptions, runner_class: Any = None) -> Parts:
    """Divide the memory, and make everything that takes some.

    Args:
        loaded: the model.
        options: of the engine.
        runner_class: instead of :class:`replayssm.engine.runner.Runner`.

    Raises:
        InputError: the model can't be served, or not with these options.
    """
    if runner_class is None:
        from replayssm.engine.runner import Runner

        runner_class = Runner
    settings = _settings(loaded, options)
    try:
        options = _with_step(loaded, options, settings, runner_class)
        drafts = _drafts(loaded, options)
        plan = _plan(loaded, options, settings, runner_class, drafts)
        runner = runner_class(
            loaded,
            num_slots=plan.num_slots,
            num_pages=plan.num_pages,
            max_rows=plan.max_rows,
            max_pages_per_row=plan.max_pages_per_row,
            **settings,
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"the engine can't be set up: {one_line(error)}") from error
    try:
        return _around(runner, plan, options, drafts)
    except BaseException:
        runner.close()
        raise


def _around(runner: Any, plan: MemoryPlan, options: EngineOptions, drafts: Drafts | None) -> Parts:
    """All that the engine has besides its runner."""
    if isinstance(drafts, MtpDrafts):
        drafts.allocate(plan.num_pages, plan.max_rows)
    assert options.max_step_tokens is not None
    device = runner.pool.device
    pages = PagePool(plan.num_pages)
    prefixes = PrefixCache(pages, runner.pool, options.page_size) if options.prefix_cache else None
    limits = Limits(
        max_rows=plan.max_rows,
        page_size=options.page_size,
        chunk_tokens=options.chunk_tokens,
        max_step_tokens=options.max_step_tokens,
        snapshot_every=options.snapshot_every,
        max_window=options.max_window,
        invariant=options.batch_invariant,
    )
    return Parts(
        plan,
        runner,
        pages,
        prefixes,
        Scheduler(runner.pool, pages, prefixes, limits),
        Sampler(runner.vocab_size, device, plan.max_rows),
        RowTables(plan.max_rows, plan.max_pages_per_row, device),
        drafts,
        DraftLength(options.num_draft) if drafts is not None and not options.fixed_draft else None,
    )


def _settings(loaded: LoadedModel, options: EngineOptions) -> dict[str, Any]:
    """What the runner wants to know, apart from how many of everything."""
    ring_len = options.flush_period
    return {
        "page_size": options.page_size,
        "ring_len": ring_len,
        # A ring is folded when a window doesn't fit: with room for two, most windows find some.
        "ring_capacity": max(ring_len, 2 * options.max_window) if options.speculate else ring_len,
        "max_window": options.max_window if options.speculate else 0,
        "state_dtype": getattr(torch, options.state_dtype),
        "ring_dtype": options.ring_dtype if options.ring_dtype == "auto" else getattr(torch, options.ring_dtype),
        "backend": options.backend,
        "graphs": loaded.device != "cpu" if options.graphs == "auto" else options.graphs,
        "batch_invariant": options.batch_invariant,
    }


def _with_step(
    loaded: LoadedModel, options: EngineOptions, settings: dict[str, Any], runner_class: Any
) -> EngineOptions:
    """The options with a number of tokens for a step."""

    def forward(tokens: int) -> int:
        found: int = runner_class.bytes_fixed(loaded, max_rows=1, max_step_tokens=tokens, **settings)
        return found

    budget = budget_bytes(options, loaded.device)
    return replace(options, max_step_tokens=step_tokens(options, loaded.device, budget, forward))


def just_enough(loaded: LoadedModel, options: EngineOptions) -> EngineOptions:
    """The options with the memory with which `max_rows` sequences of `max_context` tokens, which must be set, run.

    Snapshots come on top of it.
    """
    from replayssm.engine.runner import Runner

    rows, context = options.max_rows, options.max_context
    if rows is None or context is None:
        raise ValueError(f"max_rows is {rows}, max_context {context}: numbers are wanted")
    settings = _settings(loaded, options)
    options = _with_step(loaded, options, settings, Runner)
    costs = _costs(loaded, options, settings, Runner, _drafts(loaded, options))
    pages = rows * -(-context // options.page_size)
    return replace(options, memory_bytes=costs.work(rows) + rows * costs.slot + pages * costs.page)


def _plan(
    loaded: LoadedModel, options: EngineOptions, settings: dict[str, Any], runner_class: Any, drafts: Drafts | None
) -> MemoryPlan:
    costs = _costs(loaded, options, settings, runner_class, drafts)
    context = loaded.max_context or UNBOUNDED_CONTEXT
    most_rows = CPU_ROWS if loaded.device == "cpu" else GPU_ROWS
    plan = plan_memory(options, costs, budget_bytes(options, loaded.device), context, most_rows)
    check_free(plan, loaded.device)
    return plan


def _costs(
    loaded: LoadedModel, options: EngineOptions, settings: dict[str, Any], runner_class: Any, drafts: Drafts | None
) -> Costs:
    per_slot, per_page = runner_class.bytes_per(loaded, **settings)
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    mtp = drafts if isinstance(drafts, MtpDrafts) else None

    @cache
    def work(rows: int) -> int:
        forward = 0
        if loaded.device != "cpu":  # there it is host memory like any other, and comes and goes
            forward = runner_class.bytes_fixed(
                loaded, max_rows=rows, max_step_tokens=options.max_step_tokens, **settings
            )
        return forward + Sampler.max_bytes(vocab_size, rows) + (rows * mtp.bytes_per_row if mtp else 0)

    return Costs(per_slot, per_page + (mtp.bytes_per_page if mtp else 0), work)


def _drafts(loaded: LoadedModel, options: EngineOptions) -> Drafts | None:
    if options.speculate == "ngram":
        return NgramDrafts(loaded.device)
    if options.speculate == "mtp":
        return MtpDrafts(loaded, options.page_size, options.max_window)
    return None
