"""The error that the command line shows without a traceback."""

BROKEN_LOGITS = (
    "the model gave no token: its logits are NaN or infinite, as those of a broken checkpoint are, or of numbers too "
    "large for the model's dtype"
)


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line: what was given, what is wanted."""


def one_line(error: BaseException, limit: int = 240) -> str:
    """An exception's message as one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
