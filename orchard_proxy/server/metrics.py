"""Counters and probes: /metrics, /healthz, /readyz. Base units; no rollout id in a label."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from orchard_proxy.schema.enums import Outcome

_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter("orchard_calls", "Committed calls", ["outcome", "engine"], registry=self._registry)
        self._seconds = Histogram(
            "orchard_call_seconds", "Request to commit", buckets=_BUCKETS_S, registry=self._registry
        )
        self._refused = Counter("orchard_refused", "Requests let not in", ["status"], registry=self._registry)
        self._open = Gauge("orchard_calls_in_flight", "Calls on their way", registry=self._registry)
        self.deriver_restarts = Counter(
            "orchard_deriver_restarts", "Times the deriver had to be started again", registry=self._registry
        )

    def ended(self, outcome: Outcome, engine: str, seconds: float) -> None:
        """Count one committed call."""
        self._calls.labels(outcome.value, engine).inc()
        self._seconds.observe(seconds)

    def refused(self, status: int) -> None:
        """Count one request that was not let in."""
        self._refused.labels(str(status)).inc()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a call while it runs."""
        self._open.inc()
        try:
            yield
        finally:
            self._open.dec()

    async def handle(self, _request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
