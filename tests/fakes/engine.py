"""A policy server that says what a test tells it to, byte by byte.

Fake because no real engine can be made to cut a stream at a byte, send garbage, or close an idle socket on time. What
it says is either recorded from a real engine (tests/data/twins) or written in the test. The socket is real.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Said:
    """One answer. `pieces` are sent one by one, each in a chunk of its own; None in `pieces` cuts the connection."""

    pieces: list[bytes | None]
    status: int = 200
    """0: the connection is closed without a byte."""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    before_head_s: float = 0.0
    between_s: float = 0.0
    close_after: bool = False
    hang: bool = False
    """Never end the body."""


@dataclass
class Heard:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy closed the connection before the answer was over."""
    over: bool = False

    @property
    def json(self):
        return json.loads(self.body)


def whole(body: bytes | str | dict, **kwargs) -> Said:
    if isinstance(body, dict):
        body = json.dumps(body, separators=(",", ":"))
    return Said([body if isinstance(body, bytes) else body.encode()], **kwargs)


def stream(body: bytes, sizes: int | list[int] = 0, **kwargs) -> Said:
    """An event stream, cut into pieces of `sizes` bytes (0: one piece; a list: these lengths, then the rest)."""
    return Said(cut(body, sizes), content_type="text/event-stream; charset=utf-8", **kwargs)


def cut(body: bytes, sizes: int | list[int]) -> list[bytes]:
    if not sizes:
        return [body]
    if isinstance(sizes, int):
        return [body[i : i + sizes] for i in range(0, len(body), sizes)]
    pieces, at = [], 0
    for size in sizes:
        pieces.append(body[at : at + size])
        at += size
    return [piece for piece in [*pieces, body[at:]] if piece]


class ScriptedEngine:
    """Answers with `say(heard)`. `async with` it; `url` is where it listens."""

    def __init__(
        self, say: Callable[[Heard], Said] | None = None, idle_close_s: float | None = None, port: int = 0
    ) -> None:
        self.say = say or (lambda heard: Said([b"{}"], status=404))
        self.heard: list[Heard] = []
        self.idle_close_s = idle_close_s
        self.port = port
        self.connections = 0
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=256 * 1024 * 1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _exchange(self, reader, writer) -> bool:
        heard = await self._read(reader)
        self.heard.append(heard)
        said = self.say(heard)
        watch = asyncio.create_task(self._watch(reader, heard))
        try:
            await self._answer(writer, said)
            heard.over = True
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return bool(said.status) and not said.close_after and None not in said.pieces

    async def _watch(self, reader, heard):
        with contextlib.suppress(ConnectionError):
            assert not await reader.read(1), "the proxy sent a request before the answer to the last one was over"
        heard.gone.set()

    async def _read(self, reader) -> Heard:
        async with asyncio.timeout(self.idle_close_s):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        method, path, _ = request.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Heard(method, path, headers, body)

    async def _answer(self, writer, said: Said) -> None:
        await asyncio.sleep(said.before_head_s)
        if not said.status:
            writer.transport.abort()
            return
        headers = {"content-type": said.content_type, "transfer-encoding": "chunked", **said.headers}
        lines = [f"HTTP/1.1 {said.status} Said", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for piece in said.pieces:
            if piece is None:
                await writer.drain()
                writer.transport.abort()
                return
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            await asyncio.sleep(said.between_s)
        if said.hang:
            await asyncio.sleep(3600)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
