"""Writes that fail, for real: a limit on file sizes (EFBIG) and a small tmpfs (ENOSPC, EROFS)."""

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys

import pytest
from journal_kit import END, begin, call_id, chunk, end, ended_calls, frames_of, segments

from orchard_proxy.errors import JournalError
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import read_frames
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.record.recovery import repair
from orchard_proxy.record.segments import HEADER_BYTES
from orchard_proxy.schema.frames import FrameType

NOTHING = 10
"""A limit below a segment's header: every write fails, and so does a new segment."""


@contextlib.contextmanager
def file_size_limit(limit_bytes):
    """Let no file of this process grow above the limit. Python ignores SIGXFSZ, so writes fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a tmpfs of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder):
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _is_whole(data_dir):
    return repair(data_dir) == []


async def test_partial_write_is_cut_back(tmp_path):
    async with Journal.open(tmp_path) as journal:
        await journal.commit([end(call_id(1))])
        (path,) = segments(tmp_path)
        size = path.stat().st_size
        with file_size_limit(3000), pytest.raises(JournalError, match=r"w0-00000\d\.orj.*ulimit -f.*--data"):
            await journal.commit([chunk(call_id(2), b"x" * 10_000), end(call_id(2))])
        assert path.stat().st_size == size
        await journal.commit([chunk(call_id(3), b"x" * 10_000), end(call_id(3))])
    assert ended_calls(tmp_path) == [call_id(1).hex(), call_id(3).hex()]
    assert _is_whole(tmp_path)


async def test_a_file_at_its_limit_is_followed_by_the_next(tmp_path):
    with file_size_limit(3000):
        async with Journal.open(tmp_path) as journal:
            for number in range(50):
                await journal.commit([chunk(call_id(number), b"x" * 500), end(call_id(number))])
    assert len(ended_calls(tmp_path)) == 50
    assert len(segments(tmp_path)) > 5
    assert _is_whole(tmp_path)


async def test_large_writev_that_stops_in_the_middle(tmp_path):
    async with Journal.open(tmp_path) as journal:
        with file_size_limit(1_000_000), pytest.raises(JournalError):
            await journal.commit([chunk(call_id(1), b"x" * 9000)] * 2000)
        await journal.commit([chunk(call_id(2), b"y" * 9000)] * 2000)
    assert len(frames_of(tmp_path)) == 2000
    assert _is_whole(tmp_path)


async def test_a_failed_large_commit_keeps_the_frames_of_others(tmp_path):
    async with Journal.open(tmp_path) as journal:
        journal.append([chunk(call_id(1), b"small")])
        with file_size_limit(3000), pytest.raises(JournalError):
            await journal.commit([chunk(call_id(2), b"x" * 10_000), end(call_id(2))])
        await journal.commit([end(call_id(1))])
    assert ended_calls(tmp_path) == [call_id(1).hex()]
    assert [read.call_id for read in frames_of(tmp_path)] == [call_id(1)] * 2


async def test_a_call_that_lost_frames_fails_at_its_commit_and_others_go_on(tmp_path, caplog):
    async with Journal.open(tmp_path) as journal:
        with file_size_limit(NOTHING):
            journal.append([chunk(call_id(1), b"lost")])
            await asyncio.sleep(0.06)
        assert "ulimit -f" in caplog.text
        journal.append([chunk(call_id(1), b"the rest"), chunk(call_id(2), b"other")])
        await journal.commit([end(call_id(2))])
        with pytest.raises(JournalError, match=r"an earlier part of this call was lost.*ulimit"):
            await journal.commit([end(call_id(1))])
        assert "can be written again" in caplog.text
    assert [read.call_id for read in frames_of(tmp_path)] == [call_id(2)] * 2


async def test_a_failed_commit_fails_the_others_in_its_batch_at_theirs(tmp_path):
    async with Journal.open(tmp_path) as journal:
        with file_size_limit(NOTHING):
            journal.append([chunk(call_id(1), b"")])
            with pytest.raises(JournalError):
                await journal.commit([end(call_id(2))])
        await journal.commit([end(call_id(2))])
        with pytest.raises(JournalError, match="earlier part"):
            await journal.commit([end(call_id(1))])
    assert ended_calls(tmp_path) == [call_id(2).hex()]


async def test_recorder_closes_a_failed_call_as_crashed_once_it_can(tmp_path):
    async with Journal.open(tmp_path) as journal:
        recorder = Recorder(journal)
        half = begin(recorder, seq=0)
        await asyncio.sleep(0.06)
        with file_size_limit(NOTHING):
            half.chunk(b"lost")
            with pytest.raises(JournalError):
                await half.end(END)
        other = begin(recorder, seq=1)
        await other.end(END)
    outcomes = {read.call_id.hex(): read.payload for read in frames_of(tmp_path) if read.kind is FrameType.END}
    assert set(outcomes) == {half.call_id, other.call_id}
    assert b"journal_failed" in outcomes[half.call_id]
    assert b"crashed" in outcomes[half.call_id]


async def test_no_room_for_a_new_segment_lets_the_old_one_grow(tmp_path, caplog):
    async with Journal.open(tmp_path, segment_bytes=200) as journal:
        await journal.commit([chunk(call_id(1), b"x" * 100)])
        blocker = tmp_path / "journal" / "w0-000002.orj"
        blocker.mkdir()
        await journal.commit([chunk(call_id(2), b"x" * 100)])
        assert "w0-000002.orj" in caplog.text
        blocker.rmdir()
        await journal.commit([chunk(call_id(3), b"x" * 100)])
    assert [len(list(read_frames(path))) for path in segments(tmp_path)] == [2, 1]


async def test_aclose_says_when_the_last_frames_are_lost(tmp_path):
    journal = Journal.open(tmp_path)
    journal.append([chunk(call_id(1), b"x")])
    with file_size_limit(NOTHING), pytest.raises(JournalError, match="ulimit"):
        await journal.aclose()
    await Journal.open(tmp_path).aclose()


def test_limit_in_another_process(tmp_path):
    """The same from outside: the process survives SIGXFSZ, says what failed, and goes on."""
    code = """
import asyncio, resource, sys
from pathlib import Path
from orchard_proxy.errors import JournalError
from orchard_proxy.record.journal import Journal, encode_frame
from orchard_proxy.schema.frames import FrameType
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
async def main():
    async with Journal.open(Path(sys.argv[1])) as journal:
        for number, size in enumerate((10, 200_000, 10)):
            try:
                await journal.commit([encode_frame(FrameType.CHUNK, number.to_bytes(16, "big"), bytes(size))])
                print("ok")
            except JournalError as error:
                print(error)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    first, failed, last = done.stdout.splitlines()
    assert (first, last) == ("ok", "ok")
    assert "Raise the file size limit" in failed
    assert [read.call_id for read in frames_of(tmp_path)] == [call_id(0), call_id(2)]


async def test_full_disk_fails_calls_and_works_again_when_there_is_space(small_disk):
    async with Journal.open(small_disk) as journal:
        await journal.commit([end(call_id(1))])
        _fill(small_disk)
        for number in range(3):
            with pytest.raises(
                JournalError, match=r"w0-000001\.orj: No space left on device\. Free space on that disk"
            ):
                await journal.commit([chunk(call_id(number), b"x" * 9000), end(call_id(number))])
        (small_disk / "ballast").unlink()
        await journal.commit([chunk(call_id(9), b"x" * 9000), end(call_id(9))])
    assert ended_calls(small_disk) == [call_id(1).hex(), call_id(9).hex()]
    assert _is_whole(small_disk)


async def test_start_on_a_full_disk_says_so(small_disk):
    _fill(small_disk)
    with pytest.raises(JournalError, match=r"No space left on device.*--data"):
        Journal.open(small_disk / "data")
    (small_disk / "ballast").unlink()
    await Journal.open(small_disk / "data").aclose()


async def test_disk_that_fills_and_empties_at_random_never_lies(small_disk):
    rng = random.Random(5)
    told = {True: set(), False: set()}
    async with Journal.open(small_disk, segment_bytes=100_000) as journal:
        for number in range(300):
            if rng.random() < 0.05:
                (small_disk / "ballast").unlink(missing_ok=True)
                if rng.random() < 0.7:
                    _fill(small_disk)
            journal.append([chunk(call_id(number), rng.randbytes(rng.randrange(2000)))])
            if rng.random() < 0.1:
                await asyncio.sleep(0.05)
            try:
                await journal.commit([end(call_id(number))])
                told[True].add(call_id(number))
            except JournalError:
                told[False].add(call_id(number))
    reads = frames_of(small_disk)
    assert {read.call_id for read in reads if read.kind is FrameType.END} == told[True]
    assert {read.call_id for read in reads if read.kind is FrameType.CHUNK} >= told[True]
    assert len(told[True]) > 50
    assert len(told[False]) > 50
    assert _is_whole(small_disk)


def test_read_only_folder_says_so(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(JournalError, match=r"Read-only file system.*--data"):
        Journal.open(small_disk)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_says_so(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError, match=r"Permission denied.*--data"):
        Journal.open(tmp_path)
    tmp_path.chmod(0o700)


def test_header_size_is_known_to_the_tests():
    assert HEADER_BYTES > NOTHING
