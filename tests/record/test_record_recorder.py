import asyncio
import time

import msgspec
import pytest
from journal_kit import EDIT, END, begin, begin_frame, frames_of, rollout_frame

from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import end_of_journal
from orchard_proxy.record.recorder import Recorder, new_call_id
from orchard_proxy.record.segments import CONTROL_ID
from orchard_proxy.schema.enums import RolloutStatus
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

PAYLOADS = {
    FrameType.ROLLOUT: RolloutFrame,
    FrameType.BEGIN: BeginFrame,
    FrameType.EDIT: EditFrame,
    FrameType.HEAD: HeadFrame,
    FrameType.EVIDENCE: EvidenceFrame,
    FrameType.END: EndFrame,
    FrameType.DELIVERED: DeliveredFrame,
    FrameType.FINISH: FinishFrame,
}


def _decoded(data_dir):
    return [
        (read.kind, read.payload if read.kind is FrameType.CHUNK else msgspec.msgpack.decode(read.payload, type=kind))
        for read in frames_of(data_dir)
        for kind in [PAYLOADS.get(read.kind)]
    ]


async def test_a_call_from_begin_to_delivered(tmp_path):
    before_us = time.time_ns() // 1000
    evidence = EvidenceFrame(path="/tokenize", request=b"{}", status=200, answer=b'{"tokens":[1]}')
    async with Journal.open(tmp_path) as journal:
        call = begin(Recorder(journal), seq=3, body=b"\xff\x00 not json")
        call.head(200, {"content-type": "text/event-stream"})
        call.chunk(b"data: 1\n\n")
        call.evidence(evidence)
        call.chunk(b"")
        await call.end(END)
        call.delivered()
    after_us = time.time_ns() // 1000
    frames = _decoded(tmp_path)
    assert [kind.name for kind, _ in frames] == [
        "BEGIN",
        "EDIT",
        "HEAD",
        "CHUNK",
        "EVIDENCE",
        "CHUNK",
        "END",
        "DELIVERED",
    ]
    assert frames[0][1] == begin_frame(seq=3, body=b"\xff\x00 not json")
    assert (frames[1][1], frames[4][1], frames[6][1]) == (EDIT, evidence, END)
    assert frames[2][1].headers == {"content-type": "text/event-stream"}
    assert (frames[3][1][8:], frames[5][1][8:]) == (b"data: 1\n\n", b"")
    stamps = [
        frames[2][1].received_us,
        *(int.from_bytes(frames[number][1][:8], "little") for number in (3, 5)),
        frames[7][1].delivered_us,
    ]
    assert [before_us, *stamps, after_us] == sorted([before_us, *stamps, after_us])
    assert {read.call_id.hex() for read in frames_of(tmp_path)} == {call.call_id}


async def test_interleaved_calls_keep_their_own_order(tmp_path):
    async def one(recorder, number):
        call = begin(recorder, seq=number)
        for step in range(20):
            call.chunk(b"%d" % step)
            await asyncio.sleep(0)
        await call.end(END)
        return call.call_id

    async with Journal.open(tmp_path) as journal:
        recorder = Recorder(journal)
        call_ids = await asyncio.gather(*(one(recorder, number) for number in range(30)))
    reads = frames_of(tmp_path)
    for call_id in call_ids:
        own = [read for read in reads if read.call_id.hex() == call_id]
        assert [read.payload[8:] for read in own if read.kind is FrameType.CHUNK] == [b"%d" % n for n in range(20)]
        assert (own[0].kind, own[-1].kind) == (FrameType.BEGIN, FrameType.END)


async def test_control_frames_are_committed_and_give_their_position(tmp_path):
    finish = FinishFrame(rollout_id="r", finished_us=5, status=RolloutStatus.COMPLETED, reward=1.0, rewards={"a": 0.5})
    async with Journal.open(tmp_path) as journal:
        recorder = Recorder(journal)
        assert await recorder.rollout(rollout_frame(metadata=b'{"a":1}')) == end_of_journal(tmp_path)["w0"]
        assert await recorder.finish(finish) == end_of_journal(tmp_path)["w0"]
    frames = _decoded(tmp_path)
    assert frames == [(FrameType.ROLLOUT, rollout_frame(metadata=b'{"a":1}')), (FrameType.FINISH, finish)]
    assert {read.call_id for read in frames_of(tmp_path)} == {CONTROL_ID}


async def test_metadata_given_as_raw_json_is_stored_as_text(tmp_path):
    async with Journal.open(tmp_path) as journal:
        await Recorder(journal).rollout(rollout_frame(metadata=msgspec.Raw(b'{"deep":[1.0]}')))
    ((_, frame),) = _decoded(tmp_path)
    assert frame.metadata == b'{"deep":[1.0]}'


async def test_only_end_raises_when_the_journal_is_closed(tmp_path):
    journal = Journal.open(tmp_path)
    call = begin(Recorder(journal))
    await journal.aclose()
    call.chunk(b"late")
    call.delivered()
    with pytest.raises(Exception, match="closed"):
        await call.end(END)


def test_call_ids_are_unique_and_sort_by_time():
    first = new_call_id()
    time.sleep(0.002)
    later = [new_call_id() for _ in range(10_000)]
    assert len(set(later)) == 10_000
    assert all(len(call_id) == 16 and call_id > first for call_id in later)
