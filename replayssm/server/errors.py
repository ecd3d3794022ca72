"""Errors as OpenAI's clients know them: a status and `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from replayssm.errors import InputError, one_line

FIELDS = {"json_schema": "response_format", "prompt": "prompt"}  # of requests, for what the engine's messages name
CONSTRAINTS = ("json_schema", "regex")
OUR_FAULTS = ("engine_failed", "internal_error")  # codes of a 500
CLIENT_GONE = 499  # never sent, as nobody listens; it tells the log and the metrics


class ApiError(Exception):
    """A request that gets no answer, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


def to_json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    return ApiError(429, message, code="server_busy", headers={"retry-after": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


def timed_out(seconds: float) -> ApiError:
    # The same request would take as long again: clients should not repeat it by themselves.
    message = f"the request took longer than the server's limit of {seconds:g} s"
    return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})


def engine_failed(message: str | None) -> ApiError:
    return ApiError(500, message or "the engine failed", code="engine_failed")


def from_input_error(error: InputError, params: Mapping[str, Any]) -> ApiError:
    """A 400; the message's first word, behind an article, is the field where it names one of `params` or the prompt."""
    message = one_line(error, limit=1000)
    first = message.removeprefix("the ").split(" ", 1)[0]
    return bad_request(message, param=FIELDS.get(first, first if first in params else None))


def from_update(message: str | None) -> ApiError:
    """For a sample that ended with an error: a 400 where its own schema or pattern was too large.

    Clients repeat what was the server's fault, and this would come to the same end again.
    """
    first = (message or "").split(" ", 1)[0]
    if message is not None and first in CONSTRAINTS:
        return bad_request(message, param=FIELDS.get(first, first))
    return engine_failed(message)


def from_validation(error: ValidationError) -> ApiError:
    """A 400 that names the first field that is wrong, and never shows what it holds."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = _path(first["loc"])
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not field:
        return bad_request("the body is not a JSON object")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{field} is not a parameter of this endpoint", param=field, code="unknown_parameter")
    if first["type"] == "too_short":
        return bad_request(f"{field} is empty: at least one is wanted", param=field)
    if first["type"] == "missing":
        return bad_request(f"{field} is missing", param=field, code="missing_required_parameter")
    return bad_request(f"{field}: {first['msg'].removeprefix('Value error, ')}", param=field)


def internal_error() -> ApiError:
    return ApiError(500, "an internal error: the server's log says more", code="internal_error")


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _path(location: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]"]
    return "".join(parts).removeprefix(".")[:200]
