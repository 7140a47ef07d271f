"""Reading request bodies within bounds: one body, and all of one rollout together.

What a call holds counts until the call is over. So a harness that opens many connections and sends much on each gets a
429, and the memory of the server, which all rollouts share, is not its to fill.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from orchard_proxy.server.registry import Refusal


class RefusedError(Exception):
    """The body is not taken; `refusal` says why, for the dialect to spell."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Intake:
    """Counts what the calls of each rollout hold."""

    def __init__(self, *, body_bytes: int, rollout_bytes: int, stall_s: float) -> None:
        self._body_bytes = body_bytes
        self._rollout_bytes = max(rollout_bytes, body_bytes)
        self._stall_s = stall_s
        self._held: Counter[str] = Counter()

    @contextmanager
    def call(self, rollout_id: str) -> Iterator["Held"]:
        """Account for one call; what it holds is given back at the end."""
        held = Held(self, rollout_id)
        try:
            yield held
        finally:
            self._held[rollout_id] -= held.size_bytes
            if self._held[rollout_id] <= 0:
                del self._held[rollout_id]

    def take(self, rollout_id: str, size_bytes: int, total_bytes: int) -> None:
        """Count bytes of a body that is `total_bytes` long by now. Raise RefusedError at a bound."""
        if total_bytes > self._body_bytes:
            text = f"The request is larger than {self._body_bytes} bytes. Raise --max-body-bytes of orchard serve."
            raise RefusedError(Refusal(413, "request_too_large", text))
        self._held[rollout_id] += size_bytes
        if self._held[rollout_id] > self._rollout_bytes:
            text = f"The requests of this rollout hold more than {self._rollout_bytes} bytes. Let some finish first."
            raise RefusedError(Refusal(429, "rollout_holds_too_much", text))

    @property
    def stall_s(self) -> float:
        """Longest wait for the next piece of a body, in seconds."""
        return self._stall_s


class Held:
    """What one call holds."""

    def __init__(self, intake: Intake, rollout_id: str) -> None:
        self._intake = intake
        self._rollout_id = rollout_id
        self.size_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Read the body. Raise RefusedError when it is too large, or its sender falls silent."""
        if request.content_length is not None:
            self._intake.take(self._rollout_id, 0, request.content_length)
        pieces = []
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._intake.stall_s) as limit:
                async for piece in request.content.iter_any():
                    self.size_bytes += len(piece)
                    self._intake.take(self._rollout_id, len(piece), self.size_bytes)
                    pieces.append(piece)
                    limit.reschedule(loop.time() + self._intake.stall_s)
        except TimeoutError as error:
            text = f"No byte of the request came for {self._intake.stall_s:g} s."
            raise RefusedError(Refusal(408, "request_stalled", text)) from error
        return b"".join(pieces)
