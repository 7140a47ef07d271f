"""The client's door, on aiohttp.

The transport's write buffer limit is 0, so that every awaited write means: the kernel has it. That is what `delivery:
confirmed` stands on, and it bounds what a slow reader can make us hold.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from orchard_proxy.errors import ClientGoneError


class HttpReply:
    """One answer to one aiohttp request."""

    def __init__(self, request: web.Request, *, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self._response: web.StreamResponse | None = None
        self._last = time.monotonic()
        self._writing = False
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=0)

    @property
    def started(self) -> bool:
        """Whether a status line went out."""
        return self._response is not None

    @property
    def client_gone(self) -> bool:
        """Whether the client's connection is closed."""
        return self._request.transport is None or self._request.transport.is_closing()

    @property
    def idle_s(self) -> float:
        """Seconds since the client last got a byte; 0 while it is being given one."""
        return 0.0 if self._writing else time.monotonic() - self._last

    @property
    def response(self) -> web.StreamResponse:
        """What the aiohttp handler returns."""
        return self._response if self._response is not None else web.Response(status=499)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status line of a stream."""
        self._response = web.StreamResponse(status=status, headers=headers)
        async with self._giving():
            await self._response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send bytes and wait until the kernel took them."""
        assert self._response is not None
        async with self._giving():
            await self._response.write(data)

    async def finish(self) -> None:
        """Send the end of the stream and wait until the kernel took it."""
        assert self._response is not None
        async with self._giving():
            await self._response.write_eof()

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer and wait until the kernel took it."""
        self._response = response = web.Response(status=status, headers=headers, body=body)
        async with self._giving():
            await response.prepare(self._request)
            await response.write_eof()

    def cut(self) -> None:
        """Close without an end: what was written is flushed, the terminating chunk never comes."""
        if self._request.transport is not None:
            self._request.transport.close()

    @asynccontextmanager
    async def _giving(self) -> AsyncIterator[None]:
        if self.client_gone:
            raise ClientGoneError("the client closed its connection")
        self._writing = True
        try:
            async with asyncio.timeout(self._stall_s):
                yield
                await self._drained()
        except TimeoutError as error:
            self.cut()
            raise ClientGoneError(f"the client read nothing for {self._stall_s:g} s") from error
        except ConnectionError as error:
            raise ClientGoneError("the client closed its connection") from error
        finally:
            self._writing = False
            self._last = time.monotonic()

    async def _drained(self) -> None:
        """Wait for the transport's buffer; aiohttp itself waits only when a write is large."""
        protocol, transport = self._request.protocol, self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError
        if protocol.writing_paused:
            await protocol._drain_helper()  # noqa: SLF001 -- aiohttp offers no public way to await this
