"""The parts of an engine, made for a model and its options."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from replayssm.engine.drafts import Drafts, NgramDrafts
from replayssm.engine.memory import CPU_ROWS, GPU_ROWS, Costs, MemoryPlan, budget_bytes, plan_memory
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
    if isinstance(drafts, MtpDrafts):
        drafts.allocate(plan.num_pages, plan.max_rows)
    device = runner.pool.device
    pages = PagePool(plan.num_pages)
    cache = PrefixCache(pages, runner.pool, options.page_size) if options.prefix_cache else None
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
        cache,
        Scheduler(runner.pool, pages, cache, limits),
        Sampler(runner.vocab_size, device, plan.max_rows),
        RowTables(plan.max_rows, plan.max_pages_per_row, device),
        drafts,
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


def _plan(
    loaded: LoadedModel, options: EngineOptions, settings: dict[str, Any], runner_class: Any, drafts: Drafts | None
) -> MemoryPlan:
    per_slot, per_page = runner_class.bytes_per(loaded, **settings)
    config = loaded.model.config.get_text_config(decoder=True)
    per_row = 0
    if settings["graphs"]:
        # Fixed buffers for logits and hidden states, and what the model itself makes of them in a captured graph.
        one = 4 * config.vocab_size + loaded.model.dtype.itemsize * config.hidden_size
        per_row = 2 * one * options.max_window
    if isinstance(drafts, MtpDrafts):
        per_page, per_row = per_page + drafts.bytes_per_page, per_row + drafts.bytes_per_row
    costs = Costs(per_slot, per_page, lambda rows: Sampler.max_bytes(config.vocab_size, rows) + rows * per_row)
    budget = budget_bytes(options, loaded.device, _forward_bytes(config, options, loaded.model.dtype.itemsize))
    context = getattr(config, "max_position_embeddings", None) or UNBOUNDED_CONTEXT
    return plan_memory(options, costs, budget, context, CPU_ROWS if loaded.device == "cpu" else GPU_ROWS)


def _forward_bytes(config: Any, options: EngineOptions, itemsize: int) -> int:
    """A generous estimate of what the largest forward takes: some tensors of all its tokens, and the logits."""
    widest = max(getattr(config, "intermediate_size", 0) or 0, 4 * config.hidden_size)
    return options.max_step_tokens * (16 * widest * itemsize) + 2 * 4 * config.vocab_size * GPU_ROWS


def _drafts(loaded: LoadedModel, options: EngineOptions) -> Drafts | None:
    if options.speculate == "ngram":
        return NgramDrafts(loaded.device)
    if options.speculate == "mtp":
        return MtpDrafts(loaded, options.page_size, options.max_window)
    return None
