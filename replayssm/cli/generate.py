"""Generate text with a loaded model: through the engine, or through transformers' own step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from replayssm.cli.speculative import Speculation, generate_with_drafts
from replayssm.cli.upstream import Clock, generate_stepwise
from replayssm.engine import Engine, EngineOptions, EngineStats, SamplingParams, Update
from replayssm.engine.setup import just_enough
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel, context_of, load_config, load_tokenizer, quiet_libraries, settled
from replayssm.loading.folder import find_model
from replayssm.models.support import find_adapters
from replayssm.options import GenerateOptions, LoadOptions, check_prompt
from replayssm.speculate import check_vocabularies
from replayssm.state import LayerSpec

OnText = Callable[[str], None]

CHUNK_TOKENS = 2048  # of a prompt, computed at once


class GenerateResult(BaseModel):
    """What one generation gave and what it cost.

    Byte counts are of recurrent state, all linear layers together; a prefill writes its state once for each piece of
    the prompt, in every count. ``state_bytes_written_stepwise`` is what a state update at every token writes. Without
    replay ``backend`` is ``"transformers"`` and ``ring_len`` is 1: each step writes the state. With speculation a step
    is a window.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    finish_reason: Literal["stop", "length"]
    ring_len: int
    backend: str
    device: str
    dtype: str
    state_dtype: str
    flushes: int
    decode_steps: int
    state_bytes_read: int
    state_bytes_written: int
    state_bytes_written_stepwise: int
    state_bytes_copied: int
    ring_bytes_read: int
    ring_bytes_written: int
    seconds: float
    prefill_seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    speculation: Speculation | None = None


class Generated(NamedTuple):
    """What every way to generate gives.

    Attributes:
        token_ids: the new ones.
        prefill_seconds, seconds: up to the first token, and to the last.
        counted: settings and counters, by the result's names.
        speculation: what it did.
    """

    token_ids: list[int]
    prefill_seconds: float
    seconds: float
    counted: dict[str, Any]
    speculation: Speculation | None = None


def generate(
    loaded: LoadedModel, prompt: str | list[int], options: GenerateOptions | None = None, on_text: OnText | None = None
) -> GenerateResult:
    """Generate one continuation of `prompt`.

    Args:
        loaded: From :func:`replayssm.loading.load_model`; its model is left as it was.
        prompt: The text to continue, or with ``options.chat`` the user's message; or the tokens of it.
        options: See :class:`GenerateOptions`.
        on_text: Called with each new piece of text as soon as it is final.

    Raises:
        InputError: one line that says what was given and what is wanted.
    """
    options = options or GenerateOptions()
    _check_ring_dtype(options.ring_dtype, loaded.dtype)
    layers = _recurrent_layers(loaded.model)
    params = _sampling(options)
    with quiet_libraries():
        tokens = _encode(loaded.tokenizer, loaded.name, prompt, chat=options.chat)
        _check_length(loaded.name, loaded.max_context, len(tokens), options.max_new_tokens)
        if not options.replay:
            done = _stepwise(loaded, tokens, params, layers, on_text)
        elif options.speculate == "draft" or (options.speculate is not None and options.tree > 1):
            done = _with_drafts(loaded, tokens, options, on_text)
        else:
            done = _with_engine(loaded, tokens, options, params, on_text)
    new_tokens = len(done.token_ids)
    stopped = not options.ignore_eos and bool(done.token_ids) and done.token_ids[-1] in loaded.eos_token_ids
    return GenerateResult(
        model=loaded.name,
        text=loaded.tokenizer.decode(done.token_ids, skip_special_tokens=True),
        token_ids=done.token_ids,
        prompt_tokens=len(tokens),
        new_tokens=new_tokens,
        finish_reason="stop" if stopped else "length",
        device=loaded.device,
        dtype=loaded.dtype,
        seconds=done.seconds,
        prefill_seconds=done.prefill_seconds,
        tokens_per_second=new_tokens / done.seconds,
        decode_tokens_per_second=(new_tokens - 1) / (done.seconds - done.prefill_seconds) if new_tokens > 1 else 0.0,
        speculation=done.speculation,
        **done.counted,
    )


def check_request(model: str, prompt: str, options: GenerateOptions, load: LoadOptions) -> tuple[Any, list[int]]:
    """Refuse, before a model's weights are loaded, what :func:`generate` would refuse behind them.

    Args:
        model: a model that was checked.
        prompt: a text, see :func:`generate`.
        options: as for :func:`generate`.
        load: how the model is going to be loaded.

    Returns:
        The model's tokenizer, and the prompt's tokens.

    Raises:
        InputError: one line that says what was given and what is wanted.
    """
    folder = find_model(model)
    with quiet_libraries():
        _, dtype = settled(load)
        if dtype != "auto":
            _check_ring_dtype(options.ring_dtype, dtype)
        config, tokenizer = load_config(folder), load_tokenizer(folder)
        tokens = _encode(tokenizer, model, prompt, chat=options.chat)
        _check_length(model, context_of(config), len(tokens), options.max_new_tokens)
        if options.draft_model is not None:
            _check_vocabulary(tokenizer, load_tokenizer(find_model(options.draft_model)))
    return tokenizer, tokens


def _with_engine(
    loaded: LoadedModel, tokens: list[int], options: GenerateOptions, params: SamplingParams, on_text: OnText | None
) -> Generated:
    """One request of an engine that has room for it alone."""

    def on_update(update: Update) -> None:
        if on_text is not None:
            on_text(update.text)

    with _engine(loaded, options, context=len(tokens) + options.max_new_tokens) as engine:
        (output,) = engine.generate([tokens], params, on_update=on_update)
        stats = engine.stats()
        backend = engine.runner.pool.backend
    (completion,) = output.completions
    if completion.finish_reason == "error":
        raise InputError(completion.message or "the engine failed")
    settings = {"ring_len": options.ring_len, "backend": backend, "state_dtype": options.state_dtype}
    return Generated(
        completion.token_ids,
        output.ttft_seconds,
        output.seconds,
        settings | _steps_and_windows(stats.counters),
        _speculation(options, stats),
    )


def _engine(loaded: LoadedModel, options: GenerateOptions, context: int) -> Engine:
    """An engine with one row; its model is as it was once it is closed."""
    wanted: dict[str, Any] = {
        "ring_len": options.ring_len,
        "state_dtype": options.state_dtype,
        "ring_dtype": options.ring_dtype,
        "backend": options.backend,
        "max_rows": 1,
        "max_context": context,
        "chunk_tokens": CHUNK_TOKENS,
        "max_step_tokens": 2 * CHUNK_TOKENS,
        "prefix_cache": False,
        "speculate": options.speculate,
        "num_draft": options.num_draft,
        "fixed_draft": options.fixed_draft,
    }
    return Engine(loaded, just_enough(loaded, EngineOptions(**wanted)))


def _speculation(options: GenerateOptions, stats: EngineStats) -> Speculation | None:
    if options.speculate is None:
        return None
    steps = stats.counters["decode_steps"] + stats.counters["verify_steps"]
    return Speculation(
        drafter=options.speculate,
        num_draft=options.num_draft,
        tree=1,
        steps=steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_length=1 + stats.accepted / stats.windows if stats.windows else 1.0,
        tokens_per_step=(stats.generated_tokens - 1) / steps if steps else 0.0,  # the first is the prefill's
    )


def _with_drafts(loaded: LoadedModel, tokens: list[int], options: GenerateOptions, on_text: OnText | None) -> Generated:
    """Drafts that the engine doesn't have: of a second model, or with several candidates for a place."""
    clock = Clock(loaded.tokenizer, len(tokens), on_text)
    token_ids, speculation, pool = generate_with_drafts(loaded, tokens, options, clock)
    seconds = time.perf_counter() - clock.start
    settings = {"ring_len": pool.ring_len, "backend": pool.backend, "state_dtype": options.state_dtype}
    counted = settings | _steps_and_windows(pool.counters())
    return Generated(token_ids, clock.prefill_seconds, seconds, counted, speculation)


def _stepwise(
    loaded: LoadedModel, tokens: list[int], params: SamplingParams, layers: list[LayerSpec], on_text: OnText | None
) -> Generated:
    """transformers' own generate."""
    clock = Clock(loaded.tokenizer, len(tokens), on_text)
    token_ids = generate_stepwise(loaded, tokens, params, clock)
    seconds = time.perf_counter() - clock.start
    settings = {"ring_len": 1, "backend": "transformers", "state_dtype": "float32"}
    counted = settings | stepwise_counters(layers, decode_steps=len(token_ids) - 1)
    return Generated(token_ids, clock.prefill_seconds, seconds, counted)


def _steps_and_windows(counters: dict[str, int]) -> dict[str, int]:
    """A pool's counters, in which a window counts as a step, and a fold as a flush."""
    return counters | {
        "flushes": counters["flushes"] + counters["folds"],
        "decode_steps": counters["decode_steps"] + counters["verify_steps"],
    }


def stepwise_counters(layers: list[LayerSpec], decode_steps: int) -> dict[str, int]:
    """What one sequence costs when a prefill writes each state, and each step reads and writes it, in float32.

    The names are those of :meth:`replayssm.ReplayPool.counters`.
    """
    state = sum(math.prod(layer.checkpoint_shape) for layer in layers) * torch.float32.itemsize
    return {
        "flushes": decode_steps,
        "decode_steps": decode_steps,
        "state_bytes_read": state * decode_steps,
        "state_bytes_written": state * (decode_steps + 1),
        "state_bytes_written_stepwise": state * (decode_steps + 1),
        "state_bytes_copied": 0,
        "ring_bytes_read": 0,
        "ring_bytes_written": 0,
    }


def _sampling(options: GenerateOptions) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )


def _check_ring_dtype(ring_dtype: str, dtype: str) -> None:
    """Refuse update vectors of a dtype that a model of this dtype has no use for."""
    ring_dtypes = ("auto", *dict.fromkeys(("float32", dtype)))
    if ring_dtype not in ring_dtypes:
        wanted = ", ".join(ring_dtypes)
        raise InputError(f"ring-dtype is {ring_dtype!r}: beside a {dtype} model it must be one of {wanted}")


def _check_vocabulary(tokenizer: Any, draft: Any) -> None:
    """Refuse a draft model with other tokens."""
    try:
        check_vocabularies(tokenizer, draft)
    except ValueError as error:
        raise InputError(one_line(error, limit=400)) from error


def _encode(tokenizer: Any, name: str, prompt: str | list[int], *, chat: bool) -> list[int]:
    """Token ids of the prompt, which it may be already, for the model of this name."""
    if isinstance(prompt, list):
        return prompt
    check_prompt(prompt)
    if chat:
        if not tokenizer.chat_template:
            raise InputError(f"model {name!r} has no chat template: generate without --chat")
        messages = [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is code of the model folder, and may raise anything
            raise InputError(f"the chat template of model {name!r} fails: {one_line(error)}") from error
    else:
        encoded = tokenizer(prompt)
    tokens: list[int] = list(encoded["input_ids"])
    if not tokens:
        raise InputError("the prompt has no tokens after tokenization: at least one is wanted")
    return tokens


def _check_length(name: str, most: int | None, prompt: int, new: int) -> None:
    """Refuse more tokens than the model was made for: it would write nonsense, or read past its tables."""
    if most is not None and prompt + new > most:
        raise InputError(
            f"the prompt has {prompt} tokens and max-new-tokens is {new}: {name} was made for {most} together"
        )


def _recurrent_layers(model: Any) -> list[LayerSpec]:
    try:
        return [adapter.spec for adapter in find_adapters(model)]
    except ValueError as error:
        raise InputError(one_line(error, limit=400)) from error
