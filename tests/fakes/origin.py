"""A scripted HTTP server in place of a proxy elsewhere: what it answers, and when it breaks off, is up to the test.

A real `orchard serve` cannot be made to answer 503 twice and then well, or to cut a stream at a given byte.
"""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web


class Origin:
    """Answers with `handle`, and keeps what it was asked."""

    def __init__(self):
        self.url = ""
        self.asked = []
        self.left = asyncio.Event()
        self.handle = None

    async def _handle(self, request):
        body = await request.read()
        self.asked.append((request.method, request.raw_path, dict(request.headers), body))
        try:
            return await self.handle(request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise


@asynccontextmanager
async def an_origin(handle):
    """Serve on a free port of loopback."""
    origin = Origin()
    origin.handle = handle
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", origin._handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    origin.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield origin
    finally:
        await runner.cleanup()
