"""A sample's text in pieces: whole characters, stop strings wherever tokens are cut, and the ends of a sample."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from replayssm import bundled
from replayssm.engine.params import SamplingParams
from replayssm.engine.text import LONGEST_WINDOW, Detokenizer, StopStrings, TextPiece, TextStream

EOS = (256, 258)
MULTIBYTE = "naïve 漢字 — 🎉🎉 ok\n"


@cache
def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled.path(name))


@pytest.fixture(params=bundled.names())
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def pieces(tokenizer: Any, tokens: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(detokenizer.append, tokens), detokenizer.finish()]


def stream(tokens: list[int], tokenizer: Any = None, at_once: int = 1, **settings: object) -> list[TextPiece]:
    """Pieces up to the end of the sample."""
    text, found = TextStream(tokenizer or tokenizer_of(bundled.names()[0]), SamplingParams(**settings), EOS), []
    for start in range(0, len(tokens), at_once):
        found.append(text.append(tokens[start : start + at_once]))
        if found[-1].finish_reason:
            break
    return found


def joined(found: list[TextPiece]) -> str:
    return "".join(piece.text for piece in found)


# Characters.


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    tokens = tokenizer.encode(MULTIBYTE)
    assert len(tokens) > len(MULTIBYTE)
    found = pieces(tokenizer, tokens)
    assert "".join(found) == MULTIBYTE
    assert [piece for piece in found if piece] == list(MULTIBYTE)


@pytest.mark.parametrize("kind", ["any tokens", "characters", "broken characters", "nothing but beginnings"])
@pytest.mark.parametrize("skip", [True, False], ids=["without special tokens", "with special tokens"])
def test_pieces_together_are_the_text_of_all_tokens(kind, skip):
    tokenizer = tokenizer_of(bundled.names()[0])
    dice = random.Random(kind)
    for _ in range(60):
        length = dice.randrange(1, 150)
        if kind == "any tokens":
            tokens = [dice.randrange(272) for _ in range(length)]
        elif kind == "characters":
            tokens = list("".join(dice.choice("aé漢🎉 \ufffd") for _ in range(length)).encode())
        elif kind == "broken characters":
            tokens = [dice.choice([0xF0, 0x9F, 0x8E, 0x89, 0xE6, 97, 256, 260]) for _ in range(length)]
        else:
            tokens = [0xE6] * length
        assert "".join(pieces(tokenizer, tokens, skip=skip)) == tokenizer.decode(tokens, skip_special_tokens=skip)


class Words:
    """A tokenizer whose tokens are words: the space before one is dropped where it stands first."""

    clean_up_tokenization_spaces = False

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(getattr(self, "longest", 0), len(tokens))
        return " ".join("abcdefgh"[token] * 3 for token in tokens)


def test_spaces_before_words_are_kept():
    words = Words()
    tokens = [random.Random(3).randrange(8) for _ in range(200)]
    assert "".join(pieces(words, tokens)) == words.decode(tokens, True)


class ByteRuns:
    """A tokenizer that shows each byte of a run as broken unless the whole run is text, as byte fallback does."""

    clean_up_tokenization_spaces = False

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(getattr(self, "longest", 0), len(tokens))
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)


def test_bytes_that_show_as_broken_until_they_are_whole_come_whole():
    text = "漢字🎉é" * 10
    assert "".join(pieces(ByteRuns(), list(text.encode()))) == text


class Turning:
    """A tokenizer whose text changes altogether with each token."""

    clean_up_tokenization_spaces = False

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(getattr(self, "longest", 0), len(tokens))
        return "abcdefgh"[sum(tokens) % 8] * len(tokens)


@pytest.mark.parametrize("kind", [Words, ByteRuns, Turning])
@pytest.mark.parametrize("tokens", [[1, 2, 3] * 200, [0xFF] * 600], ids=["good", "broken"])
def test_few_tokens_are_decoded_at_once_however_long_the_text_is(kind, tokens):
    tokenizer = kind()
    found = pieces(tokenizer, [token % 8 for token in tokens] if kind is Words else tokens)
    assert tokenizer.longest <= LONGEST_WINDOW
    assert sum(map(bool, found)) > 500


def test_broken_bytes_are_not_held_back_for_long():
    found = pieces(tokenizer_of(bundled.names()[0]), [0xFF] * 20)
    assert len("".join(found[:-1])) == 17


def test_special_tokens_are_left_out_unless_wanted():
    tokens = [97, 257, 98]
    assert joined(stream(tokens, max_tokens=3)) == "ab"
    assert joined(stream(tokens, max_tokens=3, skip_special_tokens=False)) == "a<|im_start|>b"


def test_a_tokenizer_that_cleans_its_text_is_asked_itself():
    asked = []

    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        asked.append(list(tokens))
        return "x" * len(tokens)

    cleaning = SimpleNamespace(clean_up_tokenization_spaces=True, backend_tokenizer=None, decode=decode)
    assert pieces(cleaning, [1, 2]) == ["x", "x", ""]
    assert asked == [[1], [1, 2]]


# Stop strings.


def cut(text: str, stops: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    """A slow reference: the first stop string to be complete, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True], ids=["left out", "kept"])
def test_a_stop_string_ends_the_text_wherever_pieces_are_cut(include):
    dice = random.Random(5)
    ended = 0
    for _ in range(500):
        text = "".join(dice.choice("ab漢") for _ in range(dice.randrange(1, 40)))
        stops = tuple("".join(dice.choice("ab漢") for _ in range(dice.randrange(1, 7))) for _ in range(3))
        searching, shown, rest = StopStrings(stops, include=include), "", text
        stop = None
        while rest and stop is None:
            size = dice.randrange(1, 5)
            new, stop = searching.feed(rest[:size])
            shown, rest = shown + new, rest[size:]
            assert text.startswith(shown)
        shown += searching.finish()
        assert (shown, stop) == cut(text, stops, include)
        ended += stop is not None
    assert 100 < ended < 500


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    searching = StopStrings(("END", "NEVER"), include=False)
    shown = [searching.feed(character)[0] for character in "aENNEVEE"]
    assert shown == ["a", "", "", "EN", "", "", "", "NEVE"]
    assert StopStrings((), include=False).feed("text") == ("text", None)


@pytest.mark.parametrize("stop", ["字", "漢字 —", "🎉", "ï", " ok\n", "\n"])
@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_stop_strings_of_several_bytes_over_token_borders(tokenizer, stop, at_once):
    tokens = tokenizer.encode(MULTIBYTE) + [97] * 8
    found = stream(tokens, tokenizer, at_once, stop=(stop, "absent"))
    before = MULTIBYTE[: MULTIBYTE.index(stop)]
    assert joined(found) == before
    assert found[-1][2:] == ("stop", stop)
    assert sum(piece.num_tokens for piece in found) == len(tokenizer.encode(before + stop))
    kept = stream(tokens, tokenizer, at_once, stop=(stop, "absent"), include_stop=True)
    assert joined(kept) == before + stop


def test_half_a_character_of_a_stop_string_does_not_end_the_text():
    assert joined(stream(list("漣".encode()), stop="漢", max_tokens=3)) == "漣"


def test_a_stop_string_ends_nothing_before_min_tokens():
    tokens = list(b"a.b.c.d.")
    found = stream(tokens, stop=".", min_tokens=5)
    assert joined(found) == "a.b.c"
    assert sum(piece.num_tokens for piece in found) == 6


# Ends.


def test_windows_end_where_single_tokens_would():
    dice = random.Random(8)
    settings = [{"stop": ("ab", "bba")}, {"stop_token_ids": (99,)}, {"max_tokens": 9}, {"ignore_eos": True}]
    for number in range(200):
        tokens = [dice.choice([97, 98, 99, 195, 169, 256]) for _ in range(30)]
        params = settings[number % 4] | {"min_tokens": number % 3}
        single, many = stream(tokens, **params), stream(tokens, at_once=dice.randrange(2, 9), **params)
        assert joined(single) == joined(many)
        assert sum(piece.num_tokens for piece in single) == sum(piece.num_tokens for piece in many)
        assert single[-1][2:] == many[-1][2:]


@pytest.mark.parametrize("eos", EOS)
def test_an_end_of_sequence_ends_it_without_text(eos):
    assert stream([97, eos, 98], at_once=3) == [TextPiece("a", 2, "stop", None)]
    assert stream([97, eos, 98], at_once=3, skip_special_tokens=False) == [TextPiece("a", 2, "stop", None)]


def test_an_end_of_sequence_that_is_ignored_is_a_token_like_others():
    assert stream([97, 256, 98], at_once=3, ignore_eos=True) == [TextPiece("ab", 3)]
    assert stream([97, 256], at_once=2, ignore_eos=True, stop_token_ids=[256]) == [TextPiece("a", 2, "stop", 256)]


def test_a_stop_token_ends_it_and_is_named():
    assert stream([97, 98, 99], at_once=3, stop_token_ids=[98]) == [TextPiece("a", 2, "stop", 98)]
    assert stream([97, 98, 99], at_once=3, stop_token_ids=[98], include_stop=True) == [TextPiece("ab", 2, "stop", 98)]


def test_the_last_token_that_is_allowed_ends_it():
    assert stream([97, 98, 99], at_once=3, max_tokens=2) == [TextPiece("ab", 2, "length", None)]
    assert stream([97, 98], at_once=2, max_tokens=2, stop="b") == [TextPiece("a", 2, "stop", "b")]
    assert stream([97, 256], at_once=2, max_tokens=2) == [TextPiece("a", 2, "stop", None)]


def test_nothing_is_lost_at_an_end_with_half_a_character_or_half_a_stop_string():
    assert joined(stream([97, 0xE6], max_tokens=2)) == "a\ufffd"
    assert joined(stream([97, 98, 256], stop="bc")) == "ab"
    assert joined(stream([97, 98, 0xE6], stop="b\ufffdc", max_tokens=3)) == "ab\ufffd"
    assert stream([97, 0xE6], max_tokens=2, stop="\ufffd")[-1][2:] == ("stop", "\ufffd")


def test_a_sample_that_is_cut_off_gives_out_what_was_held_back():
    text = TextStream(tokenizer_of(bundled.names()[0]), SamplingParams(stop="bcd"), EOS)
    assert text.append([97, 98, 99, 0xE6]) == TextPiece("a", 4)
    assert text.finish() == "bc\ufffd"
    assert text.finish() == ""
    assert text.num_tokens == 4
