"""The data plane alone, in this process, in front of a scripted engine: real sockets, real journal, no deriver."""

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from orchard_proxy.engines.registry import get
from orchard_proxy.errors import UpstreamError
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import read_frames
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.record.segments import list_segments
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.frames import BeginFrame, EditFrame, EndFrame, EvidenceFrame, FrameType, HeadFrame
from orchard_proxy.server.app import DataPlane, data_app
from orchard_proxy.server.intake import Intake
from orchard_proxy.server.metrics import Metrics
from orchard_proxy.server.registry import Registry
from orchard_proxy.server.relay import House
from orchard_proxy.upstream.client import HttpUpstream
from orchard_proxy.upstream.health import EngineInUse

ADMIN = "the-admin-key-of-these-tests"


class FixedEngine:
    """Stands for EngineWatch where a test says what the engine is."""

    def __init__(self, name: str, url: str, n_vocab: int | None = None) -> None:
        self.known = EngineInUse(get(name), url, "raw", n_vocab)
        self.suspected = 0
        self.absent = False

    async def current(self):
        if self.absent:
            raise UpstreamError("no engine in this test", "engine_unreachable")
        return self.known

    def suspect(self, reason):
        self.suspected += 1


@dataclass
class Recorded:
    """One call as the journal holds it."""

    begin: BeginFrame | None = None
    edit: EditFrame | None = None
    head: HeadFrame | None = None
    body: bytes = b""
    evidence: list[EvidenceFrame] = field(default_factory=list)
    end: EndFrame | None = None
    delivered: bool = False


@dataclass
class Proxy:
    url: str
    data_dir: Path
    journal: Journal
    registry: Registry
    engines: FixedEngine
    session: aiohttp.ClientSession
    upstream: HttpUpstream

    def post(self, body, key="a-label", path="/v1/chat/completions", headers=None, **kwargs):
        return self.session.post(
            self.url + path, data=body, headers={"Authorization": f"Bearer {key}", **(headers or {})}, **kwargs
        )

    async def recorded(self) -> list[Recorded]:
        """All calls in the order of their BEGIN, once lazy frames are written."""
        await asyncio.sleep(0.08)
        return read_calls(self.data_dir)

    async def ended(self, wanted: int = 1) -> list[Recorded]:
        """The calls, once `wanted` of them have ended."""
        async with asyncio.timeout(5):
            while True:
                calls = await self.recorded()
                if len([call for call in calls if call.end]) >= wanted:
                    return calls


def read_calls(data_dir: Path) -> list[Recorded]:
    calls: dict[bytes, Recorded] = defaultdict(Recorded)
    for segments in list_segments(data_dir).values():
        for path in segments:
            for frame in read_frames(path):
                if frame.kind not in (FrameType.ROLLOUT, FrameType.FINISH):
                    _apply(calls[frame.call_id], frame.kind, frame.payload)
    return list(calls.values())


def _apply(call: Recorded, kind: FrameType, payload: bytes) -> None:
    structs = {
        FrameType.BEGIN: ("begin", BeginFrame),
        FrameType.EDIT: ("edit", EditFrame),
        FrameType.HEAD: ("head", HeadFrame),
        FrameType.END: ("end", EndFrame),
    }
    if kind in structs:
        name, struct = structs[kind]
        setattr(call, name, msgspec.msgpack.decode(payload, type=struct))
    elif kind is FrameType.CHUNK:
        call.body += payload[8:]
    elif kind is FrameType.EVIDENCE:
        call.evidence.append(msgspec.msgpack.decode(payload, type=EvidenceFrame))
    elif kind is FrameType.DELIVERED:
        call.delivered = True


@asynccontextmanager
async def proxy_before(
    engine_url: str,
    data_dir: Path,
    *,
    engine: str = "vllm",
    mode: UpstreamStream = UpstreamStream.AUTO,
    keepalive_s: float = 30.0,
    open_mode: bool = True,
    max_body_bytes: int = 64 * 1024 * 1024,
    max_rollout_bytes: int = 256 * 1024 * 1024,
    stall_s: float = 60.0,
    silence_s: float = 60.0,
    side_timeout_s: float = 5.0,
    drain_s: float = 0.2,
    n_vocab: int | None = None,
):
    journal = Journal.open(data_dir)
    upstream = HttpUpstream(engine_url, key="upstream-secret", connect_s=2.0, silence_s=silence_s)
    async with journal, upstream, aiohttp.ClientSession(auto_decompress=False) as session:
        engines = FixedEngine(engine, engine_url, n_vocab)
        registry = Registry(open_mode=open_mode, admin_sha256="")
        stopping = asyncio.Event()
        metrics = Metrics()
        house = House(
            recorder=Recorder(journal),
            upstream=upstream,
            engines=engines,
            meter=metrics,
            mode=mode,
            keepalive_s=keepalive_s,
            side_timeout_s=side_timeout_s,
            stopping=stopping,
        )
        intake = Intake(body_bytes=max_body_bytes, rollout_bytes=max_rollout_bytes, stall_s=stall_s)
        app = data_app(
            DataPlane(house, registry, metrics, intake, stall_s=stall_s),
            max_body_bytes=max_body_bytes,
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield Proxy(url, data_dir, journal, registry, engines, session, upstream)
        finally:
            await session.close()
            stopping.set()
            await runner.cleanup()
