"""The engine's door, on aiohttp: one pool of connections, and every foreign error turned into UpstreamError.

A request is sent again only when it went out on a pooled connection that turned out to be closed already: no byte of
an answer had come and the connection died at once. Anything else might generate twice.
"""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Self

import aiohttp

from orchard_proxy.errors import UpstreamError

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "content-encoding",
    "date",
}
_STALE_S = 1.0
"""A connection that was closed while idle shows it within a round trip; a request that was worked on does not."""
_LARGE_BYTES = 1 << 20
_DRAIN_S = 0.1
"""How long the rest of a finished stream may take before its connection is given up instead of reused."""


class HttpAnswer:
    """One answer as it arrives."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response = response
        self._url = url
        self.status = response.status
        self.headers = {k: v for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it is read."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except TimeoutError as error:
            raise UpstreamError(f"the policy server at {self._url} fell silent", "engine_silent") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UpstreamError(
                f"the policy server at {self._url} cut its answer off: {error}", "engine_cut"
            ) from error

    async def leave(self) -> None:
        """Read what is left behind the end of the answer, so that the connection can be used again."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(_DRAIN_S):
                await self._response.content.read()


class HttpUpstream:
    """All connections to one engine."""

    def __init__(self, url: str, *, key: str | None, connect_s: float, silence_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            trace_configs=[trace],
            read_bufsize=256 * 1024,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        """Send a request and give its answer. Leaving early closes the connection."""
        response = await self._request("POST", path, body, headers)
        answer = HttpAnswer(response, self.url)
        try:
            yield answer
            await answer.leave()
        finally:
            response.close()  # Without effect once the connection went back to the pool.

    async def fetch(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Ask for a small answer."""
        async with self.whole("GET" if body is None else "POST", path, body) as (response, answer):
            return response.status, answer

    @asynccontextmanager
    async def whole(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[tuple[HttpAnswer, bytes]]:
        """Give an answer together with its whole body."""
        response = await self._request(method, path, body, {})
        answer = HttpAnswer(response, self.url)
        try:
            yield answer, b"".join([chunk async for chunk in answer.chunks()])
        finally:
            response.close()

    async def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        for attempt in (1, 2):
            trace = SimpleNamespace(reused=False)
            sent = time.monotonic()
            try:
                return await self._session.request(
                    method,
                    self.url + path,
                    data=_payload(body),
                    headers={**headers, **self._headers},
                    trace_request_ctx=trace,
                    allow_redirects=False,
                )
            except TimeoutError as error:
                raise self._silent_or_down(error) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                stale = trace.reused and time.monotonic() - sent < _STALE_S
                if attempt == 2 or not stale:
                    raise self._failed(error) from error
        raise AssertionError("the second attempt returns or raises")

    def _silent_or_down(self, error: TimeoutError) -> UpstreamError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return UpstreamError(
                f"the policy server at {self.url} takes no connection; start it or fix --upstream", "engine_unreachable"
            )
        return UpstreamError(f"the policy server at {self.url} fell silent", "engine_silent")

    def _failed(self, error: Exception) -> UpstreamError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return UpstreamError(
                f"cannot reach the policy server at {self.url} ({error.strerror}); start it or fix --upstream",
                "engine_unreachable",
            )
        return UpstreamError(f"the policy server at {self.url} closed the connection: {error}", "engine_cut")


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """Let aiohttp send a large body piece by piece, so that it does not hold up the other calls."""
    return io.BytesIO(body) if body is not None and len(body) > _LARGE_BYTES else body


async def _mark_reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True
