import asyncio
import os
import threading

import pytest
from journal_kit import call_id, chunk, end, frames_of, open_files, segments

from orchard_proxy.errors import JournalError
from orchard_proxy.record import lock
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import read_frames, read_header
from orchard_proxy.record.segments import HEADER_BYTES, Position


def _ids(data_dir):
    return [int.from_bytes(read.call_id, "big") for read in frames_of(data_dir)]


async def _until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not happen within 10 s")


class CountedDisk:
    """A door to the real disk that counts, can be held, and can fail."""

    def __init__(self):
        self.calls = 0
        self.fail = False
        self.go = threading.Event()
        self.go.set()

    def __call__(self, fd):
        self.go.wait(10)
        self.calls += 1
        if self.fail:
            raise OSError(5, "Input/output error")
        os.fdatasync(fd)


async def test_commit_is_there_for_another_reader_at_once(tmp_path):
    async with Journal.open(tmp_path) as journal:
        for number in range(5):
            await journal.commit([end(call_id(number))])
            assert _ids(tmp_path) == list(range(number + 1))


async def test_append_is_lazy_and_written_within_50_ms(tmp_path):
    async with Journal.open(tmp_path) as journal:
        journal.append([chunk(call_id(1), b"lazy")])
        assert _ids(tmp_path) == []
        await asyncio.sleep(0.06)
        assert _ids(tmp_path) == [1]


async def test_append_is_written_at_64_kib(tmp_path):
    async with Journal.open(tmp_path) as journal:
        journal.append([chunk(call_id(1), b"x" * 65_000)])
        assert _ids(tmp_path) == []
        journal.append([chunk(call_id(2), b"x" * 1000)])
        assert _ids(tmp_path) == [1, 2]


async def test_commit_writes_what_was_appended_first(tmp_path):
    async with Journal.open(tmp_path) as journal:
        journal.append([chunk(call_id(1), b""), chunk(call_id(2), b"")])
        await journal.commit([end(call_id(1))])
        assert _ids(tmp_path) == [1, 2, 1]


async def test_position_is_behind_everything_written(tmp_path):
    async with Journal.open(tmp_path) as journal:
        (path,) = segments(tmp_path)
        assert journal.position() == Position(path.name, HEADER_BYTES)
        journal.append([chunk(call_id(1), b"not written yet")])
        assert journal.position() == Position(path.name, HEADER_BYTES)
        await journal.commit([end(call_id(1))])
        assert journal.position() == Position(path.name, frames_of(tmp_path)[-1].next_offset)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 5_000_000])
async def test_payload_sizes(tmp_path, size):
    async with Journal.open(tmp_path) as journal:
        journal.append([chunk(call_id(1), b"y" * size)])
        await journal.commit([chunk(call_id(1), b"z" * size), end(call_id(1))])
    assert [len(read.payload) for read in frames_of(tmp_path)[:2]] == [size + 8] * 2


async def test_more_pieces_than_one_writev_takes(tmp_path):
    async with Journal.open(tmp_path) as journal:
        await journal.commit([chunk(call_id(n), b"p" * 50) for n in range(5000)])
    assert _ids(tmp_path) == list(range(5000))


async def test_close_writes_what_was_appended(tmp_path):
    journal = Journal.open(tmp_path)
    journal.append([chunk(call_id(7), b"last words")])
    await journal.aclose()
    await journal.aclose()
    assert _ids(tmp_path) == [7]
    assert open_files(tmp_path) == set()


async def test_closed_journal_refuses_commits_and_drops_appends(tmp_path, caplog):
    journal = Journal.open(tmp_path)
    await journal.aclose()
    journal.append([chunk(call_id(1), b"")])
    assert "closed" in caplog.text
    with pytest.raises(JournalError, match="closed"):
        await journal.commit([end(call_id(1))])
    assert _ids(tmp_path) == []


async def test_every_start_begins_a_new_segment(tmp_path):
    for number in range(3):
        async with Journal.open(tmp_path) as journal:
            await journal.commit([end(call_id(number))])
    paths = segments(tmp_path)
    assert [path.name for path in paths] == ["w0-000001.orj", "w0-000002.orj", "w0-000003.orj"]
    assert [len(list(read_frames(path))) for path in paths] == [1, 1, 1]
    assert len({read_header(path).session_id for path in paths}) == 3


async def test_second_journal_on_the_folder_is_refused(tmp_path):
    async with Journal.open(tmp_path) as journal:
        with pytest.raises(JournalError, match="in use by process"):
            Journal.open(tmp_path)
        assert lock.live_session(tmp_path) == journal.session_id
        assert len(segments(tmp_path)) == 1
    await Journal.open(tmp_path).aclose()


async def test_rotation_keeps_order_session_and_size(tmp_path):
    async with Journal.open(tmp_path, segment_bytes=2000) as journal:
        for number in range(100):
            journal.append([chunk(call_id(number), b"x" * 80)])
            await journal.commit([end(call_id(number))])
        session_id = journal.session_id
    assert _ids(tmp_path) == [number for number in range(100) for _ in range(2)]
    paths = segments(tmp_path)
    assert len(paths) > 5
    assert all(path.stat().st_size <= 2000 for path in paths)
    assert {read_header(path).session_id for path in paths} == {session_id}


async def test_a_commit_larger_than_a_segment_gets_one_of_its_own(tmp_path):
    async with Journal.open(tmp_path, segment_bytes=2000) as journal:
        for number, size in enumerate((10, 9000, 9000, 10)):
            await journal.commit([chunk(call_id(number), b"x" * size)])
    assert [len(list(read_frames(path))) for path in segments(tmp_path)] == [1, 1, 1, 1]


async def test_rotated_segments_are_synced_and_closed(tmp_path):
    disk = CountedDisk()
    async with Journal.open(tmp_path, segment_bytes=500, durability="power", fdatasync=disk) as journal:
        for number in range(20):
            await journal.commit([chunk(call_id(number), b"x" * 400)])
        paths = segments(tmp_path)
        assert disk.calls == 20 + len(paths) - 1
        assert open_files(tmp_path) == {"lock", paths[-1].name}


async def test_process_commit_does_not_wait_for_the_disk(tmp_path):
    disk = CountedDisk()
    disk.go.clear()
    async with Journal.open(tmp_path, fdatasync=disk) as journal:
        await asyncio.wait_for(journal.commit([end(call_id(1))]), 1)
        assert disk.calls == 0
        disk.go.set()
        await _until(lambda: disk.calls == 1)
        await asyncio.sleep(0.05)
        assert disk.calls == 1  # nothing new, nothing to sync


async def test_many_process_commits_share_syncs(tmp_path):
    disk = CountedDisk()
    async with Journal.open(tmp_path, fdatasync=disk) as journal:
        for number in range(200):
            await journal.commit([end(call_id(number))])
    assert disk.calls < 50


async def test_power_commit_waits_for_the_disk_and_shares_it(tmp_path):
    disk = CountedDisk()
    async with Journal.open(tmp_path, durability="power", fdatasync=disk) as journal:
        disk.go.clear()
        first = asyncio.create_task(journal.commit([end(call_id(0))]))
        await asyncio.sleep(0.02)
        others = [asyncio.create_task(journal.commit([end(call_id(n))])) for n in range(1, 100)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (first, *others))
        disk.go.set()
        await asyncio.gather(first, *others)
        assert disk.calls == 2  # the first one's, and one for all who came while it ran
    assert _ids(tmp_path) == list(range(100))


async def test_cancelled_power_commit_does_not_disturb_the_group(tmp_path):
    disk = CountedDisk()
    async with Journal.open(tmp_path, durability="power", fdatasync=disk) as journal:
        disk.go.clear()
        tasks = [asyncio.create_task(journal.commit([end(call_id(n))])) for n in range(4)]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        tasks[2].cancel()
        disk.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            type(None),
            asyncio.CancelledError,
            type(None),
        ]


async def test_power_commit_fails_when_the_disk_does_and_works_again_on_a_new_segment(tmp_path):
    disk = CountedDisk()
    async with Journal.open(tmp_path, durability="power", fdatasync=disk) as journal:
        await journal.commit([end(call_id(0))])
        journal.append([chunk(call_id(9), b"in the failing round")])
        disk.fail = True
        with pytest.raises(JournalError, match=r"w0-000001.*Input/output error"):
            await journal.commit([end(call_id(1))])
        disk.fail = False
        await journal.commit([end(call_id(2))])
        with pytest.raises(JournalError, match="an earlier part of this call was lost"):
            await journal.commit([end(call_id(9))])
        assert journal.position().segment == "w0-000002.orj"
        await journal.commit([end(call_id(9))])  # told once
    assert open_files(tmp_path) == set()


async def test_process_commits_wait_for_the_disk_after_a_failed_sync(tmp_path, caplog):
    disk = CountedDisk()
    async with Journal.open(tmp_path, fdatasync=disk) as journal:
        disk.fail = True
        await journal.commit([end(call_id(1))])
        await _until(lambda: "Input/output error" in caplog.text)
        with pytest.raises(JournalError):
            await journal.commit([end(call_id(2))])
        disk.fail = False
        await journal.commit([end(call_id(3))])
        synced = disk.calls
        await journal.commit([end(call_id(4))])
        assert disk.calls == synced  # trust is back


async def test_close_reports_a_disk_that_fails(tmp_path):
    disk = CountedDisk()
    journal = Journal.open(tmp_path, fdatasync=disk)
    await journal.commit([end(call_id(1))])
    disk.fail = True
    with pytest.raises(JournalError, match="Check that disk"):
        await journal.aclose()
    assert open_files(tmp_path) == set()
    await Journal.open(tmp_path).aclose()
