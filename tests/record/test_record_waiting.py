"""Waiting for a follower, and what happens when the catalog is taken away under everyone."""

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from derive_kit import Scribe, calls_of

from orchard_proxy.errors import OrchardError
from orchard_proxy.record import deriver, waiting
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.catalog_reader import CatalogReader
from orchard_proxy.record.reader import end_of_journal
from orchard_proxy.record.waiting import bytes_behind


def take_away(data_dir: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        (data_dir / f"catalog.db{suffix}").unlink(missing_ok=True)


@pytest.fixture
def follower(tmp_path):
    Scribe(tmp_path).call("r", [1], [2])
    command = [sys.executable, "-m", "orchard_proxy.cli.main", "derive", "--follow", "--data", str(tmp_path)]
    with subprocess.Popen([*command, "--parent-pid", str(os.getpid())]) as process:
        assert deriver.wait_for(tmp_path, end_of_journal(tmp_path).values(), 20)
        yield tmp_path
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("suffixes", [("", "-wal", "-shm"), ("",), ("-wal", "-shm")], ids=["all", "db", "log"])
def test_a_follower_begins_again_when_the_catalog_is_deleted(follower, suffixes):
    take_away(follower, *suffixes)
    Scribe(follower, 2).call("r", [1, 2, 3], [4])
    started = time.monotonic()
    deriver.derive(follower, timeout_s=20)
    assert time.monotonic() - started < 5
    assert len(calls_of(follower)) == 2


async def test_the_server_reads_the_catalog_that_is_there_now(follower):
    async with await CatalogReader.open(follower) as reader:
        assert len(await reader.calls("r")) == 1
        take_away(follower, "", "-wal", "-shm")
        scribe = Scribe(follower, 2)
        scribe.call("r", [1, 2, 3], [4])
        assert await reader.wait_for([scribe.position], 10)
        assert len(await reader.calls("r")) == 2


async def test_two_readers_at_once_find_the_new_catalog(tmp_path):
    Scribe(tmp_path).call("r", [1], [2])
    deriver.derive(tmp_path)
    async with await CatalogReader.open(tmp_path) as reader:
        take_away(tmp_path, "", "-wal", "-shm")
        await asyncio.gather(*(reader.rollouts() for _ in range(4)))
        deriver.derive(tmp_path)
        assert len(await reader.calls("r")) == 1


@pytest.fixture
def stuck(tmp_path):
    """A folder whose deriver holds the lock and does nothing."""
    Scribe(tmp_path).call("r", [1], [2])
    fd = os.open(tmp_path / "derive.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield tmp_path
    os.close(fd)


def test_waiting_is_told_and_ends(stuck, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "STILL_S", 0.5)
    size = end_of_journal(stuck)["w0"].offset
    with pytest.raises(OrchardError, match=f"did not get to the end within 1 s: it is {size} bytes behind"):
        deriver.derive(stuck)
    assert f"waiting for the deriver of {stuck}, {size} bytes behind" in caplog.text


def test_when_the_follower_is_gone_one_derives_oneself(tmp_path, monkeypatch):
    monkeypatch.setattr(deriver, "LOCK_LOOK_S", 0.1)
    Scribe(tmp_path).call("r", [1], [2])
    hold = "import fcntl, time; f = open('derive.lock', 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", hold], cwd=tmp_path, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert deriver.derive(tmp_path, timeout_s=20)
    assert len(calls_of(tmp_path)) == 1


def test_bytes_behind_counts_over_segments(tmp_path):
    first = Scribe(tmp_path)
    first.call("r", [1], [2])
    deriver.derive(tmp_path)
    with Catalog.open(tmp_path) as catalog:
        known = catalog.progress()
    assert bytes_behind(tmp_path, known, end_of_journal(tmp_path).values()) == 0
    first.call("r", [3], [4])
    more = first.position.offset - known["w0"].done.offset
    second = Scribe(tmp_path, 2)
    second.call("r", [5], [6])
    assert bytes_behind(tmp_path, known, [second.position]) == more + second.position.offset
    assert bytes_behind(tmp_path, {}, [second.position]) == first.path.stat().st_size + second.position.offset
