"""The host's end of a sandbox's control socket: requests out, answers to whoever waits for them."""

import asyncio
import contextlib
import itertools
import socket

from env_service.agent import frames

_READ_BYTES = 256 * 1024


class ChannelClosedError(Exception):
    """The supervisor is gone."""


class Channel:
    """One control socket. Requests may overlap; each answer finds its request by number."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[tuple[frames.Header, bytes]]] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def over(cls, sock: socket.socket) -> "Channel":
        """Speak over our end of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def start(self, header: frames.Header, body: bytes = b"") -> "Pending":
        """Send a request; its number and its answer to come."""
        if self._closed:
            raise ChannelClosedError("the supervisor of the sandbox is gone")
        number = next(self._numbers)
        future: asyncio.Future[tuple[frames.Header, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        # No drain: how much is under way is bounded by how many callers wait, and a dead reader is found by _receive.
        self._writer.write(frames.encode({**header, "id": number}, body))
        return Pending(number, future)

    async def request(self, header: frames.Header, body: bytes = b"") -> tuple[frames.Header, bytes]:
        """Send a request and wait for its answer."""
        return await self.start(header, body).answer

    async def _receive(self) -> None:
        decoder = frames.Decoder()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for header, body in decoder.feed(data):
                    future = self._waiting.pop(int(str(header["id"])), None)
                    if future is not None and not future.done():
                        future.set_result((header, body))
        except (ConnectionError, frames.FrameError):
            pass
        finally:
            self._fail()

    def _fail(self) -> None:
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChannelClosedError("the supervisor of the sandbox is gone"))
                future.exception()  # nobody may be left to look at it
        self._waiting.clear()

    async def close(self) -> None:
        """Close the socket, which ends the supervisor."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Pending:
    """A request under way."""

    def __init__(self, number: int, answer: "asyncio.Future[tuple[frames.Header, bytes]]") -> None:
        self.number = number
        self.answer = answer
