"""Generate text with a loaded model, through checkpoint and ring or through transformers' own step."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from replayssm import models, ops
from replayssm.cli.speculative import Speculation, generate_with_drafts
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel, quiet_libraries
from replayssm.models.fallback import on_a_cpu
from replayssm.models.support import find_adapters
from replayssm.options import GenerateOptions, check_prompt
from replayssm.state import LayerSpec

OnText = Callable[[str], None]


class GenerateResult(BaseModel):
    """What one generation gave and what it cost.

    Byte counts are of recurrent state, all linear layers together; a prefill writes its state once, in every count.
    ``state_bytes_written_stepwise`` is what a state update at every token writes. Without replay ``backend`` is
    ``"transformers"`` and ``ring_len`` is 1: each step writes the state. With speculation a step is a window.
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


def generate(
    loaded: LoadedModel, prompt: str, options: GenerateOptions | None = None, on_text: OnText | None = None
) -> GenerateResult:
    """Generate one continuation of `prompt`.

    Args:
        loaded: From :func:`replayssm.loading.load_model`; its model is left as it was.
        prompt: The text to continue, or with ``options.chat`` the user's message.
        options: See :class:`GenerateOptions`.
        on_text: Called with each new piece of text as soon as it is final.

    Raises:
        InputError: one line that says what was given and what is wanted.
    """
    options = options or GenerateOptions()
    check_prompt(prompt)
    ring_dtypes = ("auto", *dict.fromkeys(("float32", loaded.dtype)))
    if options.ring_dtype not in ring_dtypes:
        wanted = ", ".join(ring_dtypes)
        raise InputError(
            f"ring-dtype is {options.ring_dtype!r}: beside a {loaded.dtype} model it must be one of {wanted}"
        )
    layers = _recurrent_layers(loaded.model)
    with quiet_libraries(), _prepared(loaded, options):
        inputs = _encode(loaded, prompt, chat=options.chat)
        prompt_tokens = inputs["input_ids"].shape[1]
        if options.seed is not None:
            torch.manual_seed(options.seed)
        clock = _Clock(loaded.tokenizer, prompt_tokens, on_text)
        cache = speculation = None
        if options.speculate is not None:
            token_ids, speculation, cache = generate_with_drafts(loaded, inputs, options, clock)
        else:
            sequences = loaded.model.generate(**inputs, streamer=clock, use_cache=True)
            token_ids = sequences[0, prompt_tokens:].tolist()
            cache = models.last_cache(loaded.model)
        seconds = time.perf_counter() - clock.start
        counters = _counters(cache, options, layers, decode_steps=len(token_ids) - 1)

    new_tokens = len(token_ids)
    stopped = not options.ignore_eos and bool(token_ids) and token_ids[-1] in loaded.eos_token_ids
    decode_seconds = seconds - clock.prefill_seconds
    return GenerateResult(
        model=loaded.name,
        text=loaded.tokenizer.decode(token_ids, skip_special_tokens=True),
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        finish_reason="stop" if stopped else "length",
        device=loaded.device,
        dtype=loaded.dtype,
        seconds=seconds,
        prefill_seconds=clock.prefill_seconds,
        tokens_per_second=new_tokens / seconds,
        decode_tokens_per_second=(new_tokens - 1) / decode_seconds if new_tokens > 1 else 0.0,
        speculation=speculation,
        **counters,
    )


def check_backend(options: GenerateOptions, device: str = "auto") -> None:
    """Refuse a backend that doesn't run on the device, before a model is loaded for it."""
    if not options.replay:
        return
    try:
        ops.resolve_backend(options.backend, None if device == "auto" else device)
    except ValueError as error:
        raise InputError(one_line(error)) from error


@contextmanager
def _prepared(loaded: LoadedModel, options: GenerateOptions) -> Iterator[None]:
    """The model with replay enabled, if wanted, and its generation defaults replaced by what `options` say."""
    model, defaults = loaded.model, loaded.model.generation_config
    if options.replay:
        try:
            models.enable(
                model,
                ring_len=options.ring_len,
                state_dtype=getattr(torch, options.state_dtype),
                ring_dtype=options.ring_dtype if options.ring_dtype == "auto" else getattr(torch, options.ring_dtype),
                backend=options.backend,
            )
        except ValueError as error:
            raise InputError(one_line(error)) from error
    # Settings given to generate() would be mixed with the folder's own defaults, e.g. its repetition penalty.
    model.generation_config = _generation_config(loaded, options)
    stepwise_on_cpu = not options.replay and loaded.device == "cpu"
    mixers = [adapter.mixer for adapter in find_adapters(model)] if stepwise_on_cpu else []
    try:
        with on_a_cpu(mixers):
            yield
    finally:
        model.generation_config = defaults
        if options.replay:
            models.disable(model)


def _generation_config(loaded: LoadedModel, options: GenerateOptions) -> Any:
    from transformers import GenerationConfig

    eos = [] if options.ignore_eos else list(loaded.eos_token_ids)
    pad = loaded.tokenizer.pad_token_id
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature}
        sampling |= {"top_p": options.top_p, "top_k": options.top_k}
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=pad if pad is not None else (loaded.eos_token_ids or (0,))[0],
        bos_token_id=loaded.model.generation_config.bos_token_id,
        **sampling,
    )


def _encode(loaded: LoadedModel, prompt: str, *, chat: bool) -> dict[str, Tensor]:
    """Token ids and attention mask of the prompt, each `[1, tokens]`."""
    tokenizer = loaded.tokenizer
    if chat:
        if not tokenizer.chat_template:
            raise InputError(f"model {loaded.name!r} has no chat template: generate without --chat")
        messages = [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template is code of the model folder, and may raise anything
            raise InputError(f"the chat template of model {loaded.name!r} fails: {one_line(error)}") from error
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise InputError("the prompt has no tokens after tokenization: at least one is wanted")
    return {name: encoded[name].to(loaded.device) for name in ("input_ids", "attention_mask")}


def _recurrent_layers(model: Any) -> list[LayerSpec]:
    try:
        return [adapter.spec for adapter in find_adapters(model)]
    except ValueError as error:
        raise InputError(one_line(error, limit=400)) from error


def _counters(
    cache: models.ReplayCache | None, options: GenerateOptions, layers: list[LayerSpec], decode_steps: int
) -> dict[str, Any]:
    if not options.replay:
        settings = {"ring_len": 1, "backend": "transformers", "state_dtype": "float32"}
        return settings | stepwise_counters(layers, decode_steps)
    assert cache is not None, "generate() of an enabled model makes a cache"
    pool = cache.require_pool()
    settings = {"ring_len": pool.ring_len, "backend": pool.backend, "state_dtype": options.state_dtype}
    counted = pool.counters()
    counted["flushes"] += counted["folds"]
    counted["decode_steps"] += counted["verify_steps"]
    return settings | counted


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


class _Clock:
    """A transformers streamer: times the first token, and hands out text as it becomes final."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, on_text: OnText | None) -> None:
        self.start = time.perf_counter()
        self.prefill_seconds = 0.0
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._skip = prompt_tokens
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, as a token's text may depend on the one before it
        self._shown = 0  # tokens whose text was handed out

    def put(self, value: Tensor) -> None:
        ids = value.reshape(-1).tolist()
        skipped = ids[self._skip :]
        self._skip = max(0, self._skip - len(ids))
        if not skipped:
            return
        if not self._ids:
            self.prefill_seconds = time.perf_counter() - self.start
        self._ids += skipped
        self._show(final=False)

    def end(self) -> None:
        self._show(final=True)

    def _show(self, *, final: bool) -> None:
        if self._on_text is None:
            return
        shown = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        # A character may need several tokens: until its last one, the text ends in a replacement character.
        if final or not text.endswith("\ufffd"):
            self._on_text(text[len(shown) :])
            self._context, self._shown = self._shown, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
