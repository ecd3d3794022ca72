"""transformers' own `generate`, for comparison: states are written at every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from replayssm.engine import SamplingParams
from replayssm.engine.randomness import draw_seed
from replayssm.engine.sampler import Sampler
from replayssm.engine.text import Detokenizer
from replayssm.errors import BROKEN_LOGITS, InputError
from replayssm.loading import LoadedModel
from replayssm.models.fallback import on_a_cpu
from replayssm.models.support import find_adapters


def generate_stepwise(loaded: LoadedModel, tokens: list[int], params: SamplingParams, streamer: Clock) -> list[int]:
    """New tokens of one prompt.

    Args:
        loaded: its model is left as it was.
        tokens: of the prompt.
        params: how tokens are drawn; the same seed draws the same tokens as in an engine.
        streamer: gets the prompt, then the tokens as they come.

    Raises:
        InputError: the model's logits are NaN or infinite.
    """
    ids = torch.tensor([tokens], device=loaded.device)
    draws = Draws(loaded, params, streamer)
    with _without_defaults(loaded, params):
        sequences = loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[draws],
            streamer=draws,
            use_cache=True,
        )
    new: list[int] = sequences[0, len(tokens) :].tolist()
    return new


@contextmanager
def _without_defaults(loaded: LoadedModel, params: SamplingParams) -> Iterator[None]:
    """The model with other generation defaults: given to generate(), they would be mixed with the folder's own."""
    from transformers import GenerationConfig

    model, defaults = loaded.model, loaded.model.generation_config
    eos = [] if params.ignore_eos else list(loaded.eos_token_ids)
    pad = loaded.tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=pad if pad is not None else (loaded.eos_token_ids or (0,))[0],
        bos_token_id=defaults.bos_token_id,
    )
    mixers = [adapter.mixer for adapter in find_adapters(model)] if loaded.device == "cpu" else []
    try:
        with on_a_cpu(mixers):
            yield
    finally:
        model.generation_config = defaults


class Draws:
    """A logits processor that leaves the token which the engine's sampler draws, and the streamer that gets it.

    Where logits are broken that is one which the model doesn't have: on the host, where the streamer sees it before the
    model would, looking costs nothing.
    """

    def __init__(self, loaded: LoadedModel, params: SamplingParams, streamer: Clock) -> None:
        self._no_token: int = loaded.model.get_output_embeddings().weight.shape[0]
        fused = False if params.greedy else None  # an argmax is worth no kernel that is compiled while time is taken
        self._sampler = Sampler(self._no_token, loaded.model.device, max_rows=1, fused=fused)
        self._sampler.join(0, params, seed=draw_seed(params), prompt=[])
        self._rows = self._sampler.rows([0])
        self._streamer = streamer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Of scores ``[1, V]``, others ``[1, V + 1]``, of which one is finite."""
        position = input_ids.new_full((1,), input_ids.shape[1])  # waits for nothing, as a copy would
        sampled = self._sampler.sample(scores.float(), self._rows, position)
        token = torch.where(sampled.scores.isfinite(), sampled.tokens, self._no_token)
        return scores.new_full((1, self._no_token + 1), -torch.inf).scatter_(1, token[:, None], 0.0)

    def put(self, value: Tensor) -> None:
        """Tokens came: the prompt first."""
        if self._no_token in value.flatten().tolist():
            raise InputError(BROKEN_LOGITS)
        self._streamer.put(value)

    def end(self) -> None:
        """No more tokens come."""
        self._streamer.end()


class Clock:
    """A transformers streamer: times the first token, and hands out text as it becomes final."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, on_text: Callable[[str], None] | None) -> None:
        self.start = time.perf_counter()
        self.prefill_seconds = 0.0
        self._text = Detokenizer(tokenizer, skip_special_tokens=True)
        self._on_text = on_text
        self._prompt_left = prompt_tokens
        self._has_first = False

    def put(self, value: Tensor) -> None:
        """Tokens came: the prompt first, in one piece or several."""
        ids = value.reshape(-1).tolist()
        new = ids[self._prompt_left :]
        self._prompt_left = max(0, self._prompt_left - len(ids))
        if new and not self._has_first:
            self._has_first = True
            self.prefill_seconds = time.perf_counter() - self.start
        if self._on_text is not None:
            for token in new:
                self._on_text(self._text.append(token))

    def end(self) -> None:
        """No more tokens come."""
        if self._on_text is not None:
            self._on_text(self._text.finish())
