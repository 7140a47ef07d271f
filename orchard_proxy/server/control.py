"""The control plane: create, list, finish rollouts; read their samples. Admin key only, on loopback too.

Rollouts and rewards are committed to the journal like calls are, so that `orchard derive` can rebuild them.
"""

import hashlib
import hmac
import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from orchard_proxy.assemble import samples
from orchard_proxy.errors import ControlError
from orchard_proxy.record.queries import Filter
from orchard_proxy.record.recorder import Recorder, now_us
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.frames import FinishFrame, RolloutFrame
from orchard_proxy.schema.records import Failure
from orchard_proxy.server import keys, render
from orchard_proxy.server.reading import Reading
from orchard_proxy.server.registry import Entry, Registry

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_LIST_QUERY = {"status", "group_id", "task_id", "run_id", "after", "limit", "wait_s"}
_MAX_WAIT_S = 300.0
_T = TypeVar("_T")


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rollouts."""

    rollout_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    run_id: str | None = None
    harness: str | None = None
    harness_version: str | None = None
    image_digest: str | None = None
    model: str | None = None
    metadata: dict[str, Any] = {}


class FinishRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rollouts/{id}/finish."""

    status: RolloutStatus | None = None
    """None: as it was, or `completed` when this is the first finish."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    failure: Failure | None = None


class ControlPlane:
    """Handlers of /rollouts."""

    def __init__(
        self, *, registry: Registry, recorder: Recorder, reading: Reading, admin_key: str, secret: bytes
    ) -> None:
        self._registry = registry
        self._recorder = recorder
        self._reading = reading
        self._admin_key = admin_key
        self._secret = secret

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, all of them behind the admin key."""
        return [
            web.post("/rollouts", self._create),
            web.get("/rollouts", self._list),
            web.get("/rollouts/{rollout_id}", self._show),
            web.post("/rollouts/{rollout_id}/finish", self._finish),
            web.get("/rollouts/{rollout_id}/samples", self._samples),
        ]

    def check(self, request: web.Request) -> None:
        """Let the admin key in. Raises ControlError for anything else."""
        carried = keys.carried(request.rel_url.raw_path, request.rel_url.raw_query_string, request.headers)
        if carried.conflict:
            raise ControlError("The request carries two different keys. Send one, in one place.", 400)
        if carried.key is None:
            raise ControlError("No admin key. Send it as Authorization: Bearer; it is in DATA/admin.key.", 401)
        if hmac.compare_digest(keys.digest(carried.key), keys.digest(self._admin_key)):
            return
        if self._registry.by_key(carried.key) is not None:
            raise ControlError(
                "A rollout's key makes calls; it cannot read or reward rollouts. Use the admin key.", 403
            )
        raise ControlError("Wrong admin key. The right one is in DATA/admin.key, or what --admin-key said.", 401)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.read()
        wanted = _parse(body, RolloutRequest)
        rollout_id = f"r-{secrets.token_hex(8)}" if wanted.rollout_id is None else wanted.rollout_id
        if not _ID.fullmatch(rollout_id):
            raise ControlError(
                "rollout_id takes 1 to 128 of A-Z a-z 0-9 . _ : - and begins with a letter or digit.", 400
            )
        fingerprint = hashlib.sha256(msgspec.json.encode(wanted, order="deterministic")).hexdigest()
        known = self._registry.get(rollout_id)
        if known is not None:
            if known.implicit:
                raise ControlError(f"{rollout_id!r} is a label that --open has recorded under. Use another id.", 409)
            if known.body_sha256 != fingerprint:
                raise ControlError(
                    f"Rollout {rollout_id!r} exists with another body. Use a new rollout_id for a new attempt.", 409
                )
            return self._created(request, rollout_id, 200)
        await self._record_new(wanted, rollout_id, fingerprint)
        return self._created(request, rollout_id, 201)

    async def _record_new(self, wanted: RolloutRequest, rollout_id: str, fingerprint: str) -> None:
        key_sha256 = keys.digest(keys.mint(self._secret, rollout_id))
        entry = Entry(rollout_id=rollout_id, key_sha256=key_sha256, implicit=False, body_sha256=fingerprint)
        frame = RolloutFrame(
            rollout_id=rollout_id,
            created_us=now_us(),
            key_sha256=key_sha256,
            body_sha256=fingerprint,
            metadata=msgspec.json.encode(wanted.metadata),
            **{name: getattr(wanted, name) for name in _SHARED_FIELDS},
        )
        self._registry.add(entry)
        try:
            await self._recorder.rollout(frame)
        except BaseException:
            self._registry.remove(entry)
            raise

    def _created(self, request: web.Request, rollout_id: str, status: int) -> web.Response:
        key = keys.mint(self._secret, rollout_id)
        root = f"{request.scheme}://{request.host}"
        urls = {"openai": f"{root}/v1", "path": f"{root}{keys.PATH_PREFIX}{key}/v1"}
        return web.json_response({"rollout_id": rollout_id, "api_key": key, "base_urls": urls}, status=status)

    async def _list(self, request: web.Request) -> web.Response:
        _check_query(request)
        derived = await self._reading.caught_up(_wait_s(request, default=2.0))
        rollouts = await self._reading.rollouts(
            wanted=Filter(**{name: request.query.get(name) for name in ("status", "group_id", "task_id", "run_id")}),
            after=request.query.get("after"),
            limit=_integer(request, "limit", default=100, most=1000),
        )
        listed = [render.rollout(rollout) for rollout in rollouts]
        return web.json_response({"rollouts": listed, "derived": derived})

    async def _show(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        await self._reading.caught_up(_wait_s(request, default=2.0))
        rollout = await self._reading.rollout(entry.rollout_id)
        calls = await self._reading.calls(entry.rollout_id)
        return web.json_response({**render.rollout(rollout), "calls": [render.call(call) for call in calls]})

    async def _finish(self, request: web.Request) -> web.Response:
        wanted = _parse(await request.read(), FinishRequest)
        entry = self._entry(request)
        if wanted.status is RolloutStatus.RUNNING:
            raise ControlError("A rollout is finished as completed, failed or aborted.", 400)
        version = entry.finish_version + 1
        frame = FinishFrame(
            rollout_id=entry.rollout_id,
            finished_us=now_us(),
            status=wanted.status,
            reward=wanted.reward,
            rewards=wanted.rewards,
            metadata=msgspec.json.encode(wanted.metadata),
            failure=wanted.failure,
            version=version,
        )
        entry.finish_version = version
        before, entry.finished_us = entry.finished_us, entry.finished_us or frame.finished_us
        try:
            await self._recorder.finish(frame)
        except BaseException:
            entry.finished_us = before
            raise
        return web.json_response(
            {
                "rollout_id": entry.rollout_id,
                "status": wanted.status,
                "reward": wanted.reward,
                "reward_version": version,
            }
        )

    async def _samples(self, request: web.Request) -> web.Response:
        entry = self._entry(request)
        wait_s = _wait_s(request, default=10.0)
        if not await self._reading.caught_up(wait_s):
            raise ControlError(
                f"Not derived within {wait_s:g} s. Ask again, or raise wait_s (most {_MAX_WAIT_S:g}).", 504
            )
        rollout = await self._reading.rollout(entry.rollout_id)
        built, accounting = samples.build(rollout, await self._reading.calls(entry.rollout_id))
        return web.json_response(
            {
                "rollout_id": entry.rollout_id,
                "status": rollout.status,
                "samples": [render.sample(sample) for sample in built],
                "accounting": msgspec.to_builtins(accounting),
            }
        )

    def _entry(self, request: web.Request) -> Entry:
        entry = self._registry.get(request.match_info["rollout_id"])
        if entry is None:
            raise ControlError(f"No rollout {request.match_info['rollout_id']!r}. GET /rollouts lists them.", 404)
        return entry


_SHARED_FIELDS = (
    "group_id",
    "task_id",
    "attempt",
    "run_id",
    "harness",
    "harness_version",
    "image_digest",
    "model",
)


def _parse(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(f"The body is not valid: {error}.", 400) from error


def _check_query(request: web.Request) -> None:
    unknown = sorted(set(request.query) - _LIST_QUERY)
    if unknown:
        raise ControlError(f"Unknown query parameter {unknown[0]!r}; known: {', '.join(sorted(_LIST_QUERY))}.", 400)
    status = request.query.get("status")
    if status is not None and status not in set(RolloutStatus):
        raise ControlError(f"status is one of {', '.join(RolloutStatus)}, not {status!r}.", 400)


def _wait_s(request: web.Request, *, default: float) -> float:
    try:
        wanted = float(request.query.get("wait_s", default))
    except ValueError:
        wanted = -1.0
    if not 0 <= wanted <= _MAX_WAIT_S:
        raise ControlError(f"wait_s is a number of seconds from 0 to {_MAX_WAIT_S:g}", 400)
    return wanted


def _integer(request: web.Request, name: str, *, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise ControlError(f"{name} is a whole number from 1 to {most}", 400)
    return int(text)
