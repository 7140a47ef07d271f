import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import pytest
from journal_kit import (
    END,
    begin,
    begin_frame,
    call_id,
    chunk,
    end,
    ended_calls,
    flip,
    frames_of,
    overwrite,
    rollout_frame,
    segments,
    write_calls,
)

from orchard_proxy.errors import JournalError
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.record.recovery import RolloutState, load_rollouts, repair
from orchard_proxy.record.segments import CRC, FORMAT_VERSION, HEADER, HEADER_BYTES, MAGIC, encode_frame
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.frames import FinishFrame, FrameType


def finish_frame(rollout_id="r", **fields):
    return FinishFrame(rollout_id=rollout_id, status=RolloutStatus.COMPLETED, **fields)


async def test_a_tail_torn_at_every_byte_keeps_all_earlier_frames(tmp_path, caplog):
    origin = tmp_path / "origin"
    reads = await write_calls(origin, [b"first", b"second", b"the last payload"])
    async with Journal.open(origin) as journal:  # the last frame is one with all parts: header, payload, crc
        await journal.commit([chunk(call_id(9), b"kept"), encode_frame(FrameType.BEGIN, call_id(9), begin_frame())])
    path = segments(origin)[-1]
    reads = frames_of(origin)
    whole = path.read_bytes()
    last = reads[-2].next_offset
    for size in range(last, len(whole)):
        data_dir = tmp_path / f"cut-{size}"
        shutil.copytree(origin, data_dir)
        torn = data_dir / "journal" / path.name
        os.truncate(torn, size)
        caplog.clear()
        async with Journal.open(data_dir) as journal:
            await journal.commit([end(call_id(1))])
        assert frames_of(data_dir)[:-1] == reads[:-1]
        assert torn.read_bytes() == whole[:last]
        saved = torn.with_name(torn.name + ".torn")
        if size == last:
            assert not saved.exists()
            assert caplog.text == ""
        else:
            assert saved.read_bytes() == whole[last:size]
            assert f"{size - last} bytes of an unfinished frame were cut off and saved" in caplog.text
        shutil.rmtree(data_dir)


async def test_a_segment_torn_at_every_byte_of_its_header(tmp_path):
    for size in range(HEADER_BYTES + 1):
        data_dir = tmp_path / str(size)
        await write_calls(data_dir, [b"x"])
        path = segments(data_dir)[0]
        (path.parent / "w0-000002.orj").write_bytes(path.read_bytes()[:size])
        async with Journal.open(data_dir) as journal:
            await journal.commit([end(call_id(5))])
            assert journal.position().segment == "w0-000003.orj"
        assert ended_calls(data_dir) == [call_id(0).hex(), call_id(5).hex()]


@pytest.mark.parametrize("size", [1, 4096, 3_000_000])
async def test_zeros_at_the_end_are_cut(tmp_path, size):
    """What a power cut leaves when the length of a file was on the disk and its bytes were not."""
    reads = await write_calls(tmp_path, [b"x", b"y"])
    (path,) = segments(tmp_path)
    good = path.stat().st_size
    os.truncate(path, good + size)
    (found,) = repair(tmp_path)
    assert (found.cut_bytes, found.damages) == (size, [])
    assert path.stat().st_size == good
    assert found.saved.read_bytes() == bytes(size)
    assert frames_of(tmp_path) == reads


async def test_a_segment_of_zeros_only(tmp_path):
    await write_calls(tmp_path, [b"x"])
    (tmp_path / "journal" / "w0-000002.orj").write_bytes(bytes(10_000))
    (found,) = repair(tmp_path)
    assert found.cut_bytes == 10_000
    assert repair(tmp_path) == []


async def test_payload_of_zeros_in_the_last_frame_is_cut(tmp_path):
    reads = await write_calls(tmp_path, [b"x" * 5000])
    (path,) = segments(tmp_path)
    os.truncate(path, reads[0].next_offset)
    overwrite(path, HEADER_BYTES + 1000, bytes(reads[0].next_offset - HEADER_BYTES - 1000))
    (found,) = repair(tmp_path)
    assert path.stat().st_size == HEADER_BYTES
    assert found.cut_bytes == reads[0].next_offset - HEADER_BYTES


async def test_damage_in_the_middle_is_reported_and_not_cut(tmp_path):
    reads = await write_calls(tmp_path, [b"payload %d" % n for n in range(5)])
    (path,) = segments(tmp_path)
    flip(path, reads[3].next_offset + 25)
    size = path.stat().st_size
    (found,) = repair(tmp_path)
    assert [(damage.start, damage.end) for damage in found.damages] == [(reads[3].next_offset, reads[4].next_offset)]
    assert (found.cut_bytes, path.stat().st_size) == (0, size)
    assert frames_of(tmp_path) == reads[:4] + reads[5:]


async def test_damage_in_the_middle_and_a_torn_tail(tmp_path):
    reads = await write_calls(tmp_path, [b"payload %d" % n for n in range(5)])
    (path,) = segments(tmp_path)
    flip(path, reads[3].next_offset)
    os.truncate(path, reads[-1].next_offset - 2)
    (found,) = repair(tmp_path)
    assert len(found.damages) == 1
    assert path.stat().st_size == reads[-2].next_offset
    assert frames_of(tmp_path) == reads[:4] + reads[5:-1]


async def test_a_second_torn_tail_does_not_overwrite_the_first(tmp_path):
    await write_calls(tmp_path, [b"x"])
    (path,) = segments(tmp_path)
    for tail in (b"one", b"two"):
        with path.open("ab") as file:
            file.write(tail)
        repair(tmp_path)
    assert sorted(saved.read_bytes() for saved in path.parent.glob("*.torn*")) == [b"one", b"two"]


async def test_a_damaged_header_does_not_stop_the_start(tmp_path, caplog):
    await write_calls(tmp_path, [b"x"])
    await write_calls(tmp_path, [b"y"])
    first, _ = segments(tmp_path)
    flip(first, 2)
    async with Journal.open(tmp_path):
        pass
    assert str(first) in caplog.text
    assert load_rollouts(tmp_path) == {}


async def test_a_newer_format_stops_the_start(tmp_path):
    await write_calls(tmp_path, [b"x"])
    newer = HEADER.pack(MAGIC, FORMAT_VERSION + 1, bytes(16), 1)
    path = tmp_path / "journal" / "w0-000002.orj"
    path.write_bytes(newer + CRC.pack(crc32(newer)))
    with pytest.raises(JournalError, match="Use a newer Orchard"):
        Journal.open(tmp_path)
    path.unlink()
    await Journal.open(tmp_path).aclose()


async def test_rollouts_are_loaded(tmp_path):
    async with Journal.open(tmp_path) as journal:
        recorder = Recorder(journal)
        await recorder.rollout(rollout_frame("a", key_sha256="k", body_sha256="b"))
        await recorder.rollout(rollout_frame("b", implicit=True))
        for seq in (0, 1, 2):
            call = begin(recorder, rollout_id="a", seq=seq, body=b"{" + b" " * 5000 + b"}")
            call.chunk(b"c" * 20_000)
            await call.end(END)
        begin(recorder, rollout_id="a", seq=3)  # still open when the process stops
        await recorder.finish(finish_frame("b", finished_us=7, version=1))
    async with Journal.open(tmp_path) as journal:
        await Recorder(journal).finish(finish_frame("b", finished_us=9, version=2))
        expected = {
            "a": RolloutState(rollout_id="a", key_sha256="k", body_sha256="b", created_us=1, next_seq=4),
            "b": RolloutState(rollout_id="b", implicit=True, created_us=1, finished_us=7, finish_version=2),
        }
        assert load_rollouts(tmp_path) == expected
    async with Journal.open(tmp_path):
        assert load_rollouts(tmp_path) == expected


async def test_load_rollouts_of_nothing(tmp_path):
    assert load_rollouts(tmp_path) == {}
    assert repair(tmp_path) == []


WRITER = """
import asyncio, os, random, sys
from pathlib import Path
from journal_kit import END, begin
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.recorder import Recorder

async def calls(recorder, rng):
    while True:
        call = begin(recorder)
        for _ in range(rng.randrange(5)):
            call.chunk(rng.randbytes(rng.choice((10, 300, 70_000))))
            await asyncio.sleep(0)
        call.chunk(b"last")
        await call.end(END)
        os.write(1, call.call_id.encode() + b"\\n")
        call.delivered()

async def main():
    rng = random.Random(os.getpid())
    async with Journal.open(Path(sys.argv[1]), durability=sys.argv[2], segment_bytes=1_000_000) as journal:
        recorder = Recorder(journal)
        os.write(1, b"ready\\n")
        await asyncio.gather(*(calls(recorder, rng) for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize(("durability", "kills"), [("process", 20), ("power", 5)])
def test_kill_9_loses_no_committed_call(tmp_path, durability, kills):
    rng = random.Random(11)
    told: list[str] = []
    command = [sys.executable, "-c", WRITER, str(tmp_path), durability]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.15))
            writer.kill()
            told += [line.decode() for line in writer.stdout.read().split(b"\n")[:-1]]
    repair(tmp_path)
    reads = frames_of(tmp_path)
    last_chunks = {read.call_id.hex() for read in reads if read.kind is FrameType.CHUNK and read.payload[8:] == b"last"}
    assert set(told) <= set(ended_calls(tmp_path)) <= last_chunks
    assert len(told) > kills
    assert repair(tmp_path) == []
