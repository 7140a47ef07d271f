"""Knows what the policy server is, by looking at what it answers.

Probes at start and before the first call after a failure. Probes generate at most two tokens and are never journaled.
Until one has succeeded, calls probe themselves, so that a proxy that was started before its engine needs no restart.
"""

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import Self

import msgspec

from orchard_proxy.engines import probe, registry
from orchard_proxy.engines.base import Engine
from orchard_proxy.errors import UpstreamError
from orchard_proxy.upstream.client import HttpUpstream

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 5.0


class EngineInUse(msgspec.Struct, frozen=True):
    """The policy server as its probe found it."""

    engine: Engine
    url: str
    logprobs_mode: str
    """`raw`, `processed` or `none`."""
    n_vocab: int | None = None
    """Size of the vocabulary, where the engine tells it."""


class EngineWatch:
    """What is known of one policy server. `engine` is `auto` or the name that the user insists on."""

    def __init__(self, upstream: HttpUpstream, engine: str) -> None:
        self._upstream = upstream
        self._wanted = engine
        self._known: EngineInUse | None = None
        self._last: EngineInUse | None = None
        """What it was when last probed with success."""
        self._attempts = 0
        self._problem = "not probed yet"
        self._error = UpstreamError(self._problem, "engine_unknown")
        self._probing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._look = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._look.set()
        self._task = asyncio.create_task(self._keep_looking())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def current(self) -> EngineInUse:
        """Return the engine, probing it first where that is still to be done. Raises UpstreamError."""
        return self._known or await self._probe()

    def suspect(self, reason: str) -> None:
        """Have the engine probed again before the next call."""
        self._known = None
        self._problem = reason
        self._look.set()

    @property
    def known(self) -> EngineInUse | None:
        """The engine, where the last probe found one and no call has failed since."""
        return self._known

    @property
    def problem(self) -> str:
        """Why the engine is not known."""
        return self._problem

    async def _keep_looking(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            await self._look.wait()
            with contextlib.suppress(UpstreamError):  # It is in self._problem, for whoever asks.
                await self._probe()
            if self._known is None:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                wait_s = _FIRST_WAIT_S
                self._look.clear()

    async def _probe(self) -> EngineInUse:
        asked_at = self._attempts
        async with self._probing:
            if self._known is None and self._attempts == asked_at:  # Who waited here takes the answer of who asked.
                await self._try()
            if self._known is not None:
                return self._known
            if self._last is not None:
                return self._last  # It may just be busy; the call itself will find out.
            raise self._error

    async def _try(self) -> None:
        self._attempts += 1
        try:
            self._known = self._last = await self._ask()
        except UpstreamError as error:
            self._error, self._problem = error, str(error)
            return
        found = self._known
        logger.info("policy server at %s: %s, log-probabilities %s", found.url, found.engine.name, found.logprobs_mode)

    async def _ask(self) -> EngineInUse:
        models = await self._models()
        plan = probe.probe(_first_model(models))
        request = next(plan)
        while True:
            status, body = await self._upstream.fetch(request.path, request.body)
            try:
                request = plan.send(probe.ProbeAnswer(status=status, body=body))
            except StopIteration as done:
                return self._settle(done.value, probe.n_vocab(models))

    async def _models(self) -> bytes:
        """Return the answer to GET /v1/models; empty where there is none."""
        status, body = await self._upstream.fetch("/v1/models", None)
        return body if status == 200 else b""

    def _settle(self, found: probe.ProbeResult, n_vocab: int | None) -> EngineInUse:
        name = found.engine if self._wanted == "auto" else self._wanted
        if name is None or found.engine is None:
            why = "; ".join(found.notes)
            message = f"the policy server at {self._upstream.url} does not answer as one: {why}"
            raise UpstreamError(message, "engine_unknown")
        for note in found.notes:
            logger.info("policy server at %s: %s", self._upstream.url, note)
        return EngineInUse(registry.get(name), self._upstream.url, found.logprobs_mode, n_vocab)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _first_model(models: bytes) -> str | None:
    try:
        listed = msgspec.json.decode(models, type=_Models).data
    except msgspec.MsgspecError:
        return None
    return listed[0].id if listed else None
