"""Why an engine turns a request away, apart from what is wrong with the request itself."""

from replayssm.errors import InputError


class QueueFull(InputError):  # noqa: N818  (what it is, not that it is an error, is what callers ask for)
    """The queue holds as many requests as it may: try again later."""


class EngineClosed(RuntimeError):  # noqa: N818
    """The engine takes no more requests."""
