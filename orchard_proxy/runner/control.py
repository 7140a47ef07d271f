"""The runner's one way to the proxy: its control plane over HTTP.

A request that finds nobody, or a broken server (5xx), is asked again until `patience_s` is over: create and finish are
idempotent by the rollout's id, so a proxy that was killed and started again costs time and nothing else.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from orchard_proxy.errors import ControlError, OrchardError
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.records import Failure, RewardEntry

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_DERIVE_WAIT_S = 60.0
_PAGE = 1000


class ProxyLostError(OrchardError):
    """The control plane did not answer for as long as we were willing to wait."""


class Created(msgspec.Struct, frozen=True):
    """Answer to create: the capability of the rollout."""

    rollout_id: str
    api_key: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as the control plane lists it."""

    rollout_id: str
    group_id: str | None = None
    task_id: str | None = None
    attempt: int = 1
    run_id: str | None = None
    harness: str | None = None
    status: RolloutStatus = RolloutStatus.RUNNING
    reward: float | None = None
    rewards: list[RewardEntry] = []
    failure: Failure | None = None
    started_s: float = 0.0
    finished_s: float | None = None
    metadata: dict[str, Any] = {}


class ListedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed here of a call."""

    outcome: str
    http_status: int | None = None
    prompt_tokens: int | None = None
    sampled_tokens: list[int] = []


class _Page(msgspec.Struct):
    rollouts: list[Listed]
    derived: bool = True


class _Shown(msgspec.Struct):
    calls: list[ListedCall]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class ControlClient:
    """Asks one control plane. `url` is asked for each time, because a proxy that starts again has another port."""

    def __init__(self, url: Callable[[], str], admin_key: str, *, patience_s: float = 60.0) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_DERIVE_WAIT_S + 30, sock_connect=5)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def create(self, rollout_id: str, **fields: Any) -> Created:
        """Create a rollout, or get the key of the one that is there with the same fields."""
        body = await self._ask("POST", "/rollouts", {"rollout_id": rollout_id, **fields})
        return msgspec.json.decode(body, type=Created)

    async def finish(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Finish a rollout; asked twice, the second one wins."""
        body = {
            "status": status,
            "reward": reward,
            "rewards": rewards or {},
            "metadata": metadata or {},
            "failure": failure,
        }
        await self._ask("POST", f"/rollouts/{quote(rollout_id)}/finish", body, patience_s=patience_s)

    async def calls(self, rollout_id: str) -> list[ListedCall]:
        """Return the calls of a rollout, once they are derived."""
        body = await self._ask("GET", f"/rollouts/{quote(rollout_id)}?wait_s={_DERIVE_WAIT_S:g}")
        return msgspec.json.decode(body, type=_Shown).calls

    async def samples(self, rollout_id: str, *, wait_s: float = 10.0) -> dict[str, Any]:
        """Return samples and accounting of a rollout."""
        body = await self._ask("GET", f"/rollouts/{quote(rollout_id)}/samples?wait_s={wait_s:g}")
        return msgspec.json.decode(body, type=dict[str, Any])

    async def rollouts(self, run_id: str) -> AsyncIterator[Listed]:
        """Iterate over all rollouts of a run. Raises ProxyLostError when the list cannot be brought up to date."""
        after = ""
        while True:
            query = f"run_id={quote(run_id)}&limit={_PAGE}&wait_s={_DERIVE_WAIT_S:g}{after}"
            page = msgspec.json.decode(await self._ask("GET", f"/rollouts?{query}"), type=_Page)
            if not page.derived:
                raise ProxyLostError(f"the catalog is not up to date after {_DERIVE_WAIT_S:g} s; try again later")
            for rollout in page.rollouts:
                yield rollout
            if len(page.rollouts) < _PAGE:
                return
            after = f"&after={quote(page.rollouts[-1].rollout_id)}"

    async def models(self, api_key: str) -> list[str]:
        """Return the models that the policy server lists, asked for with a rollout's key; none where it lists none."""
        assert self._session is not None
        headers = {"Authorization": f"Bearer {api_key}"}
        try:
            async with self._session.get(f"{self._url()}/v1/models", headers=headers) as answer:
                return [one.id for one in msgspec.json.decode(await answer.read(), type=_Models).data]
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            logger.debug("no list of models: %s", error)
            return []

    async def ready(self) -> str | None:
        """Return None when the policy server is known to answer, else what is the matter."""
        try:
            await self._ask("GET", "/readyz", final=frozenset({503}))
        except ControlError as error:
            return str(error)
        return None

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        patience_s: float | None = None,
        final: frozenset[int] = frozenset(),
    ) -> bytes:
        """Ask until there is an answer; one with a status in `final` is taken as it is."""
        clock = asyncio.get_running_loop().time
        until = clock() + (self._patience_s if patience_s is None else patience_s)
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._once(method, path, body, final)
            except _AgainError as error:
                if clock() + wait_s > until:
                    raise ProxyLostError(
                        f"the proxy at {self._url()} does not answer {method} {path}: {error}"
                    ) from error
                logger.debug("%s %s: %s; again in %.2f s", method, path, error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _once(self, method: str, path: str, body: Any, final: frozenset[int]) -> bytes:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self._url() + path, data=data, headers=self._headers) as answer:
                told = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _AgainError(str(error) or type(error).__name__) from error
        if answer.status >= 500 and answer.status not in final:
            raise _AgainError(f"HTTP {answer.status}: {_message(told)}")
        if answer.status >= 400:
            raise ControlError(f"{_message(told)} (HTTP {answer.status} to {method} {path})", answer.status)
        return told


class _AgainError(Exception):
    """Worth asking again."""


def _message(body: bytes) -> str:
    try:
        read = msgspec.json.decode(body)
        return str(read["error"]["message"] if "error" in read else read.get("reason", read))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace")
