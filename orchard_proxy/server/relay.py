"""THE pipeline: identify, decode, prepare, generate, commit, release.

`identify` (server.identify) has said who calls; here the other five steps are done, each a small method. No socket, no
file and no engine is known here: they are behind the doors of `server.edges` and the recorder.

Invariant: what tells the client that the answer is over (the last byte, or the last choice's finish and [DONE]) is
released only after `commit`. A call whose commit failed is not delivered.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchard_proxy.engines.base import Engine, Prepared
from orchard_proxy.errors import ClientGoneError, JournalError, UpstreamError
from orchard_proxy.record.recorder import CallRecorder, Recorder, now_us
from orchard_proxy.schema.enums import Blame, Outcome, Phase, UpstreamStream
from orchard_proxy.schema.frames import BeginFrame, Edit, EditFrame, EndFrame, EvidenceFrame
from orchard_proxy.schema.records import Failure
from orchard_proxy.server.edges import Answer, Reply, Upstream
from orchard_proxy.server.heartbeat import Heartbeat
from orchard_proxy.server.registry import Entry
from orchard_proxy.server.tap import StreamTap, Verdict, failed, judge_body
from orchard_proxy.upstream.health import EngineInUse
from orchard_proxy.wire import chat

ENGINE_PATH = "/v1/chat/completions"
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
JSON_HEADERS = {"Content-Type": "application/json"}
_BEHIND_DONE_S = 0.1
"""How long an engine may take to close a stream after its [DONE]; a client need not wait for more."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A call that `identify` let in."""

    entry: Entry
    path: str
    recorded_headers: Mapping[str, str]
    upstream_headers: Mapping[str, str]
    body: bytes
    begun_us: int


class Engines(Protocol):
    """Where the relay gets its engine from."""

    async def current(self) -> EngineInUse:
        """Return the probed engine, probing first where that is still to be done. Raises UpstreamError."""
        ...

    def suspect(self, reason: str) -> None:
        """Have the engine probed again before the next call."""
        ...


class Meter(Protocol):
    """Counts calls."""

    def ended(self, outcome: Outcome, engine: str, seconds: float) -> None:
        """Count one committed call."""
        ...


@dataclass(frozen=True, slots=True)
class House:
    """What all calls share."""

    recorder: Recorder
    upstream: Upstream
    engines: Engines
    meter: Meter
    mode: UpstreamStream
    keepalive_s: float
    side_timeout_s: float
    stopping: asyncio.Event


@dataclass(slots=True)
class Relay:
    """One call on its way through."""

    house: House
    incoming: Incoming
    reply: Reply
    edits: list[Edit] = field(default_factory=list)
    record: CallRecorder | None = None
    heartbeat: Heartbeat | None = None
    engine_name: str = "none"
    committed: bool = False

    async def run(self) -> None:
        """Relay the call. Exactly one END is committed, or the client is told that none could be."""
        try:
            await self._attempt(chat.decode(self.incoming.body))
        except JournalError as error:
            with contextlib.suppress(ClientGoneError):
                await self._refuse(500, "not_recorded", f"The answer could not be recorded, so it is withheld: {error}")

    async def _attempt(self, request: chat.ChatRequest) -> None:
        try:
            await self._generate(request)
        except asyncio.CancelledError:
            await self._left()
            raise
        except ClientGoneError:
            await self._left()
        except UpstreamError as error:
            await self._upstream_failed(error)

    async def _generate(self, request: chat.ChatRequest) -> None:
        try:
            in_use = await self.house.engines.current()
        except UpstreamError:
            self._begin(EditFrame(engine="none", engine_url="", edits=[], upstream_stream=False))
            raise
        prepared = in_use.engine.prepare(request, self.house.mode)
        self.engine_name = in_use.engine.name
        self._begin(
            EditFrame(
                engine=in_use.engine.name,
                engine_url=in_use.url,
                edits=prepared.edits,
                upstream_stream=prepared.stream,
                logprobs_mode=in_use.logprobs_mode,
                n_vocab=in_use.n_vocab,
            )
        )
        async with self._beside(in_use.engine, request) as side, self._kept_alive(request):
            post = self.house.upstream.post(ENGINE_PATH, prepared.body, self.incoming.upstream_headers)
            async with post as answer:
                self._recording.head(answer.status, dict(answer.headers))
                if answer.status == 200 and _is_event_stream(answer):
                    await self._stream(in_use.engine, request, prepared, answer, side)
                else:
                    await self._whole(in_use.engine, request, prepared, answer, side)

    async def _whole(
        self, engine: Engine, request: chat.ChatRequest, prepared: Prepared, answer: Answer, side: "asyncio.Task[None]"
    ) -> None:
        body = await self._read(answer)
        verdict = judge_body(answer.status, body)
        await self._side_done(side)
        answered = verdict.refuse is None and answer.status == 200
        copy = engine.strip_body(body, prepared) if answered else body
        events = self._synthesise(copy, body, request, prepared) if answered and request.stream else []
        await self._commit(verdict)
        if verdict.refuse is not None:
            await self._refuse(502, "bad_upstream_answer", verdict.refuse)
        elif events:
            await self._release(b"".join(events))
        elif self.reply.started:
            await self._refuse(answer.status, f"http_{answer.status}", copy.decode("utf-8", "replace"))
        else:
            await self.reply.whole(answer.status, answer.headers, copy)
        self._delivered()

    async def _stream(
        self, engine: Engine, request: chat.ChatRequest, prepared: Prepared, answer: Answer, side: "asyncio.Task[None]"
    ) -> None:
        tap = StreamTap(engine, prepared, request.n)
        try:
            await self._follow(tap, answer)
        except UpstreamError:
            tap.close()
            if not tap.finished:
                raise
        verdict = tap.verdict()
        await self._side_done(side)
        await self._commit(verdict)
        await self._end_stream(tap, verdict, answer)

    async def _follow(self, tap: StreamTap, answer: Answer) -> None:
        """Pass the stream on to its end; behind [DONE] only what comes at once still belongs to it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for chunk in answer.chunks():
                    self._recording.chunk(chunk)
                    if ready := tap.feed(chunk):
                        await self._write(ready, answer.headers)
                    if tap.done and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + _BEHIND_DONE_S)
        tap.close()

    async def _end_stream(self, tap: StreamTap, verdict: Verdict, answer: Answer) -> None:
        """Release the end. An answer that its engine did not end gets an error, which must be an event of its own."""
        cut = verdict.outcome is Outcome.UPSTREAM_CUT and not tap.done
        if verdict.refuse is not None and (cut or not self.reply.started):
            if self.reply.started and tap.held:
                await self._write(tap.held + b"\n\n")
            code = "upstream_cut" if verdict.outcome is Outcome.UPSTREAM_CUT else "bad_upstream_answer"
            await self._refuse(502, code, verdict.refuse)
            return
        await self._release(tap.held, answer.headers)
        self._delivered()

    async def _read(self, answer: Answer) -> bytes:
        """Read a whole body; what came is recorded also when the rest never does."""
        parts: list[bytes] = []
        try:
            async for chunk in answer.chunks():
                parts.append(chunk)  # noqa: PERF401 -- a comprehension would lose what came before a cut
        finally:
            body = b"".join(parts)
            if body:
                self._recording.chunk(body)
        return body

    def _synthesise(self, copy: bytes, body: bytes, request: chat.ChatRequest, prepared: Prepared) -> list[bytes]:
        if not prepared.synthesise:
            self.edits.append(Edit(name="synthesised_stream", detail="the engine answered whole"))
        return chat.synthesise(copy, request, source=body)

    async def _write(self, data: bytes, headers: Mapping[str, str] = SSE_HEADERS) -> None:
        if not self.reply.started:
            await self.reply.start(200, headers)
        await self.reply.write(data)

    async def _release(self, data: bytes, headers: Mapping[str, str] = SSE_HEADERS) -> None:
        await self._write(data, headers)
        await self.reply.finish()

    async def _commit(self, verdict: Verdict) -> None:
        finished_us = self.incoming.entry.finished_us
        now = now_us()
        self.committed = True
        await self._recording.end(
            EndFrame(
                outcome=verdict.outcome,
                ended_us=now,
                failure=verdict.failure,
                late=finished_us is not None,
                edits=self._late_edits(),
            )
        )
        self.house.meter.ended(verdict.outcome, self.engine_name, (now - self.incoming.begun_us) / 1e6)

    def _late_edits(self) -> list[Edit]:
        if self.heartbeat is not None and self.heartbeat.beats:
            self.edits.append(Edit(name="keep_alive", detail=str(self.heartbeat.beats)))
        return self.edits

    def _delivered(self) -> None:
        self._recording.delivered()

    async def _left(self) -> None:
        """Keep what there is: the client left, or the server is stopping."""
        if self.record is None or self.committed:
            return
        if self.house.stopping.is_set() and not self.reply.client_gone:
            outcome, code, blame = Outcome.CRASHED, "proxy_stopped", Blame.INFRA
        else:
            outcome, code, blame = Outcome.CLIENT_GONE, "client_gone", Blame.CLIENT
        failure = Failure(code=code, blame=blame, phase=Phase.RUN, retryable=True)
        with contextlib.suppress(JournalError):  # Nobody is left to tell; the recorder has logged it.
            await self._commit(Verdict(outcome, failure))

    async def _upstream_failed(self, error: UpstreamError) -> None:
        self.house.engines.suspect(str(error))
        began = self.reply.started or error.code == "engine_cut"
        outcome = Outcome.UPSTREAM_CUT if began else Outcome.ENGINE_ERROR
        if not self.committed:
            await self._commit(Verdict(outcome, failed(error.code, str(error))))
        status = 504 if error.code == "engine_silent" else 502
        with contextlib.suppress(ClientGoneError):
            await self._refuse(status, error.code, str(error))

    async def _refuse(self, status: int, code: str, message: str) -> None:
        """Tell the client in its dialect's shape; after a 200 as an event, and without an end."""
        if not self.reply.started:
            body = chat.error_body(message, type="upstream_error", code=code)
            await self.reply.whole(status, JSON_HEADERS, body)
            return
        await self.reply.write(chat.error_event(message, type="upstream_error", code=code))
        self.reply.cut()

    def _begin(self, edit: EditFrame) -> None:
        entry = self.incoming.entry
        begin = BeginFrame(
            rollout_id=entry.rollout_id,
            seq=entry.take_seq(),
            begun_us=self.incoming.begun_us,
            dialect=chat.DIALECT,
            path=self.incoming.path,
            headers=dict(self.incoming.recorded_headers),
            body=self.incoming.body,
        )
        self.record = self.house.recorder.begin(begin, edit)

    @property
    def _recording(self) -> CallRecorder:
        assert self.record is not None
        return self.record

    def _kept_alive(self, request: chat.ChatRequest) -> contextlib.AbstractAsyncContextManager[object]:
        if not request.stream:
            return contextlib.nullcontext()
        self.heartbeat = Heartbeat(self.reply, self.house.keepalive_s, SSE_HEADERS)
        return self.heartbeat

    @contextlib.asynccontextmanager
    async def _beside(self, engine: Engine, request: chat.ChatRequest) -> "AsyncIterator[asyncio.Task[None]]":
        task = asyncio.ensure_future(self._gather_side(engine, request))
        try:
            yield task
        finally:
            task.cancel()

    async def _side_done(self, side: "asyncio.Task[None]") -> None:
        if not side.done():
            await asyncio.wait({side}, timeout=self.house.side_timeout_s)

    async def _gather_side(self, engine: Engine, request: chat.ChatRequest) -> None:
        """Run the engine's evidence requests. One that fails is recorded as failed; the call is not its hostage."""
        plan = engine.side(request)
        answer: bytes | None = None
        while True:
            try:
                wanted = plan.send(answer) if answer is not None else next(plan)
            except StopIteration:
                return
            try:
                status, answer = await self.house.upstream.fetch(wanted.path, wanted.body)
            except UpstreamError as error:
                frame = EvidenceFrame(path=wanted.path, request=wanted.body, status=0, error=str(error))
                self._recording.evidence(frame)
                return
            self._recording.evidence(EvidenceFrame(path=wanted.path, request=wanted.body, status=status, answer=answer))
            if status != 200:
                return


def _is_event_stream(answer: Answer) -> bool:
    return answer.headers.get("Content-Type", "").startswith("text/event-stream")
