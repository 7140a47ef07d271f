"""A unix socket that leads to a proxy elsewhere, for sandboxes: HTTP-aware, data plane only.

Not the recording relay: nothing is read, kept or changed here, streams pass as they come. Invariant: no path outside
/v1 and /r gets through, so that a sandbox cannot even ask the control plane.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

logger = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CONNECT_S = 10.0
_DRAIN_S = 1.0


class Relay:
    """One socket, open within the context."""

    def __init__(self, socket: Path, target: str) -> None:
        self._socket = socket
        self._target = target.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, auto_decompress=False, shutdown_timeout=_DRAIN_S
        )
        await self._runner.setup()
        self._socket.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self._socket), backlog=1024).start()
        self._socket.chmod(0o666)  # The folder around it says who may come here.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()
        self._socket.unlink(missing_ok=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        path = request.raw_path
        if not is_data_plane(path):
            return _error(404, "unknown_route", "This socket serves /v1/… and /r/<key>/v1/… only.")
        body = request.content if request.body_exists else None
        headers = _passed_on(request.headers)
        asked = self._session.request(
            request.method, URL(self._target + path, encoded=True), data=body, headers=headers, allow_redirects=False
        )
        try:
            async with asked as answer:
                return await _pass(request, answer)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            logger.warning("the proxy at %s cannot be reached: %s", self._target, error)
            return _error(502, "proxy_unreachable", "The recording proxy cannot be reached.")


def is_data_plane(raw_path: str) -> bool:
    """Say whether a request line's path is one that a harness may ask for, however a server would read it."""
    path = raw_path.partition("?")[0]
    parts = path.split("/")
    dots = {".", "..", "%2e", "%2e%2e", ".%2e", "%2e."}
    return parts[1:2] in (["v1"], ["r"]) and len(parts) > 2 and not dots & {part.lower() for part in parts}


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    named = {name.strip().lower() for name in kept.get("Connection", "").split(",")}
    for name in list(kept):
        if name.lower() in _HOP_BY_HOP | named:
            kept.popall(name, None)
    return kept


async def _pass(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer on, chunk by chunk. One that is cut off is cut off here too, never ended as if it were whole."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers))
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
        return response
    except ConnectionError:
        return response  # The harness has left; leaving the context closes the connection to the proxy.
    await response.write_eof()
    return response


def _error(status: int, code: str, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "api_error", "param": None, "code": code}}
    return web.json_response(body, status=status)


def short_socket(folder: Path, name: str, spare: Path) -> Path:
    """Return folder/name, or spare/name where that is too long for a unix socket's address (108 bytes)."""
    path = (folder / name).absolute()
    return path if len(os.fsencode(path)) < 100 else spare / name
