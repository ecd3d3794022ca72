"""Engines that are measured beside each other: of one model's weights, each with its own states and pages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.contents import gather
from replayssm.engine.engine import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.outputs import Completion, Update
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Saved
from replayssm.engine.setup import just_enough
from replayssm.loading import LoadedModel

#: Contenders that are engines: with replay, writing states at every token, and with verify windows.
ENGINES = ("replay", "no-replay", "speculate")
SHARE = 0.2  # of an engine's memory, for snapshots, where it keeps prefixes
Tokens = list[int]


@contextmanager
def engines(loaded: LoadedModel, options: dict[str, EngineOptions]) -> Iterator[dict[str, Engine]]:
    """An engine for each options, closed and freed at the end."""
    made: dict[str, Engine] = {}
    try:
        for name, wanted in options.items():
            made[name] = make_engine(loaded, wanted)
        yield made
    finally:
        while made:
            made.popitem()[1].close()
        free_memory()


def make_engine(loaded: LoadedModel, options: EngineOptions) -> Engine:
    """An engine with just the memory that its rows and their context take.

    Its model shares the weights of others, and has layers of its own, which the engine leads to its cache.
    """
    twin = replace(loaded, model=twin_of(loaded.model))
    options = replace(just_enough(twin, options), snapshot_share=SHARE)
    assert options.memory_bytes is not None
    if options.prefix_cache:
        options = replace(options, memory_bytes=int(2 * options.memory_bytes / (1 - SHARE)))
    return Engine(twin, options)


def twin_of(model: Any) -> Any:
    """A copy of a model with the same weights, not copies of them."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def free_memory() -> None:
    """Give memory that nothing holds back to the device."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def random_tokens(vocab_size: int, count: int, seed: int) -> Tokens:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: Tokens = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return tokens


def computed_context(engine: Engine, tokens: Tokens) -> Saved:
    """States, keys and values of some tokens, on the device, from an engine's prefill."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    name = engine.add(tokens, params)
    (sequence,) = engine.requests[name].sequences
    while sequence.done < len(tokens):
        stepped(engine)
    size = engine.runner.page_size
    tensors = gather(engine.runner, sequence.slot, sequence.pages[: -(-len(tokens) // size)])
    device = engine.runner.pool.device
    copies = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}  # on a CPU some are views
    clear(engine)
    return Saved(len(tokens), copies)


def fill(
    engine: Engine, context: Saved, rows: int, new_tokens: int, groups: int, params: SamplingParams | None = None
) -> None:
    """Let rows run whose contexts are copies, so that nothing of them is computed.

    Each row has slots and pages of its own, as after a prefill. They join in groups, one at each step, so that their
    cursors stand at different places.

    Args:
        engine: without requests.
        context: what each row holds, from :func:`computed_context`.
        rows: how many.
        new_tokens: that each may have.
        groups: how many steps they take to join.
        params: how tokens are drawn; None takes the likeliest.
    """
    params = replace(params or SamplingParams(temperature=0.0), max_tokens=new_tokens, ignore_eos=True)
    for group in range(groups):
        for row in range(group, rows, groups):
            tokens = random_tokens(engine.runner.vocab_size, context.done + 1, seed=row)
            request = engine.prepare(tokens, params, None, 0)
            request.sequences[0].saved = context
            engine.enqueue(request)
        stepped(engine)


def stepped(engine: Engine) -> list[Update]:
    """A step's updates.

    Raises:
        RuntimeError: a sample ended with an error.
    """
    updates = engine.step()
    check_ends(updates)
    return updates


def check_ends(parts: Iterable[Update | Completion]) -> None:
    """Refuse to go on where a sample ended with an error: what it took says nothing."""
    for part in parts:
        if part.finish_reason == "error":
            raise RuntimeError(part.message)


def clear(engine: Engine) -> None:
    """End all requests, and take their last updates."""
    engine.end_all("abort")
    while engine.has_work:
        engine.step()


def row_tensors(engine: Engine, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots ``[B]``, page table ``[B, P]`` and lengths ``[B]``, int32, to run the last tokens of all rows once more.

    Args:
        engine: whose rows decode.
        window: tokens that each row runs.
    """
    running, device = engine.scheduler.running, engine.runner.pool.device
    width = max(1, *(len(sequence.pages) for sequence in running))
    pages = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in running]
    columns = ([sequence.slot for sequence in running], pages, [sequence.done - window for sequence in running])
    slots, table, lengths = (torch.tensor(column, dtype=torch.int32, device=device) for column in columns)
    return slots, table, lengths
