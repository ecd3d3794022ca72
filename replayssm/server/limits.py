"""What stands before the endpoints: the key, the body's size and time, and how many requests are answered at once."""

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayssm.server.errors import ApiError, bad_request, busy, shutting_down
from replayssm.server.logs import note_error
from replayssm.server.options import ServerOptions

OPEN_PATHS = ("/health",)  # for load balancers, which have no key
DISCARD_SECONDS = 2.0


class ClientGoneError(Exception):
    """The client left before its request was read."""


class Gate:
    """Counts the samples that are answered or wait, and turns away what is too much."""

    def __init__(self, most: int) -> None:
        self.most, self.inside = most, 0

    @contextlib.contextmanager
    def enter(self, samples: int, param: str | None = None) -> Iterator[None]:
        """Room for `samples`, which come of a request's `param`, as long as the context lasts.

        Raises:
            ApiError: 429 while there is no room, 400 if there can't be.
        """
        if samples > self.most:
            message = f"the request wants {samples} samples: the server has room for {self.most} at once"
            raise bad_request(message, param=param)
        if self.inside + samples > self.most:
            raise busy(f"the server is busy with {self.inside} of at most {self.most} samples: try again later")
        self.inside += samples
        try:
            yield
        finally:
            self.inside -= samples


class Guard:
    """Passes on requests that have the key, a JSON body within its limits, and a server that isn't about to end.

    JSON alone, because browsers send other types to a local server for any page that asks, without the server's leave.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, stopping: asyncio.Event) -> None:
        self._app, self._options, self._stopping = app, options, stopping
        self._keys = [_digest(key.encode()) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if self._keys and scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] == "POST":
                if self._stopping.is_set():
                    raise shutting_down()
                receive = replayed(await self._read(headers, receive), receive)
        except ClientGoneError:
            return
        except ApiError as error:
            note_error(scope, error)
            if error.status != 408:
                # A socket that is closed with unread bytes is reset, and the client may lose the answer.
                await _discard(receive, self._options.max_body_bytes)
            error.headers["connection"] = "close"
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        # Digests, so that not even a length shows, and every key, so that neither does which one was near.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            message = "the API key is missing or wrong: `Authorization: Bearer KEY` is wanted"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        options = self._options
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body's content-type must be application/json", code="unsupported_media_type")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)
        body = await self._unless_stopping(read_body(receive, options.max_body_bytes), options.body_seconds)
        if body is not None:
            return body
        if self._stopping.is_set():  # the rest may never come, and the server would wait for it
            raise shutting_down()
        message = f"the body did not arrive within {options.body_seconds:g} s"
        raise ApiError(408, message, code="timeout", headers={"x-should-retry": "false"})

    async def _unless_stopping(self, reading: Coroutine[Any, Any, bytes], seconds: float) -> bytes | None:
        """What is read, if that is done in time and before the server is about to end."""
        tasks = asyncio.create_task(reading), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def read_body(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first and then what comes after it."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


async def _discard(receive: Receive, most: int) -> None:
    """Read the rest of a body that is turned away, for a moment."""
    with contextlib.suppress(TimeoutError, ClientGoneError, ApiError):
        async with asyncio.timeout(DISCARD_SECONDS):
            await read_body(receive, 8 * most)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the server's limit of {limit} bytes", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
