"""A sample's text as its tokens come: final pieces, and where it ends.

A character may need several tokens, and a stop string may lie across their borders. Text is handed out as soon as no
later token can change it: never a part of a character, never a part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from replayssm.engine.outputs import FinishReason
from replayssm.engine.params import SamplingParams

UNFINISHED = "\ufffd"  # what bytes that are no character yet, or none at all, decode to
CHARACTER = 4  # bytes of UTF-8 at most, and as many tokens
WINDOW = 24  # tokens that are decoded at once; from then on the front is dropped
CONTEXT = 8  # of them are kept: more than a character or the space before a word can depend on
LONGEST_WINDOW = 64  # where no good place to cut is found


class TextPiece(NamedTuple):
    """What some tokens brought.

    Attributes:
        text: new text that is final.
        num_tokens: so many of them belong to the sample: those behind its end don't.
        finish_reason: "stop" or "length" at the end, else None.
        stop_reason: the stop string or stop token id that ended it.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class TextStream:
    """Makes one sample's text. It is kept while the sample is preempted.

    Args:
        tokenizer: transformers'.
        params: where the text ends.
        eos_token_ids: the model's.

    Attributes:
        num_tokens: how many came so far.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self.has_stops = bool(params.stop)
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._ends = self._eos.union(params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop)

    def kept(self, tokens: Sequence[int], before: int) -> tuple[int, bool]:
        """How far a sample goes, by anything but stop strings.

        Args:
            tokens: the sample's next ones.
            before: how many it has already.

        Returns:
            How many of them belong to the sample, and whether it ends with the last of these.
        """
        room = self._params.max_tokens - before
        for count, token in enumerate(tokens, 1):
            if count == room or token in self._ends:
                return count, True
        return len(tokens), False

    def append(self, tokens: Sequence[int]) -> TextPiece:
        """The sample's next tokens; what comes behind its end is left out."""
        texts: list[str] = []
        count, ends = self.kept(tokens, self.num_tokens)
        for number, token in enumerate(tokens[:count], 1):
            self.num_tokens += 1
            shown = token not in self._ends or self._params.include_stop
            text = self._detokenizer.append(token) if shown else ""
            if not self.has_stops:
                texts.append(text)
            elif (stop := self._feed(text, texts)) is not None:
                return TextPiece("".join(texts), number, "stop", stop)
        if ends:
            last = tokens[count - 1]
            return self._end(texts, count, last if last in self._ends else None)
        return TextPiece("".join(texts), count)

    def finish(self) -> str:
        """What was held back, for a sample that ends by something else than its tokens."""
        texts: list[str] = []
        self._feed(self._detokenizer.finish(), texts)
        return "".join([*texts, self._stops.finish()])

    def _end(self, texts: list[str], count: int, token: int | None) -> TextPiece:
        """The last piece, at an end of sequence or a stop token, or where no more tokens are allowed."""
        stop = self._feed(self._detokenizer.finish(), texts)
        if token is None and stop is not None:
            return TextPiece("".join(texts), count, "stop", stop)
        texts.append(self._stops.finish())
        if token is None:
            return TextPiece("".join(texts), count, "length")
        return TextPiece("".join(texts), count, "stop", None if token in self._eos else token)

    def _feed(self, text: str, texts: list[str]) -> str | None:
        """Add what becomes final to `texts`; returns the stop string that ends it."""
        released, stop = self._stops.feed(text, may_stop=self.num_tokens >= self._params.min_tokens)
        texts.append(released)
        return stop


class Detokenizer:
    """Turns tokens into text, one after the other: the pieces together are the text of all tokens.

    A few tokens are decoded together, as a token's text may depend on those before it.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._window: list[int] = []
        self._text = ""  # of the window
        self._shown = 0  # characters of it that were handed out
        self._unfinished = 0  # tokens since the text last ended in a whole character

    def append(self, token: int) -> str:
        """New final text."""
        self._window.append(token)
        self._text = self._decode(self._window)
        end = len(self._text)
        if self._text.endswith(UNFINISHED):
            self._unfinished += 1
            if self._unfinished < CHARACTER:
                return ""
            end -= min(end - len(self._text.rstrip(UNFINISHED)), CHARACTER - 1)
        else:
            self._unfinished = 0
        piece = self._show(end)
        if len(self._window) >= WINDOW:
            self._drop_front()
        return piece

    def finish(self) -> str:
        """The rest, if the last character stays unfinished."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        if end <= self._shown:
            return ""
        piece = self._text[self._shown : end]
        self._shown = end
        return piece

    def _drop_front(self) -> None:
        """Cut the window where its rest decodes to the end of its text, as it does between characters."""
        waiting = len(self._text) - self._shown
        last = len(self._window) - CONTEXT
        for start in range(last, 0, -1):
            rest = self._decode(self._window[start:])
            if len(rest) >= waiting and self._text.endswith(rest):
                self._cut(start, rest, waiting)
                return
        if len(self._window) >= LONGEST_WINDOW:
            self._cut(last, self._decode(self._window[last:]), waiting)

    def _cut(self, start: int, rest: str, waiting: int) -> None:
        self._window, self._text = self._window[start:], rest
        self._shown = max(0, len(rest) - waiting)


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces, and holds back what may be its beginning.

    The first is the one that is complete first, of those the longest: where the pieces are cut makes no difference.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is final now, and the stop string that ends it."""
        if not self._searches:
            return text, None
        for place, character in enumerate(text, 1):
            complete = [search.stop for search in self._searches if search.feed(character)]
            if complete and may_stop:
                stop = max(complete, key=len)
                seen = self._held + text[:place]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(stop)], stop
        seen = self._held + text
        end = len(seen) - max(search.matched for search in self._searches)
        self._held = seen[end:]
        return seen[:end], None

    def finish(self) -> str:
        """What was held back, where no more text comes."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Knuth, Morris and Pratt's search for one string, a character at a time.

    Attributes:
        matched: how long a beginning of the string the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = [0, 0]  # for each length matched, the next shorter one that the text ends with too
        for character in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def feed(self, character: str) -> bool:
        """Whether the string is complete with this character."""
        self.matched = self._longer(self.matched, character)
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._shorter[self.matched]
        return complete

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.stop[matched] == character)


def _decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    # transformers' own decode takes three times as long, at every token, to end up here.
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not tokenizer.clean_up_tokenization_spaces:
        tokenizer = fast
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))
