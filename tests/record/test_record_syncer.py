import asyncio
import os

import pytest

from orchard_proxy.errors import JournalError
from orchard_proxy.record.segment_file import SegmentFile
from orchard_proxy.record.syncer import Syncer, sync_folder


def _segment(folder, number):
    return SegmentFile.create(folder / f"w0-{number:06d}.orj", bytes(16), 0)


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def test_a_round_covers_the_segments_before(tmp_path):
    synced = []
    first, second, third = (_segment(tmp_path, number) for number in (1, 2, 3))
    syncer = Syncer(first, synced.append)
    syncer.switch(second)
    syncer.switch(third)
    await syncer.now()
    assert synced == [first.fd, second.fd, third.fd]
    assert [_is_open(segment.fd) for segment in (first, second, third)] == [False, False, True]
    await syncer.aclose()
    assert not _is_open(third.fd)


async def test_a_failure_is_told_once_with_the_ids_of_its_round(tmp_path):
    failing = {"on": True}
    told = []

    def disk(fd):
        if failing["on"]:
            raise OSError(28, "No space left on device")

    first = _segment(tmp_path, 1)
    syncer = Syncer(first, disk)
    syncer.on_failure = lambda call_ids, reason: told.append((set(call_ids), reason))
    syncer.note([b"a", b"b"])
    with pytest.raises(JournalError, match="Free space"):
        await syncer.now()
    assert first.broken
    failing["on"] = False
    syncer.switch(_segment(tmp_path, 2))
    syncer.note([b"c"])
    await syncer.now()
    await syncer.aclose()
    assert [call_ids for call_ids, _ in told] == [{b"a", b"b"}]


async def test_a_stopped_round_leaves_nobody_waiting(tmp_path):
    def disk(fd):
        raise RuntimeError("not a disk error")

    syncer = Syncer(_segment(tmp_path, 1), disk)
    waiting = asyncio.create_task(syncer.now())
    await asyncio.sleep(0)
    stopped = syncer._round
    with pytest.raises(JournalError, match="server stopped"):
        await waiting
    with pytest.raises(RuntimeError):
        await stopped
    with pytest.raises(JournalError, match="server stopped"):  # and the next one is not left waiting either
        await syncer.now()


def test_folder_that_is_gone(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")
