"""Single tokens as text, and log probabilities in the formats of the two endpoints."""

from collections.abc import Sequence
from typing import Any

from replayssm.engine.outputs import TokenLogprobs

LEAST_LOGPROB = -9999.0  # what the API gives for minus infinity, which JSON doesn't have
_CACHED_TOKENS = 100_000


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: printable ones themselves, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_LETTERS = _byte_letters()


class TokenTexts:
    """Bytes and text of single tokens; a token may be a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes. What is no whole character is written `bytes:` and an escape for each byte."""
        found = self._known.get(token)
        if found is None:
            raw = self._bytes(token)
            try:
                found = raw.decode(), list(raw)
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)
            if len(self._known) < _CACHED_TOKENS:
                self._known[token] = found
        return found

    def _bytes(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model has more rows than the tokenizer has tokens
            return f"<{token}>".encode()
        if token in self._special:
            return str(piece).encode()
        if self._byte_level and all(letter in _BYTE_LETTERS for letter in piece):
            return bytes(_BYTE_LETTERS[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
            return bytes([int(piece[3:5], 16)])
        if "\u2581" in piece:  # a space in sentencepiece's vocabularies, which decode() strips from a first token
            return str(piece).replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()


def completion_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """The `logprobs` of /v1/completions: lists side by side. `offset`: characters of the choice before these tokens."""
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(texts[entry.token][0])
    return {
        "tokens": [texts[entry.token][0] for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [{texts[token][0]: _finite(value) for token, value in entry.top} for entry in logprobs],
        "text_offset": offsets,
    }


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of /v1/chat/completions: one object a token."""
    content = [
        _described(texts, entry.token, entry.logprob)
        | {"top_logprobs": [_described(texts, token, value) for token, value in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _described(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token]
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
