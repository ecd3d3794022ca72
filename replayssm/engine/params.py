"""What a request may ask of sampling, checked once, without importing torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from replayssm.errors import InputError
from replayssm.options import MIN_TEMPERATURE

MAX_TEMPERATURE = 1e4  # far flatter than any use, and logits divided by it keep float32's digits
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_STOPS = 64
MAX_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 100.0)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and where its text ends.

    A token is drawn from the logits in this order: penalties, `logit_bias`, `min_tokens`, the constraint, then
    `temperature`, `top_k`, `top_p` (of what `top_k` left), `min_p` (relative to the likeliest token). Tokens that are
    equally likely are kept or left out together.

    Attributes:
        n: samples of one prompt.
        max_tokens: new tokens of each sample at most.
        min_tokens: so many tokens come at least: before, no end of sequence and no stop token id is drawn, and no stop
            string ends the text.
        temperature: 0 takes the likeliest token.
        top_p: the likeliest tokens that together reach this probability; 1 takes all.
        top_k: the k likeliest tokens; 0 takes all.
        min_p: tokens at least this likely, relative to the likeliest; 0 takes all.
        presence_penalty: taken from the logit of each token that the output has.
        frequency_penalty: the same, times how often the output has it.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied.
        seed: equal seeds give equal draws; None gives the request a seed of its own.
        stop: the text ends before the first of these.
        stop_token_ids: the sample ends after one of these; its text is left out.
        ignore_eos: the end of sequence is a token like any other.
        include_stop: keep the stop string, or the text of the stop token, at the end of the text.
        logprobs: None for none; k ≥ 0 for the chosen token's and those of the k likeliest. They are the model's own:
            of its logits as they come, whatever temperature, filters, penalties, biases or constraints say.
        logit_bias: added to the logits of these tokens.
        json_schema: the text of a JSON schema that the output keeps to.
        regex: a regular expression that the output matches as a whole.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InputError: a value out of its range; the message names the field, what was given and what is wanted.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | None = None
    regex: str | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens is {self.min_tokens}: max_tokens allows {self.max_tokens}")
        self._check_distribution()
        self._check_penalties()
        self._check_ends()
        self._check_logit_bias()
        self._check_constraint()
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}: True or False is wanted")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether tokens that were seen count."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def constrained(self) -> bool:
        """Whether a JSON schema or a regular expression says what may come."""
        return self.json_schema is not None or self.regex is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model doesn't have.

        Raises:
            InputError: the message names the field and the token id.
        """
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                if token >= vocab_size:
                    raise InputError(f"{name} has token id {token}: the model's are from 0 to {vocab_size - 1}")

    def _check_distribution(self) -> None:
        temperature = _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if 0 < temperature < MIN_TEMPERATURE:
            raise InputError(f"temperature is {temperature}: it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if _number("top_p", self.top_p, 0, 1) == 0:
            raise InputError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        _integer("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    def _check_penalties(self) -> None:
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)

    def _check_ends(self) -> None:
        stops: Any = self.stop  # whatever was given for it
        stops = (stops,) if isinstance(stops, str) else stops
        object.__setattr__(self, "stop", _tuple("stop", stops, MAX_STOPS, "a string or some strings"))
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise InputError(f"stop has {stop!r}: strings of at least one character are wanted")
        ids = _tuple("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        object.__setattr__(self, "stop_token_ids", tuple(_integer("stop_token_ids", token, 0) for token in ids))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias is {_shown(self.logit_bias)}: a mapping of token ids to numbers is wanted")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InputError(f"logit_bias has {len(self.logit_bias)} tokens: at most {MAX_BIASED_TOKENS} are taken")
        biases = {
            _integer("logit_bias", token, 0): _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
            for token, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)

    def _check_constraint(self) -> None:
        for name in ("json_schema", "regex"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                form = "text of at least one character" if not isinstance(text, dict) else "what json.dumps makes of it"
                raise InputError(f"{name} is {_shown(text)}: {form} is wanted")
        if self.json_schema is not None and self.regex is not None:
            raise InputError("json_schema and regex were both given: a request keeps to one of them")
        if self.constrained and self.min_tokens:
            raise InputError(f"min_tokens is {self.min_tokens} beside a json_schema or regex, which says where to end")
        if self.constrained and self.ignore_eos:
            raise InputError("ignore_eos was given beside a json_schema or regex, which says where to end")


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {_shown(value)}: a whole number is wanted")
    number = int(value)
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} is {_shown(value)}: it must be {wanted}")
    return number


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {_shown(value)}: a number is wanted")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not least <= number <= most:  # nor is NaN
        raise InputError(f"{name} is {_shown(value)}: it must be from {least:g} to {most:g}")
    return number


def _tuple(name: str, values: Any, most: int, wanted: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InputError(f"{name} is {_shown(values)}: {wanted} are wanted")
    values = tuple(values)
    if len(values) > most:
        raise InputError(f"{name} has {len(values)} entries: at most {most} are taken")
    return values


def _shown(value: Any, limit: int = 60) -> str:
    """A value in an error message: short, whatever was given."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
