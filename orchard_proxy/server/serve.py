"""Put a server together, run it until it is told to stop, take it apart in an order that loses nothing.

Order of stopping: no new connections, calls in flight finish (or are cut off after `drain_s` and recorded so), the
journal closes, the deriver reads to its end.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from orchard_proxy.errors import ListenError, UsageError
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.record.recovery import load_rollouts
from orchard_proxy.server import keys
from orchard_proxy.server.app import DataPlane, data_app, full_app
from orchard_proxy.server.control import ControlPlane
from orchard_proxy.server.deriver_child import DeriverChild
from orchard_proxy.server.intake import Intake
from orchard_proxy.server.metrics import Metrics
from orchard_proxy.server.reading import Reading
from orchard_proxy.server.registry import Registry
from orchard_proxy.server.relay import House
from orchard_proxy.settings import ServeSettings
from orchard_proxy.upstream.client import HttpUpstream
from orchard_proxy.upstream.health import EngineWatch

logger = logging.getLogger(__name__)

_MIN_ADMIN_KEY = 4
_MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit."""


class Served(msgspec.Struct, frozen=True):
    """A running server, for whoever started it."""

    url: str
    port: int
    admin_key: str
    data_dir: Path


@asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[Served]:
    """Run a server inside the context."""
    _check(settings)
    data_dir = _folder(settings.data)
    admin_key = settings.admin_key or keys.load_or_create(data_dir / "admin.key")
    secret = keys.load_or_create(data_dir / "rollout.secret").encode()
    metrics = Metrics()
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        journal = Journal.open(data_dir, durability=settings.durability)  # First: it refuses a second server.
        await stack.enter_async_context(DeriverChild(data_dir, metrics.deriver_restarts))
        await stack.enter_async_context(journal)
        registry = Registry(open_mode=settings.open, admin_sha256=keys.digest(admin_key))
        registry.restore(load_rollouts(data_dir))
        upstream = await stack.enter_async_context(
            HttpUpstream(
                settings.upstream,
                key=settings.upstream_key,
                connect_s=settings.connect_timeout_s,
                silence_s=settings.silence_timeout_s,
            )
        )
        engines = await stack.enter_async_context(EngineWatch(upstream, settings.engine))
        recorder = Recorder(journal)
        house = House(
            recorder=recorder,
            upstream=upstream,
            engines=engines,
            meter=metrics,
            mode=settings.upstream_stream,
            keepalive_s=settings.keepalive_s,
            side_timeout_s=settings.side_timeout_s,
            stopping=stopping,
        )
        intake = Intake(
            body_bytes=settings.max_body_bytes,
            rollout_bytes=settings.max_rollout_bytes,
            stall_s=settings.client_stall_s,
        )
        data = DataPlane(house, registry, metrics, intake, stall_s=settings.client_stall_s)
        reading = await stack.enter_async_context(Reading(data_dir, journal))
        control = ControlPlane(
            registry=registry, recorder=recorder, reading=reading, admin_key=admin_key, secret=secret
        )
        probes = [
            web.get("/healthz", _healthy),
            web.get("/readyz", _Ready(engines, journal).handle),
            web.get("/metrics", metrics.handle),
        ]
        app = full_app(data, control, probes, max_body_bytes=settings.max_body_bytes)
        port = await _listen(stack, app, settings)
        if settings.uds is not None or settings.uds_fd is not None:
            await _listen_unix(stack, data_app(data, max_body_bytes=settings.max_body_bytes), settings)
        stack.callback(stopping.set)
        yield Served(f"http://{_in_url(settings.host)}:{port}", port, admin_key, data_dir)


async def serve(settings: ServeSettings, announce: Callable[[Served], None]) -> None:
    """Run a server until SIGINT or SIGTERM. A second signal stops it at once; the journal stays whole either way."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        async with running(settings) as served:
            if settings.port_file is not None:
                _write_port(Path(settings.port_file), served.port)
            announce(served)
            await stop.wait()
            logger.info("stopping: calls in flight have %g s to finish", settings.drain_s)


def _check(settings: ServeSettings) -> None:
    if settings.open and not _is_loopback(settings.host):
        raise UsageError(
            f"--open lets anyone record under any name, so it is refused on {settings.host}. "
            "Use --host 127.0.0.1, or leave --open out and create rollouts with POST /rollouts."
        )
    if settings.admin_key is not None and len(settings.admin_key) < _MIN_ADMIN_KEY:
        raise UsageError(f"--admin-key needs at least {_MIN_ADMIN_KEY} characters; leave it out to have one made.")
    if settings.uds is not None and len(os.fsencode(settings.uds)) > _MAX_SOCKET_PATH_BYTES:
        raise UsageError(f"--uds takes a path of at most {_MAX_SOCKET_PATH_BYTES} bytes; use a shorter one.")
    if not settings.upstream.startswith(("http://", "https://")):
        raise UsageError(f"--upstream is a URL such as http://127.0.0.1:8001, not {settings.upstream!r}")
    if settings.upstream.rstrip("/").endswith("/v1"):
        raise UsageError("--upstream is the engine's root, without /v1")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _listen(stack: AsyncExitStack, app: web.Application, settings: ServeSettings) -> int:
    runner = await _runner(stack, app, settings)
    site = web.TCPSite(runner, settings.host, settings.port, backlog=4096)
    try:
        await site.start()
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ListenError(f"cannot listen on {where}: {error.strerror}. Choose another --host or --port.") from error
    address = runner.addresses[0]
    assert isinstance(address, tuple)
    return int(address[1])


async def _listen_unix(stack: AsyncExitStack, app: web.Application, settings: ServeSettings) -> None:
    runner = await _runner(stack, app, settings)
    if settings.uds_fd is not None:
        await web.SockSite(runner, socket.socket(fileno=settings.uds_fd), backlog=4096).start()
    if settings.uds is not None:
        path = _free_socket(Path(settings.uds))
        await web.UnixSite(runner, str(path), backlog=4096).start()


def _folder(data: str) -> Path:
    path = Path(data)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--data {path} cannot be used as a folder: {error.strerror}.") from error
    return path


def _free_socket(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_socket() and not _answers(path):
        path.unlink()  # Left by a server that was killed.
    return path


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


async def _runner(stack: AsyncExitStack, app: web.Application, settings: ServeSettings) -> web.AppRunner:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=settings.drain_s)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner


class _Ready:
    """Answers GET /readyz: 200 when calls can be relayed and recorded, else 503 and why."""

    def __init__(self, engines: EngineWatch, journal: Journal) -> None:
        self._engines = engines
        self._journal = journal

    async def handle(self, _request: web.Request) -> web.Response:
        if self._journal.failing:
            return self._not_yet("the journal cannot be written; free space or look at the log")
        known = self._engines.known
        if known is None:
            return self._not_yet(self._engines.problem)
        return web.json_response({"status": "ready", "engine": known.engine.name, "logprobs_mode": known.logprobs_mode})

    @staticmethod
    def _not_yet(reason: str) -> web.Response:
        return web.json_response({"status": "not ready", "reason": reason}, status=503)


async def _healthy(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _write_port(path: Path, port: int) -> None:
    """Write atomically: whoever waits for the file never reads half a number."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)
