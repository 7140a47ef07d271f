"""Keep-alive comments for a client that waits for a stream.

A comment goes out only between two writes of the relay, which writes whole events, so it can never fall into one.
The first comment also sends the status line: until then an early failure of the engine keeps its true status.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from orchard_proxy.errors import ClientGoneError
from orchard_proxy.server.edges import Reply
from orchard_proxy.wire import sse


class Heartbeat:
    """Beats whenever the client has waited `interval_s` for a byte."""

    def __init__(self, reply: Reply, interval_s: float, headers: Mapping[str, str]) -> None:
        self._reply = reply
        self._interval_s = interval_s
        self._headers = headers
        self._task: asyncio.Task[None] | None = None
        self.beats = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _run(self) -> None:
        with contextlib.suppress(ClientGoneError):  # The relay meets the same closed connection and records it.
            while True:
                await asyncio.sleep(max(self._interval_s - self._reply.idle_s, self._interval_s / 10))
                if self._reply.idle_s >= self._interval_s:
                    await self._beat()

    async def _beat(self) -> None:
        self.beats += 1
        if not self._reply.started:
            await self._reply.start(200, self._headers)
        await self._reply.write(sse.comment(b"keep-alive"))
