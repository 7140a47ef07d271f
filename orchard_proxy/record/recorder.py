"""What the relay says about a call, as frames of the journal.

One `CallRecorder` per call. Nothing is buffered here and nothing is decided here. Invariant: a call's frames stand in
the journal in the order BEGIN, EDIT, (HEAD, CHUNK, EVIDENCE)*, END, DELIVERED; after a failed commit the call is
closed as crashed as soon as the journal takes frames again.
"""

import os
import time

import msgspec

from orchard_proxy.errors import JournalError
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.segments import CONTROL_ID, Frame, Position, encode_frame
from orchard_proxy.schema.enums import Blame, Outcome, Phase
from orchard_proxy.schema.frames import (
    BeginFrame,
    DeliveredFrame,
    EditFrame,
    EndFrame,
    EvidenceFrame,
    FinishFrame,
    FrameType,
    HeadFrame,
    RolloutFrame,
)
from orchard_proxy.schema.records import Failure


def now_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


def new_call_id() -> bytes:
    """Return 16 bytes that sort by time to the millisecond (48 bits), then at random."""
    return (time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10)


class Recorder:
    """Records calls and rollouts into one journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._owed: list[Frame] = []

    def begin(self, begin: BeginFrame, edit: EditFrame) -> "CallRecorder":
        """Record that a call came; lazy, a failure shows at `CallRecorder.end`."""
        call_id = new_call_id()
        self.journal.append(
            [encode_frame(FrameType.BEGIN, call_id, begin), encode_frame(FrameType.EDIT, call_id, edit)]
        )
        return CallRecorder(self, call_id)

    async def rollout(self, frame: RolloutFrame) -> Position:
        """Commit a new rollout; return the position behind it. Raise JournalError."""
        return await self._control(FrameType.ROLLOUT, frame)

    async def finish(self, frame: FinishFrame) -> Position:
        """Commit a finish; return the position behind it, to wait for. Raise JournalError."""
        return await self._control(FrameType.FINISH, frame)

    async def commit(self, frame: Frame) -> None:
        """Commit one frame of a call. Raise JournalError; then the call is closed as crashed later."""
        try:
            await self.journal.commit([frame])
        except JournalError as error:
            self._owed.append(_crashed(frame.call_id, str(error)))
            raise
        if self._owed:
            owed, self._owed = self._owed, []
            self.journal.append(owed)

    async def _control(self, kind: FrameType, frame: RolloutFrame | FinishFrame) -> Position:
        text = bytes(frame.metadata)  # JSON as msgspec.Raw would be written as if it were msgpack
        await self.journal.commit([encode_frame(kind, CONTROL_ID, msgspec.structs.replace(frame, metadata=text))])
        return self.journal.position()


class CallRecorder:
    """Records one call. Only `end` raises."""

    def __init__(self, recorder: Recorder, call_id: bytes) -> None:
        self._recorder = recorder
        self._journal = recorder.journal
        self._id = call_id

    @property
    def call_id(self) -> str:
        """Return the id as 32 hex digits."""
        return self._id.hex()

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Record the engine's status and headers."""
        self._append(FrameType.HEAD, HeadFrame(status=status, headers=headers, received_us=now_us()))

    def chunk(self, data: bytes) -> None:
        """Record body bytes as the engine sent them."""
        self._append(FrameType.CHUNK, now_us().to_bytes(8, "little") + data)

    def evidence(self, frame: EvidenceFrame) -> None:
        """Record a request beside the generation and its answer."""
        self._append(FrameType.EVIDENCE, frame)

    async def end(self, frame: EndFrame) -> None:
        """Commit the call. Only after this may its last bytes go to the client. Raise JournalError."""
        await self._recorder.commit(encode_frame(FrameType.END, self._id, frame))

    def delivered(self) -> None:
        """Record that the kernel took our last byte for the client."""
        self._append(FrameType.DELIVERED, DeliveredFrame(delivered_us=now_us()))

    def _append(self, kind: FrameType, payload: "bytes | HeadFrame | EvidenceFrame | DeliveredFrame") -> None:
        self._journal.append([encode_frame(kind, self._id, payload)])


def _crashed(call_id: bytes, message: str) -> Frame:
    failure = Failure(code="journal_failed", blame=Blame.INFRA, phase=Phase.RUN, retryable=True, message=message)
    return encode_frame(FrameType.END, call_id, EndFrame(outcome=Outcome.CRASHED, ended_us=now_us(), failure=failure))
