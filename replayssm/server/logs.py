"""One line for each request: what was asked of the server and what it took, never what a prompt or an answer said."""

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayssm.server.errors import CLIENT_GONE, OUR_FAULTS, ApiError, internal_error

LOGGER = logging.getLogger("replayssm.server")
QUIET_PATHS = ("/health", "/metrics")  # asked every few seconds; logged when they fail
_RECORD = "replayssm.record"

OnRequest = Callable[[dict[str, Any]], None]


class Logged:
    """The outermost application: gives each request an id, logs it, and answers for whatever goes wrong inside."""

    def __init__(self, app: ASGIApp, on_request: OnRequest) -> None:
        self._app, self._on_request = app, on_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        record: dict[str, Any] = {"id": uuid.uuid4().hex, "status": None}
        scope[_RECORD] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record["id"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            LOGGER.exception("internal error", extra=event("internal_error", id=record["id"]))
            if record["status"] is None:
                await internal_error().response()(scope, receive, send_noted)
        finally:
            record["status"] = record.pop("gone", None) or record["status"] or CLIENT_GONE
            record["seconds"] = round(time.perf_counter() - start, 6)
            self._log(scope, record)

    def _log(self, scope: Scope, record: dict[str, Any]) -> None:
        client = scope.get("client")
        asked = {"method": scope["method"], "path": scope["path"][:200], "client": client[0] if client else None}
        self._on_request(asked | record)
        if scope["path"] not in QUIET_PATHS or record["status"] >= 400:
            level = logging.ERROR if record.get("error") in OUR_FAULTS else logging.INFO
            LOGGER.log(level, "request", extra=event("request", **asked | record))


def event(name: str, /, **fields: Any) -> dict[str, Any]:
    """What a line has besides its text, for programs: a name that stays, and fields."""
    return {"event": name, "fields": fields}


def request_id(scope: Scope) -> str:
    return str(scope[_RECORD]["id"])


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the request's line."""
    scope[_RECORD].update(fields)


def note_error(scope: Scope, error: ApiError) -> None:
    """Add why a request failed, without anything that the client wrote: no message, no name that it made up."""
    param = None if error.code == "unknown_parameter" else error.param
    note(scope, error=error.code or "invalid_request", param=param and re.split(r"[.\[]", param)[0])
    if error.status >= 500:
        note(scope, error_message=error.message)


def note_gone(scope: Scope) -> None:
    """The client left before its answer was whole, whatever status was sent."""
    note(scope, gone=CLIENT_GONE)


def configure(log_format: str) -> None:
    """Send this package's lines, and the HTTP server's, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name, level in (("replayssm", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event, message = getattr(record, "event", "message"), record.getMessage()
        line = {"time": when, "level": record.levelname.lower(), "event": event}
        if message != event:
            line["message"] = message
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Lines for people; what a client chose (its path) cannot break out of its line."""

    def format(self, record: logging.LogRecord) -> str:
        clock, text = time.strftime("%H:%M:%S", time.localtime(record.created)), record.getMessage()
        if getattr(record, "event", None) == "request":
            text = _told(getattr(record, "fields", {})).encode("unicode_escape").decode()
        return f"{clock} {text}\n{self.formatException(record.exc_info)}" if record.exc_info else f"{clock} {text}"


def _told(fields: dict[str, Any]) -> str:
    line = f"{fields['status']} {fields['method']} {fields['path']} {fields['seconds']:.3f} s"
    if "prompt_tokens" in fields:
        line += f", {fields['prompt_tokens']} + {fields.get('completion_tokens', 0)} tokens"
    if "ttft_seconds" in fields:
        line += f", first after {fields['ttft_seconds']:.3f} s"
    if "error" in fields:
        line += f", {fields['error']}"
    if "error_message" in fields:
        line += f": {fields['error_message']}"
    return f"{line} ({fields['id']})"
