import asyncio
import os
import random

import pytest
from journal_kit import (
    begin_frame,
    call_id,
    chunk,
    end,
    flip,
    frames_of,
    overwrite,
    rollout_frame,
    segments,
    write_calls,
)

from orchard_proxy.errors import JournalDamagedError
from orchard_proxy.record import reader
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import end_of_journal, read_frames, read_header, read_journal
from orchard_proxy.record.segments import (
    CONTROL_ID,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    Position,
    encode_frame,
    encode_header,
    seal,
)
from orchard_proxy.schema.frames import FrameType


async def test_frames_come_back_in_order(tmp_path):
    payloads = [b"", b"a", os.urandom(3_000_000), b"z" * 70_000]
    reads = await write_calls(tmp_path, payloads)
    assert [read.payload[8:] for read in reads if read.kind is FrameType.CHUNK] == payloads
    assert [read.call_id for read in reads] == [call_id(number) for number in range(4) for _ in range(2)]
    (path,) = segments(tmp_path)
    assert reads[-1].next_offset == path.stat().st_size


async def test_reading_resumes_at_any_frame(tmp_path):
    reads = await write_calls(tmp_path, [b"a" * n for n in range(20)])
    (path,) = segments(tmp_path)
    for number, read in enumerate(reads):
        assert list(read_frames(path, read.next_offset)) == reads[number + 1 :]


async def test_incomplete_last_frame_is_read_once_it_is_whole(tmp_path):
    reads = await write_calls(tmp_path, [b"one", b"two"])
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    for size in range(reads[-2].next_offset, len(whole)):
        path.write_bytes(whole[:size])
        assert list(read_frames(path)) == reads[:-1]
    path.write_bytes(whole)
    assert list(read_frames(path, reads[-2].next_offset)) == reads[-1:]


def _start(reads, number):
    return reads[number - 1].next_offset if number else HEADER_BYTES


@pytest.mark.parametrize("number", [0, 1, 6, 8], ids=["first", "second", "middle", "last but one"])
async def test_any_flipped_byte_costs_that_frame_only(tmp_path, number):
    reads = await write_calls(tmp_path, [b"payload %d" % n for n in range(5)])
    (path,) = segments(tmp_path)
    good = path.read_bytes()
    start, stop = _start(reads, number), reads[number].next_offset
    for offset in range(start, stop):
        flip(path, offset)
        damages = []
        assert list(read_frames(path, on_damage=damages.append)) == reads[:number] + reads[number + 1 :]
        (damage,) = damages
        assert (damage.path, damage.start, damage.end) == (path, start, stop)
        whose = start + 5 <= offset < start + 21
        assert whose or damage.call_id in (reads[number].call_id, None)
        path.write_bytes(good)


@pytest.mark.parametrize("seed", range(40))
async def test_random_damage_costs_only_the_frames_it_touches(tmp_path, seed):
    rng = random.Random(seed)
    reads = await write_calls(tmp_path, [rng.randbytes(rng.choice((0, 5, 300, 90_000))) for _ in range(30)])
    (path,) = segments(tmp_path)
    starts = [HEADER_BYTES, *(read.next_offset for read in reads)]
    touched = set()
    for _ in range(rng.randrange(1, 6)):
        start = rng.randrange(HEADER_BYTES, path.stat().st_size)
        stop = min(start + rng.choice((1, 4, 50, 5000)), path.stat().st_size)
        overwrite(path, start, rng.choice((bytes, rng.randbytes))(stop - start))
        touched |= {n for n, read in enumerate(reads) if starts[n] < stop and start < read.next_offset}
    whole = [read for number, read in enumerate(reads) if number not in touched]
    found = list(read_frames(path))
    assert [read for read in found if read in whole] == whole  # a touched one may be whole too: zeros over zeros
    assert [read for read in reads if read in found] == found


async def test_a_stretch_of_garbage_over_many_frames_is_skipped(tmp_path):
    rng = random.Random(7)
    reads = await write_calls(tmp_path, [rng.randbytes(5000) for _ in range(400)])
    (path,) = segments(tmp_path)
    start, stop = reads[99].next_offset, reads[299].next_offset
    overwrite(path, start + 3, rng.randbytes(stop - start - 6))
    assert list(read_frames(path)) == reads[:100] + reads[300:]


async def test_a_hole_of_zeros_is_skipped(tmp_path):
    reads = await write_calls(tmp_path, [b"x" * 50] * 40)
    (path,) = segments(tmp_path)
    start, stop = reads[9].next_offset, reads[29].next_offset
    overwrite(path, start, bytes(stop - start))
    assert list(read_frames(path)) == reads[:10] + reads[30:]


async def test_a_zero_filled_tail_ends_the_reading(tmp_path):
    reads = await write_calls(tmp_path, [b"x"] * 3)
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(5_000_000))
    assert list(read_frames(path)) == reads


async def test_frames_forged_in_a_body_are_never_read(tmp_path):
    """A client may send bytes that look like frames: a reader that searches behind damage must not believe them."""
    forged = b"".join(seal(encode_frame(FrameType.FINISH, CONTROL_ID, b"\x80"), 0)) * 50
    reads = await write_calls(tmp_path, [forged, forged, b"last"])
    (path,) = segments(tmp_path)
    flip(path, HEADER_BYTES)  # the length of the first forged body
    assert list(read_frames(path)) == reads[1:]
    os.truncate(path, reads[1].next_offset + FRAME_HEAD_BYTES + 700)  # cut inside the second
    assert list(read_frames(path)) == reads[1:2]


async def test_wanted_kinds_only(tmp_path):
    async with Journal.open(tmp_path) as journal:
        for number in range(50):
            begin = encode_frame(FrameType.BEGIN, call_id(number), begin_frame(seq=number))
            await journal.commit([begin, *[chunk(call_id(number), b"c" * 9000)] * 30, end(call_id(number))])
        await journal.commit([encode_frame(FrameType.ROLLOUT, CONTROL_ID, rollout_frame())])
    (path,) = segments(tmp_path)
    wanted = {FrameType.BEGIN, FrameType.ROLLOUT}
    assert list(read_frames(path, kinds=wanted)) == [r for r in read_frames(path) if r.kind in wanted]
    assert list(read_frames(path, kinds={FrameType.FINISH})) == []


async def test_a_damaged_length_that_is_hopped_over_is_noticed(tmp_path):
    reads = await write_calls(tmp_path, [b"x" * 100] * 10)
    (path,) = segments(tmp_path)
    chunks = [number for number, read in enumerate(reads) if read.kind is FrameType.CHUNK]
    overwrite(path, _start(reads, chunks[4]), (77).to_bytes(4, "little"))
    damages = []
    ends = [read for read in reads if read.kind is FrameType.END]
    assert list(read_frames(path, kinds={FrameType.END}, on_damage=damages.append)) == ends
    assert len(damages) == 1


async def test_hopping_over_a_torn_tail_ends_where_reading_does(tmp_path):
    reads = await write_calls(tmp_path, [b"x" * 100] * 3)
    (path,) = segments(tmp_path)
    os.truncate(path, reads[-2].next_offset + 5)
    assert list(read_frames(path, kinds={FrameType.END})) == [r for r in reads[:-1] if r.kind is FrameType.END]


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1], ids=["empty", "one byte", "most of a header"])
def test_segment_without_a_header_has_no_frames(tmp_path, size):
    path = tmp_path / "w0-000001.orj"
    path.write_bytes(b"ORCHARDJ".ljust(HEADER_BYTES)[:size])
    assert list(read_frames(path)) == []
    assert read_header(path) is None


async def test_reading_beside_a_writer_gives_every_frame_once(tmp_path):
    seen = []

    async def follow(stop: asyncio.Event):
        (path,) = segments(tmp_path)
        offset = 0
        while True:
            last_round = stop.is_set()
            for read in read_frames(path, offset):
                seen.append(read)
                offset = read.next_offset
            if last_round:
                return
            await asyncio.sleep(0.001)

    async with Journal.open(tmp_path) as journal:
        stop = asyncio.Event()
        following = asyncio.create_task(follow(stop))
        for number in range(300):
            await journal.commit([chunk(call_id(number), b"x" * (number * 37 % 5000)), end(call_id(number))])
            if number % 5 == 0:
                await asyncio.sleep(0)
        stop.set()
        await following
    assert seen == frames_of(tmp_path)
    assert len(seen) == 600


@pytest.mark.parametrize("frames_after", [1, 3])
async def test_a_tail_that_was_cut_back_and_rewritten_is_read_afresh(tmp_path, frames_after):
    """The writer cuts a failed write off and writes another frame there: what the window holds is stale then."""
    reads = await write_calls(tmp_path, [b"first", b"second", b"third"])
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: reads[2].next_offset] + b"\x55" * 900)
    frames = read_frames(path)
    assert [next(frames) for _ in range(3)] == reads[:3]
    path.write_bytes(whole[: reads[2 + frames_after].next_offset])
    assert list(frames) == reads[3 : 3 + frames_after]


async def test_read_journal_goes_over_segments_and_workers(tmp_path):
    for worker in ("w0", "w1", "w0"):
        async with Journal.open(tmp_path, worker=worker, segment_bytes=500) as journal:
            for number in range(10):
                await journal.commit([chunk(call_id(number), b"x" * 100), end(call_id(number))])
    everything = list(read_journal(tmp_path))
    assert len(everything) == 60
    assert len(segments(tmp_path)) > 4
    assert {position.worker for _, position in everything} == {"w0", "w1"}
    for number in range(0, 60, 7):
        done = {position.worker: position for _, position in everything[:number]}
        assert list(read_journal(tmp_path, done)) == everything[number:]
    ends = end_of_journal(tmp_path)
    assert ends == {position.worker: position for _, position in everything}
    assert list(read_journal(tmp_path, ends)) == []


async def test_end_of_journal_is_a_place_that_a_reader_reaches(tmp_path):
    assert end_of_journal(tmp_path) == {}
    reads = await write_calls(tmp_path, [b"one", b"two"])
    (path,) = segments(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert end_of_journal(tmp_path) == {"w0": Position(path.name, reads[-2].next_offset)}
    (path.parent / "w0-000002.orj").touch()
    (path.parent / "w0-000003.orj").write_bytes(encode_header(bytes(16), 1))
    assert end_of_journal(tmp_path) == {"w0": Position(path.name, reads[-2].next_offset)}


async def test_a_segment_that_cannot_be_read_is_left_out(tmp_path, caplog):
    for _ in range(3):
        async with Journal.open(tmp_path) as journal:
            await journal.commit([end(call_id(1))])
    first, second, third = segments(tmp_path)
    flip(second, 3)
    assert [position.segment for _, position in read_journal(tmp_path)] == [first.name, third.name]
    flip(third, 3)
    assert end_of_journal(tmp_path)["w0"].segment == first.name
    assert str(second) in caplog.text
    with pytest.raises(JournalDamagedError, match="Restore the file"):
        list(read_frames(second))


def test_a_long_length_is_not_allocated(tmp_path):
    path = tmp_path / "w0-000001.orj"
    path.write_bytes(encode_header(bytes(16), 1) + (reader.MAX_PAYLOAD_BYTES).to_bytes(4, "little") + b"\x05" * 100)
    assert list(read_frames(path)) == []
