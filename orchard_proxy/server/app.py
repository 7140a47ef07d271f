"""The aiohttp application: routes, the data-plane handler, error shapes. Wiring only; the pipeline is relay.py."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from orchard_proxy.errors import ControlError, JournalError, UpstreamError
from orchard_proxy.record.recorder import now_us
from orchard_proxy.schema.frames import RolloutFrame
from orchard_proxy.server import identify
from orchard_proxy.server.control import ControlPlane
from orchard_proxy.server.http_reply import HttpReply
from orchard_proxy.server.intake import Intake, RefusedError
from orchard_proxy.server.metrics import Metrics
from orchard_proxy.server.registry import Entry, Refusal, Registry
from orchard_proxy.server.relay import House, Incoming, Relay
from orchard_proxy.wire import chat

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DataPlane:
    """What a harness may reach: the model API, under a rollout's key."""

    def __init__(self, house: House, registry: Registry, metrics: Metrics, intake: Intake, *, stall_s: float) -> None:
        self._house = house
        self._registry = registry
        self._metrics = metrics
        self._stall_s = stall_s
        self._intake = intake

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Identify, then relay or refuse."""
        url = request.rel_url
        known = identify.identify(request.method, url.path, url.raw_query_string, request.headers, self._registry)
        if isinstance(known, Refusal):
            return self._refuse(known)
        if known.path == identify.MODELS_PATH:
            return await self._models()
        return await self._call(request, known.entry, known.path)

    async def _call(self, request: web.Request, entry: Entry, path: str) -> web.StreamResponse:
        begun_us = now_us()
        with self._intake.call(entry.rollout_id) as held:
            try:
                body = await held.read(request)
            except RefusedError as error:
                return self._refuse(error.refusal)
            return await self._relay(request, await self._known(entry, begun_us), path, body, begun_us)

    async def _relay(
        self, request: web.Request, entry: Entry, path: str, body: bytes, begun_us: int
    ) -> web.StreamResponse:
        incoming = Incoming(
            entry=entry,
            path=path,
            recorded_headers=identify.recorded_headers(request.headers),
            upstream_headers=identify.upstream_headers(request.headers),
            body=body,
            begun_us=begun_us,
        )
        reply = HttpReply(request, stall_s=self._stall_s)
        with self._metrics.in_flight():
            await Relay(self._house, incoming, reply).run()
        return reply.response

    async def _known(self, entry: Entry, now_us: int) -> Entry:
        """Return the one entry of a rollout; an implicit one is recorded at its first call."""
        known = self._registry.get(entry.rollout_id)
        if known is not None:
            return known
        self._registry.add(entry)
        frame = RolloutFrame(rollout_id=entry.rollout_id, created_us=now_us, implicit=True)
        try:
            await self._house.recorder.rollout(frame)
        except BaseException:
            self._registry.remove(entry)
            raise
        return entry

    async def _models(self) -> web.Response:
        """Pass the engine's list through."""
        async with self._house.upstream.whole("GET", identify.MODELS_PATH) as (answer, body):
            return web.Response(status=answer.status, headers=answer.headers, body=body)

    def _refuse(self, refusal: Refusal) -> web.Response:
        self._metrics.refused(refusal.status)
        return _dialect_error(refusal.status, refusal.message, refusal.code)


def _dialect_error(status: int, message: str, code: str) -> web.Response:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = chat.error_body(message, type=kind, code=code)
    return web.Response(status=status, body=body, content_type="application/json")


@web.middleware
async def errors_in_shape(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn our own errors into the OpenAI error shape, with a sentence that says what to do."""
    try:
        return await handler(request)
    except ControlError as error:
        return _dialect_error(error.status, str(error), "control_error")
    except UpstreamError as error:
        return _dialect_error(502, str(error), error.code)
    except JournalError as error:
        return _dialect_error(500, str(error), "not_recorded")
    except web.HTTPRequestEntityTooLarge:
        return _dialect_error(413, "The request body is too large.", "request_too_large")
    except web.HTTPException as error:
        return _dialect_error(error.status, f"{request.method} {request.path}: {error.reason}", "http_error")


def data_app(data: DataPlane, *, max_body_bytes: int) -> web.Application:
    """Make the application that a sandbox's socket serves: the data plane and nothing else."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[errors_in_shape])
    app.router.add_route("*", "/{tail:.*}", data.handle)
    return app


def full_app(
    data: DataPlane, control: ControlPlane, probes: list[web.RouteDef], *, max_body_bytes: int
) -> web.Application:
    """Make the application of the main port: probes, control plane, data plane."""

    @web.middleware
    async def admin_only(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path == "/rollouts" or request.path.startswith("/rollouts/"):
            control.check(request)
        return await handler(request)

    app = web.Application(client_max_size=max_body_bytes, middlewares=[errors_in_shape, admin_only])
    app.add_routes([*probes, *control.routes()])
    app.router.add_route("*", "/{tail:.*}", data.handle)
    return app
