import os
import subprocess
import sys

import pytest

from orchard_proxy.errors import JournalError
from orchard_proxy.record import lock

SESSION = bytes(range(16))


def test_second_writer_is_told_who_and_what_to_do(tmp_path):
    fd = lock.acquire(tmp_path, SESSION)
    with pytest.raises(JournalError, match=rf"in use by process {os.getpid()}.*Stop that process.*--data"):
        lock.acquire(tmp_path, SESSION)
    os.close(fd)
    os.close(lock.acquire(tmp_path, SESSION))


def test_lock_goes_with_a_killed_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from orchard_proxy.record import lock\n"
        "lock.acquire(Path(sys.argv[1]), bytes(16)); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(JournalError, match=f"process {holder.pid}"):
            lock.acquire(tmp_path, SESSION)
        assert lock.live_session(tmp_path) == bytes(16)
        holder.kill()
    assert lock.live_session(tmp_path) is None
    os.close(lock.acquire(tmp_path, SESSION))


def test_live_session(tmp_path):
    assert lock.live_session(tmp_path) is None
    fd = lock.acquire(tmp_path, SESSION)
    assert lock.live_session(tmp_path) == SESSION
    os.close(fd)
    assert lock.live_session(tmp_path) is None


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(JournalError, match=r"nowhere/lock.*--data"):
        lock.acquire(tmp_path / "nowhere", SESSION)
