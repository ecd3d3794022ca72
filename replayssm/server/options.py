"""What the server is told at its start, checked before a model loads and without the `serve` extra."""

import ipaddress
import math
from dataclasses import dataclass

from replayssm.errors import InputError
from replayssm.options import check_between, check_one_of

LOG_FORMATS = ("text", "json")
MAX_REQUESTS = 4096  # more than one process answers at once; each may hold a body in memory


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may ask, and how much.

    Attributes:
        host, port: the address; port 0 takes a free one.
        api_keys: any of them opens the door; without one it is open.
        served_name: the model's name in requests and answers; None takes the loaded model's.
        max_body_bytes: of a request.
        body_seconds: for a request's body to arrive.
        request_seconds: from a request's arrival to its last token.
        max_tokens: new tokens of a sample that a request may ask for; None leaves it to the model's context.
        default_max_tokens: of a chat request that doesn't say.
        max_requests: samples that are answered or wait at once. A request for n samples counts n times.
        drain_seconds: after SIGTERM or SIGINT, for requests to finish.
        log_format: text for people, json for programs.

    Raises:
        InputError: a value out of its range; the message names the option.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_name: str | None = None
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    max_tokens: int | None = None
    default_max_tokens: int = 1024
    max_requests: int = 512
    drain_seconds: float = 30.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.host:
            raise InputError("host is empty: an address or a name is wanted, 127.0.0.1 for this machine alone")
        check_between("port", self.port, 0, 65535)
        check_between("max-body", self.max_body_bytes, 1, 1 << 30)
        check_between("max-requests", self.max_requests, 1, MAX_REQUESTS)
        check_between("default-max-tokens", self.default_max_tokens, 1)
        if self.max_tokens is not None:
            check_between("max-tokens", self.max_tokens, 1)
        _seconds("body-seconds", self.body_seconds)
        _seconds("request-seconds", self.request_seconds)
        _seconds("drain-seconds", self.drain_seconds, zero=True)
        check_one_of("log-format", self.log_format, LOG_FORMATS)
        if self.served_name is not None and not self.served_name.strip():
            raise InputError("served-name is empty: the name that requests give as model is wanted")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("api-key is empty or has characters that no HTTP header carries: ASCII is wanted")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _seconds(name: str, value: float, *, zero: bool = False) -> None:
    if not (0 < value < math.inf or (zero and value == 0)):
        raise InputError(f"{name} is {value:g}: seconds {'from 0' if zero else 'above 0'} are wanted")
