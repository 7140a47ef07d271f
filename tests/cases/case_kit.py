"""The whole path of a case: a real client, the real relay, the journal, the deriver, the samples."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
from fakes.engine import Heard, ScriptedEngine, whole
from proxy import proxy_before

from orchard_proxy.assemble import samples
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.deriver import derive
from orchard_proxy.record.recorder import Recorder, now_us
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.frames import FinishFrame
from orchard_proxy.schema.packed import count, unpack_floats, unpack_ids
from orchard_proxy.schema.records import Accounting, Call, Choice, Rollout, Sample
from orchard_proxy.server import render
from orchard_proxy.server.serve import running
from orchard_proxy.settings import ServeSettings
from orchard_proxy.wire import sse

ADMIN = "the-admin-key-of-these-tests"
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASK_STREAM = {**ASK, "stream": True}
BOTH_WAYS = pytest.mark.parametrize("ask", [ASK, ASK_STREAM], ids=["whole", "stream"])
ENGINES = pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])


def dumps(body) -> bytes:
    return json.dumps(body).encode()


def events(body: bytes) -> list[dict]:
    """Return the JSON of a stream's events, read as the standard says."""
    parser = sse.SseParser()
    found = parser.feed(body) + parser.close()
    return [json.loads(e.data) for e in found if e.data is not None and not sse.is_done(e)]


def content(body: bytes, index: int = 0) -> str:
    """Return the text that a client has of a choice, whole or streamed."""
    if not body.startswith(b"{"):
        choices = [c for e in events(body) for c in e.get("choices", ()) if c["index"] == index]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return json.loads(body)["choices"][index]["message"]["content"]


def direct(speaker, ask: dict) -> bytes:
    """Return what a client gets that calls the engine itself."""
    said = speaker.say(Heard("POST", "/v1/chat/completions", {}, dumps(ask)))
    return b"".join(said.pieces)


class Control:
    """Speaks to a whole server as the runner and a harness do."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine: ScriptedEngine) -> None:
        self.session, self.url, self.engine = session, url, engine

    async def send(self, method: str, path: str, body=None, **headers: str) -> tuple[int, bytes]:
        data = dumps(body) if isinstance(body, dict) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, self.url + path, data=data, headers=named) as answer:
            return answer.status, await answer.read()

    async def admin(self, method: str, path: str, body=None) -> tuple[int, dict]:
        status, answer = await self.send(method, path, body, Authorization=f"Bearer {ADMIN}")
        return status, json.loads(answer, parse_constant=pytest.fail)

    async def call(self, key: str, ask: dict = ASK) -> int:
        return (await self.send("POST", CHAT, ask, Authorization=f"Bearer {key}"))[0]

    async def create(self, rollout_id: str, **more) -> str:
        status, made = await self.admin("POST", "/rollouts", {"rollout_id": rollout_id, **more})
        assert status in (200, 201), made
        return made["api_key"]

    @property
    def generations(self) -> int:
        """How often the engine was asked, its probes left out."""
        return len(
            [heard for heard in self.engine.heard if heard.path == CHAT and b"Name any animal" not in heard.body]
        )


@asynccontextmanager
async def whole_server(say, data_dir: Path, **settings):
    """The server as `orchard serve` makes it, in this process, its deriver a child; before a scripted engine."""

    def answer(heard: Heard):
        if heard.path == "/v1/models":
            return whole({"object": "list", "data": [{"id": "m"}]})
        return getattr(say, "say", say)(heard)

    async with ScriptedEngine(answer) as engine, aiohttp.ClientSession() as session:
        known = {"upstream": engine.url, "data": str(data_dir), "port": 0, "admin_key": ADMIN, "drain_s": 0.5}
        async with running(ServeSettings(**{**known, **settings})) as served:
            yield Control(session, served.url, engine)


@asynccontextmanager
async def path_to(say, data_dir: Path, **settings):
    """A scripted engine with the proxy in front of it. `say`: a function, or a speaker of fakes.speech."""
    async with ScriptedEngine(getattr(say, "say", say)) as engine:
        async with proxy_before(engine.url, data_dir, **settings) as proxy:
            yield engine, proxy


async def ask_once(say, data_dir: Path, ask: dict | bytes, **settings) -> tuple[int, bytes]:
    """Ask once through the proxy; return status and body."""
    async with path_to(say, data_dir, **settings) as (_, proxy):
        async with proxy.post(ask if isinstance(ask, bytes) else dumps(ask)) as answer:
            return answer.status, await answer.read()


def sdk(proxy, key: str = "a-label", **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, **{"max_retries": 0, **more})


async def finish(proxy, rollout_id: str = "a-label") -> None:
    frame = FinishFrame(rollout_id=rollout_id, finished_us=now_us(), status=RolloutStatus.COMPLETED, reward=1.0)
    await Recorder(proxy.journal).finish(frame)


@dataclass
class Told:
    """What the record and the samples say of one rollout."""

    rollout: Rollout
    calls: list[Call]
    samples: list[Sample]
    accounting: Accounting

    @property
    def call(self) -> Call:
        (call,) = self.calls
        return call

    @property
    def choice(self) -> Choice:
        (choice,) = self.call.choices
        return choice

    @property
    def trained(self) -> list[list[int]]:
        """The target ids of each sample."""
        return [
            [token for token, mask in zip(unpack_ids(s.token_ids), s.loss_mask, strict=True) if mask]
            for s in self.samples
        ]

    @property
    def problems(self) -> list[str]:
        return [name for call in self.calls for part in (call, *call.choices) for name in part.problems]


def told(data_dir: Path, rollout_id: str = "a-label") -> Told:
    """Derive to the end and read one rollout; whatever the case, the invariants of CONTRACTS hold."""
    derive(data_dir)
    with Catalog.open(data_dir) as catalog:
        rollout, calls = catalog.rollout(rollout_id), catalog.calls(rollout_id)
    assert rollout is not None
    built, accounting = samples.build(rollout, calls)
    assert accounting.holds
    for sample in built:
        size = count(sample.token_ids)
        assert (len(sample.loss_mask), count(sample.logprobs)) == (size, size)
        known = [value == value for value in unpack_floats(sample.logprobs)]  # noqa: PLR0124 -- NaN is not itself
        assert known == [mask == 1 for mask in sample.loss_mask]
        json.dumps(render.sample(sample), allow_nan=False)
    for call in calls:
        json.dumps(render.call(call), allow_nan=False)
    assert sum(sum(sample.loss_mask) for sample in built) == accounting.trained
    return Told(rollout, calls, built, accounting)


def ids(choice: Choice) -> list[int]:
    return unpack_ids(choice.token_ids)


def message(choice: Choice) -> dict:
    return json.loads(bytes(choice.message))
