"""JSON schemas and regular expressions: which tokens may come next, by llguidance's matchers.

A matcher lives on the host and hears each token of its sample. For each step it gives a mask, a bit for each token.
llguidance is an optional dependency, and is imported by the first request that wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.params import SamplingParams
from replayssm.engine.transfer import send
from replayssm.errors import InputError, one_line

KEPT_MATCHERS = 64  # compiled ones, ready to be copied: requests of one client tend to have one schema
# A model could go on with blanks for ever. So many are enough for indented objects within objects.
JSON_FORM: Any = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}
ANY = -1  # 32 tokens that may all come
NOTHING = 0  # of 32 tokens none


@dataclass
class Compiled:
    """A schema or pattern, ready to be copied.

    Attributes:
        matcher: llguidance's, at the beginning of a text. What it builds as texts go on is shared by all of its copies,
            and has a limit.
        name: what requests give, for messages.
        gave_up: one of the copies met that limit, and now all may.
    """

    matcher: Any
    name: str
    gave_up: bool = False


class Constraint:
    """What one sample of a request keeps to.

    A matcher gives up at a place for which its pattern turns out to be too large. That is no fault of the program:
    nothing may come there, and :attr:`error` says why.

    Args:
        compiled: what the request gave.
        eos_token_ids: the model's.

    Attributes:
        finished: the end of sequence came, after which nothing does.
    """

    def __init__(self, compiled: Compiled, eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._eos = eos_token_ids
        self._tokens: list[int] = []  # that the matcher has
        self.finished = False

    @property
    def error(self) -> str | None:
        """Why it can't go on, in one line; None where it can."""
        if not self._matcher.is_error():
            return None
        return one_line(RuntimeError(f"{self._compiled.name} can't go on: {_first_line(self._matcher.get_error())}"))

    def copy(self) -> Constraint:
        """Another sample's, from where this one is."""
        other = copy(self)
        other._matcher, other._tokens = self._matcher.deep_copy(), list(self._tokens)
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens came. If the matcher gives up at one of them, the others are not looked at.

        Raises:
            RuntimeError: one of them isn't allowed, which the masks would have said.
        """
        for token in tokens:
            if self.finished:
                raise RuntimeError(f"token {token} came after the end of a constrained sample")
            self.finished = token in self._eos
            if self.finished:
                continue
            if not self._matcher.consume_token(token):
                if _forbids(self._rebuilt(), token):
                    raise RuntimeError(f"token {token} breaks its constraint: {self.error}")
                self._compiled.gave_up = True
                return
            self._tokens.append(token)

    def why_nothing_came(self) -> str | None:
        """As :attr:`error`, for a sample that got no token: the mask for that is made once more."""
        if not self.finished:
            self._matcher.compute_bitmask()
        return self.error

    def fill(self, masks: Tensor, drafts: Sequence[int]) -> None:
        """Write the masks of the next token and, one after the other, of those behind each draft: int32 ``[T, W]``.

        Behind a draft that isn't allowed they are left as they are: that draft will not be drawn. Where the matcher
        gives up, and behind that, nothing may come: a sample that gets there ends, and one whose drafts turn out to be
        wrong may still go on.
        """
        assert masks.is_contiguous(), "llguidance writes to raw memory"
        matcher, size = self._matcher, masks.shape[1] * masks.element_size()
        for place, draft in enumerate([*drafts, None]):
            matcher.unsafe_compute_mask_ptr(masks[place].data_ptr(), size)
            if matcher.is_error():  # the mask leaves the end of sequence, which would pass for a whole text
                self._give_up(masks, place)
                return
            if draft is None or matcher.try_consume_tokens([draft]) == 0:
                break
        if matcher.is_error():
            self._give_up(masks, place + 1)
        elif place and not matcher.rollback(place):
            raise RuntimeError(f"a constraint could not go back over {place} drafts: {self.error}")

    def _give_up(self, masks: Tensor, place: int) -> None:
        """The matcher did, at a place of a window."""
        masks[place:] = NOTHING
        self._compiled.gave_up = True
        if place:
            self._matcher = self._rebuilt()

    def _rebuilt(self) -> Any:
        """A matcher as it is behind the sample's tokens: there is no way back from an error."""
        matcher = self._compiled.matcher.deep_copy()
        matcher.consume_tokens(self._tokens)
        return matcher


class Constraints:
    """Makes constraints for the requests of one model.

    Args:
        tokenizer: transformers', one of the fast kind.
        vocab_size: of the logits.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = tuple(eos_token_ids)
        self._tokens: Any = None  # llguidance's own form of the vocabulary
        self._compiled: dict[tuple[str | None, str | None], Compiled] = {}

    def prepare(self) -> None:
        """Get ready for the first constrained request, which else waits for it: about a second for a large vocabulary.

        Raises:
            InputError: llguidance is missing, or can't work with this model's tokenizer.
        """
        if self._tokens is not None:
            return
        try:
            import llguidance.hf
        except ImportError as error:
            raise InputError(
                "json_schema and regex need llguidance, which is not installed: pip install 'replayssm[serve]'"
            ) from error
        if not self._eos:
            raise InputError("json_schema and regex need a model with an end-of-sequence token: this one has none")
        try:
            self._tokens = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos)
            )
        except Exception as error:  # whatever its Rust side says of a tokenizer, the model is the cause
            raise InputError(f"llguidance cannot use this model's tokenizer: {one_line(error)}") from error

    def start(self, params: SamplingParams) -> Constraint | None:
        """The constraint of a request's first sample; None for a request without.

        Raises:
            InputError: the schema or expression doesn't compile, or :meth:`prepare` fails.
        """
        if not params.constrained:
            return None
        self.prepare()
        key = (params.json_schema, params.regex)
        if key in self._compiled and self._compiled[key].gave_up:
            del self._compiled[key]  # its limit was met by another text
        if key not in self._compiled:
            compiled = Compiled(self._compile(params), _name(params))
            if len(self._compiled) == KEPT_MATCHERS:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = compiled
        return Constraint(self._compiled[key], frozenset(self._eos))

    def masks(self, constraints: Sequence[Constraint], device: torch.device) -> Tensor | None:
        """What may come next: int32 ``[C, W]`` for the batch's constrained rows in their order; None without any."""
        masks = self.window_masks(constraints, [[]] * len(constraints), 1, device)
        return None if masks is None else masks[:, 0]

    def window_masks(
        self, constraints: Sequence[Constraint], drafts: Sequence[Sequence[int]], width: int, device: torch.device
    ) -> Tensor | None:
        """What may come at each place of a verify window: int32 ``[C, T, W]``.

        Args:
            constraints: of the batch's constrained rows in their order.
            drafts: each one's, at most T − 1.
            width: T.
            device: where the masks are wanted.
        """
        if not constraints:
            return None
        masks = torch.full((len(constraints), width, -(-self._vocab_size // 32)), ANY, dtype=torch.int32)
        for constraint, row, places in zip(constraints, drafts, masks, strict=True):
            constraint.fill(places, row)
        return send(masks, device)

    def _compile(self, params: SamplingParams) -> Any:
        from llguidance import LLMatcher

        name = _name(params)
        try:
            if params.json_schema is not None:
                is_object = params.json_schema.lstrip().startswith("{")  # true and false are schemas, too
                defaults = JSON_FORM if is_object else None
                grammar = LLMatcher.grammar_from_json_schema(params.json_schema, defaults=defaults)
            else:
                grammar = LLMatcher.grammar_from_regex(params.regex or "")
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            problem = matcher.get_error() if matcher.is_error() else ""
        except ValueError as error:
            problem = str(error)
        if problem:
            raise InputError(f"{name} does not compile: {one_line(ValueError(problem))}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # as that of `[^\\s\\S]`, which compiles
            raise InputError(f"{name} allows no output at all: {one_line(ValueError(_first_line(first.get_error())))}")
        return matcher


def _name(params: SamplingParams) -> str:
    return "json_schema" if params.regex is None else "regex"


def _forbids(matcher: Any, token: int) -> bool:
    """Whether a matcher that works says that a token may not come."""
    mask = matcher.compute_bitmask()
    return not matcher.is_error() and not mask[token // 8] >> token % 8 & 1


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
