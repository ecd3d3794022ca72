"""Run the server until a signal: take no more requests, let streams finish for a while, end the rest cleanly."""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from replayssm.engine import AsyncEngine, Engine
from replayssm.errors import InputError, one_line
from replayssm.server.app import make_app
from replayssm.server.logs import LOGGER, event
from replayssm.server.options import ServerOptions
from replayssm.server.service import Service, make_service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
KEEP_ALIVE_SECONDS = 75  # of an idle connection: longer than usual proxies keep theirs, so that they close first
LAST_SECONDS = 10.0  # for connections to close after everything was sent; slow readers are cut off then
BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """The socket of the server's address. Nobody can connect before :func:`run`.

    Raises:
        InputError: the address is not this machine's, or taken.
    """
    where = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"the server cannot listen on {where}: {one_line(error)}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(f"the server cannot listen on {where}: {error.strerror or one_line(error)}") from error
    return bound


def url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Uvicorn, with an ending of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop_again = asyncio.Event()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                make_app(service),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(LAST_SECONDS),
            )
        )

    def stop(self) -> None:
        """Begin to end; the second time, end at once."""
        if self._service.draining:
            self._stop_again.set()
            return
        seconds = self._service.options.drain_seconds
        LOGGER.info("stopping: requests have %g s to finish", seconds, extra=event("stopping", drain_seconds=seconds))
        self._service.stopping.set()

    async def serve(self, bound: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Answer requests until :meth:`stop`, or a signal if this is the main thread.

        Raises:
            InputError: the address is taken.
        """
        try:
            bound.listen(BACKLOG)
        except OSError as error:  # somebody else, who had bound it as well, was faster
            raise InputError(f"the server cannot listen on {url(bound)}: {error.strerror}") from error
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[bound]))
        with _signals(self.stop):
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.01)
            on_ready()
            stopping = asyncio.create_task(self._service.stopping.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            self._uvicorn.should_exit = True
            await serving
            stopping.cancel()
        self._service.reader.close()

    async def _drain(self) -> None:
        """Let the engine finish; a second signal ends that."""
        engine = self._service.engine
        draining = asyncio.create_task(engine.shutdown(drain_seconds=self._service.options.drain_seconds))
        again = asyncio.create_task(self._stop_again.wait())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await engine.shutdown(drain_seconds=0)
        await draining
        again.cancel()


def run(engine: Engine, options: ServerOptions, bound: socket.socket) -> None:
    """Serve an engine until a signal, and close it.

    Raises:
        InputError: the address is taken.
    """
    _allow_connections()
    gc.collect()
    gc.freeze()  # models and libraries stay: going over all their objects would hold up every stream
    try:
        asyncio.run(_run(engine, options, bound))
    finally:
        gc.unfreeze()  # else libraries complain at the end of objects that were never collected


async def _run(engine: Engine, options: ServerOptions, bound: socket.socket) -> None:
    async with AsyncEngine(engine) as beside:
        service = make_service(beside, engine.loaded, engine.max_context, options)
        await Server(service).serve(bound, lambda: _tell(service, url(bound)))


def _allow_connections() -> None:
    """Raise the limit of open files, which is often 1024, to what the system allows: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _tell(service: Service, where: str) -> None:
    options = service.options
    base, name = f"{where}/v1", service.name
    LOGGER.info("%s answers at %s; Ctrl-C stops it", name, base, extra=event("listening", url=base, model=name))
    if not options.on_loopback and not options.api_keys:
        told = "whoever reaches %s can use the model: --api-key asks for a key"
        LOGGER.warning(told, where, extra=event("no_api_key", url=where))


class _Uvicorn(uvicorn.Server):
    """Leaves signals to :class:`Server`: its own handlers would close streams without an end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        for number in SIGNALS:
            loop.add_signal_handler(number, handler)
    except (ValueError, RuntimeError):  # not the main thread: its owner calls stop()
        yield
        return
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
