"""What a generation can be asked for, checked without importing torch."""

import math
from dataclasses import dataclass

from replayssm.errors import InputError

BACKENDS = ("auto", "cpu", "torch", "triton", "cuda")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16", "float16")
RING_DTYPES = ("auto", *STATE_DTYPES)
SPECULATE = ("ngram", "mtp", "draft")
MAX_DRAFT = 15  # a window of 16 tokens holds the last token, and the drafts behind it
MIN_TEMPERATURE = 1e-6  # logits divided by less may overflow float32
MAX_RING_LEN = 4096  # a ring of d_k records takes more memory than the state: far longer ones are a mistake


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded: `dtype` auto is float32 on a CPU and the checkpoint's own dtype on a GPU."""

    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("device", self.device, DEVICES)


@dataclass(frozen=True)
class GenerateOptions:
    """How tokens are generated. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    With `speculate`, `num_draft` tokens are drafted ahead; with a draft model or a tree fewer where that pays more,
    unless `fixed_draft`. `tree` is the number of candidates for each place, 1 for a chain.

    Raises:
        InputError: a value out of its range; the message names the option.
    """

    max_new_tokens: int = 128
    ring_len: int = 16
    state_dtype: str = "float32"
    ring_dtype: str = "auto"
    backend: str = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    chat: bool = False
    ignore_eos: bool = False
    replay: bool = True
    speculate: str | None = None
    draft_model: str | None = None
    num_draft: int = 3
    tree: int = 1
    fixed_draft: bool = False

    def __post_init__(self) -> None:
        check_between("max-new-tokens", self.max_new_tokens, 1)
        check_between("ring-len", self.ring_len, 1, MAX_RING_LEN)
        check_one_of("state-dtype", self.state_dtype, STATE_DTYPES)
        check_one_of("ring-dtype", self.ring_dtype, RING_DTYPES)
        check_one_of("backend", self.backend, BACKENDS)
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}: it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p is {self.top_p}: it must be above 0 and at most 1")
        check_between("top-k", self.top_k, 0)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}: it must be from 0 to 2**63 - 1")
        self._check_speculation()

    def _check_speculation(self) -> None:
        check_between("num-draft", self.num_draft, 1, MAX_DRAFT)
        if not 1 <= self.tree <= MAX_DRAFT:
            raise InputError(f"tree is {self.tree}: it must be from 1 (a chain) to {MAX_DRAFT} candidates for a place")
        if self.speculate is None:
            self._check_draft_model_is_used()
            check_drafts_are_used(num_draft=self.num_draft, fixed_draft=self.fixed_draft, tree=self.tree)
            return
        check_one_of("speculate", self.speculate, SPECULATE)
        if not self.replay:
            raise InputError("speculate and no-replay were both given: drafts are rolled back by replay, choose one")
        if self.speculate == "draft" and self.draft_model is None:
            raise InputError("speculate is 'draft': --draft-model, a model folder or a bundled name, is wanted with it")
        self._check_draft_model_is_used()

    def _check_draft_model_is_used(self) -> None:
        if self.draft_model is not None and self.speculate != "draft":
            raise InputError("draft-model was given without --speculate draft, which it is for")


def check_drafts_are_used(num_draft: int, fixed_draft: bool, tree: int = 1) -> None:
    """Refuse settings of drafts, other than the defaults, where nothing is drafted."""
    for name, given, default in (
        ("num-draft", num_draft, GenerateOptions.num_draft),
        ("fixed-draft", fixed_draft, GenerateOptions.fixed_draft),
        ("tree", tree, GenerateOptions.tree),
    ):
        if given != default:
            raise InputError(f"{name} was given without --speculate, which it is for")


def check_prompt(prompt: str, what: str = "the prompt") -> None:
    """Refuse a prompt without any character, or with bytes that are no text."""
    if not prompt:
        raise InputError(f"{what} is empty: at least one character is wanted")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not text at character {error.start}: UTF-8 is wanted") from error


def check_between(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse a number that is too small or, if there is a largest one, too large."""
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} is {value}: it must be {wanted}")


def check_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse what is not among the choices."""
    if value not in choices:
        raise InputError(f"{name} is {value!r}: it must be one of {', '.join(map(str, choices))}")
