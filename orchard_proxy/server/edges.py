"""The doors of the relay: what it asks of the client's side and of the engine's side.

The relay knows no socket. `server.http_reply` and `upstream.client` are the doors that production uses; a leaner
transport is another pair of classes with these methods.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Reply(Protocol):
    """The client's side of a call. Every method raises ClientGoneError when the client has left."""

    @property
    def started(self) -> bool:
        """Whether a status line went out."""
        ...

    @property
    def client_gone(self) -> bool:
        """Whether the client's connection is closed."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds since the client last got a byte; 0 while it is being given one."""
        ...

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status line of a stream."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes and wait until the kernel took them."""
        ...

    async def finish(self) -> None:
        """Send the end of the stream and wait until the kernel took it."""
        ...

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer and wait until the kernel took it."""
        ...

    def cut(self) -> None:
        """Close without an end, so that a broken stream cannot look like a whole one."""
        ...


class Answer(Protocol):
    """An engine's answer, as it arrives."""

    status: int
    """HTTP status."""
    headers: dict[str, str]
    """Headers that may be passed on: no hop-by-hop ones, no content-length."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it is read. Raises UpstreamError when it is cut off."""
        ...


class Upstream(Protocol):
    """The engine's side."""

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[Answer]:
        """Send a request. Leaving the context early closes the connection: the engine sees the client go."""
        ...

    def whole(self, method: str, path: str) -> AbstractAsyncContextManager[tuple[Answer, bytes]]:
        """Ask without a body and give the answer with its whole body. Raises UpstreamError."""
        ...

    async def fetch(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Ask for a small answer (POST with a body, GET without). Raises UpstreamError."""
        ...
