"""`generate` with drafts that the engine doesn't have: of a second model, or with several candidates for a place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from replayssm import models
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel, load_model
from replayssm.loading.folder import check_model
from replayssm.options import GenerateOptions, LoadOptions
from replayssm.speculate import (
    AdaptiveLength,
    Drafter,
    GivenCosts,
    MeasuredCosts,
    ModelDrafter,
    MtpDrafter,
    NgramDrafter,
    Sampling,
    check_vocabularies,
    speculate,
)
from replayssm.speculate.replay import ReplayVerifier
from replayssm.state import ReplayPool


class Speculation(BaseModel):
    """What speculation did; see :class:`replayssm.speculate.Statistics`."""

    model_config = ConfigDict(frozen=True)

    drafter: str
    num_draft: int
    tree: int
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float
    tokens_per_step: float


def generate_with_drafts(
    loaded: LoadedModel, tokens: list[int], options: GenerateOptions, streamer: Any
) -> tuple[list[int], Speculation, ReplayPool]:
    """New tokens of one prompt, and the pool that holds the counters.

    Args:
        loaded: its model is left as it was.
        tokens: of the prompt.
        options: with ``speculate`` set.
        streamer: gets the prompt, then the tokens as they come, as from transformers' `generate`.

    Raises:
        InputError: the drafter that was asked for doesn't fit this model, or the options don't.
    """
    assert options.speculate is not None
    streamer.put(torch.tensor(tokens))
    sampling = generator = None
    if options.temperature > 0:
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
        generator = torch.Generator(loaded.device)
        generator.manual_seed(options.seed if options.seed is not None else int(torch.seed() % 2**63))
    # Measured times choose lengths that differ from run to run, and with them the random numbers that are drawn.
    costs = MeasuredCosts() if sampling is None else GivenCosts()
    try:
        with _enabled(loaded, options), _drafter(loaded, options) as drafter:
            verifier = ReplayVerifier(loaded.model)
            generation = speculate(
                verifier,
                drafter,
                [tokens],
                max_new_tokens=options.max_new_tokens,
                num_drafts=options.num_draft,
                width=options.tree,
                adaptive=None if options.fixed_draft else AdaptiveLength(options.num_draft, costs),
                sampling=sampling,
                generator=generator,
                eos_token_ids=() if options.ignore_eos else loaded.eos_token_ids,
                on_tokens=lambda _, new: streamer.put(torch.tensor(new)),
            )
    except ValueError as error:
        raise InputError(one_line(error, limit=400)) from error
    streamer.end()
    statistics = generation.statistics
    told = Speculation(
        drafter=options.speculate,
        num_draft=options.num_draft,
        tree=options.tree,
        steps=statistics.steps,
        drafted=statistics.drafted,
        accepted=statistics.accepted,
        acceptance_length=statistics.acceptance_length,
        tokens_per_step=statistics.tokens_per_step,
    )
    return generation.tokens[0], told, verifier.cache.require_pool()


@contextmanager
def _enabled(loaded: LoadedModel, options: GenerateOptions) -> Iterator[None]:
    """The model with replay."""
    models.enable(
        loaded.model,
        ring_len=options.ring_len,
        state_dtype=getattr(torch, options.state_dtype),
        ring_dtype=options.ring_dtype if options.ring_dtype == "auto" else getattr(torch, options.ring_dtype),
        backend=options.backend,
    )
    try:
        yield
    finally:
        models.disable(loaded.model)


@contextmanager
def _drafter(loaded: LoadedModel, options: GenerateOptions) -> Iterator[Drafter]:
    if options.speculate == "ngram":
        yield NgramDrafter()
    elif options.speculate == "mtp":
        yield MtpDrafter(loaded.model, check_model(loaded.name))
    else:
        assert options.draft_model is not None
        draft = load_model(options.draft_model, LoadOptions(dtype=loaded.dtype, device=loaded.device))
        check_vocabularies(loaded.tokenizer, draft.tokenizer)
        models.enable(draft.model, ring_len=options.ring_len, backend=options.backend)
        try:
            yield ModelDrafter(ReplayVerifier(draft.model))
        finally:
            models.disable(draft.model)
