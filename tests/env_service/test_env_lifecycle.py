"""Sandboxes come and go: nothing stays behind, whoever dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from env_kit import needs_root

from env_service.backends import host, slots
from env_service.backends.local import LocalBackend
from orchard_proxy.schema.enums import Phase
from orchard_proxy.schema.sandbox import SandboxError, SandboxSpec


def processes_of(uids: set[int]) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and path.stat().st_uid in uids:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def uid_of(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))
    return int(line.split()[1])


def leftovers(backend: LocalBackend, uids: set[int]) -> list[str]:
    names = [str(uid - slots.UID_BASE) for uid in uids]
    paths = [path for name in names for path in (*backend.cgroups.folders(name), host.SLOTS / name)]
    mounts = Path("/proc/self/mounts").read_text()
    found = [str(path) for path in paths if path.exists()]
    return found + [f"process {pid}" for pid in processes_of(uids)] + (["mount"] if "orchard" in mounts else [])


@needs_root
async def test_thirty_come_and_go_without_a_trace(backend):
    uids, files_before = set(), open_files()
    for number in range(30):
        sb = await backend.create(SandboxSpec(sandbox_id=str(number)))
        uids.add(uid_of(sb.pid))
        await sb.exec("echo x > f; (setsid sleep 61.5 &)")
        assert leftovers(backend, uids) != []  # the control: they are there while it lives
        await sb.close()
    assert len(uids) == 30
    assert leftovers(backend, uids) == []
    assert open_files() <= files_before + 1


async def test_fifty_live_at_once(backend):
    start = time.monotonic()
    specs = [SandboxSpec(sandbox_id=str(number)) for number in range(50)]
    made = await asyncio.gather(*(backend.create(spec) for spec in specs))
    results = await asyncio.gather(*(sb.exec(f"echo {sb.spec.sandbox_id} > f; cat f") for sb in made))
    assert [int(result.stdout) for result in results] == list(range(50))
    assert time.monotonic() - start < 60
    pids = [sb.pid for sb in made]
    await backend.close()
    assert not any(map(alive, pids))


async def test_close_is_safe_at_any_time(backend):
    sb = await backend.create(SandboxSpec(sandbox_id="x"))
    running = asyncio.create_task(sb.exec("sleep 61.5"))
    await asyncio.sleep(0.3)
    pid = sb.pid
    await asyncio.gather(sb.close(), sb.close())
    await sb.close()
    with pytest.raises(SandboxError):
        await running
    assert not alive(pid)
    with pytest.raises(SandboxError) as caught:
        await sb.exec("true")
    assert caught.value.failure.code == "sandbox_closed"


async def test_a_cancelled_creation_leaves_nothing(backend):
    first = slots.UID_BASE + backend._next_slot % slots.COUNT
    files_before = open_files()
    for wait_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        creating = asyncio.create_task(backend.create(SandboxSpec(sandbox_id="x")))
        await asyncio.sleep(wait_s)
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
    await backend.close()
    assert processes_of(set(range(first, first + 5))) == []
    assert open_files() <= files_before + 1


HOST = """
import asyncio, sys
from env_service.backends.local import LocalBackend
from orchard_proxy.schema.sandbox import SandboxSpec

async def main():
    backend = LocalBackend()
    for _ in range(2):
        sb = await backend.create(SandboxSpec(sandbox_id="x"))
        await sb.exec("trap '' TERM HUP; (setsid sleep 61.5 &)")
        print(sb.pid, flush=True)
    await sb.exec("sleep 61.5")

asyncio.run(main())
"""


async def test_a_killed_host_takes_its_sandboxes_along_and_the_next_start_clears_up():
    child = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pids = [int(child.stdout.readline()) for _ in range(2)]
    uids = {uid_of(pid) for pid in pids}
    await asyncio.sleep(0.2)
    assert all(map(alive, pids))
    backend = LocalBackend()
    if os.geteuid() == 0:
        assert leftovers(backend, uids) != []  # which a killed run cannot clear away itself
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    until = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < until:  # noqa: ASYNC110 - other processes, no event of ours
        await asyncio.sleep(0.02)
    assert not any(map(alive, pids))
    if os.geteuid() == 0:
        await (await backend.create(SandboxSpec(sandbox_id="x"))).close()
        assert leftovers(backend, uids) == []


FAILING = {
    "no namespaces": ("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1", "no_user_namespaces"),
    "other": ("echo 'bwrap: Unknown option --disable-userns' >&2; exit 1", "sandbox_start"),
    "silent": ("exit 3", "sandbox_start"),
}


@pytest.mark.parametrize(("script", "code"), FAILING.values(), ids=FAILING.keys())
async def test_when_bubblewrap_fails_nothing_runs(tmp_path, script, code):
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    tmp_path.chmod(0o755)
    fake.chmod(0o755)
    backend = LocalBackend(bwrap_path=str(fake))
    for attempt in (backend.check(), backend.create(SandboxSpec(sandbox_id="x"))):
        with pytest.raises(SandboxError) as caught:
            await attempt
        assert caught.value.failure.code == code
        assert caught.value.failure.phase is Phase.CREATE
    await backend.close()


async def test_without_bubblewrap_it_says_what_to_install():
    backend = LocalBackend(bwrap_path="/nowhere/bwrap")
    with pytest.raises(SandboxError, match="pip install"):
        await backend.check()
    with pytest.raises(SandboxError, match="pip install"):
        await backend.create(SandboxSpec(sandbox_id="x"))


OFF = """
import asyncio
from pathlib import Path
from env_service.backends.local import LocalBackend
from orchard_proxy.schema.sandbox import SandboxError, SandboxSpec

Path("/proc/sys/user/max_user_namespaces").write_text("0")

async def main():
    backend = LocalBackend()
    for attempt in (backend.check(), backend.create(SandboxSpec(sandbox_id="x"))):
        try:
            await attempt
        except SandboxError as error:
            print(error.failure.code, error)
    await backend.close()

asyncio.run(main())
"""


@needs_root
async def test_with_user_namespaces_off_it_names_the_setting():
    """In a user namespace of its own the real setting is turned off; the host's stays as it is."""
    before = Path("/proc/sys/user/max_user_namespaces").read_text()
    words = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-c",
        OFF,
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert Path("/proc/sys/user/max_user_namespaces").read_text() == before
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    assert all(line.startswith("no_user_namespaces") for line in lines), done
    assert "sysctl -w user.max_user_namespaces" in lines[0]


async def test_check_says_what_is_enforced(backend):
    found = await backend.check()
    assert {"uid", "namespaces", "privileges", "seccomp", "network", "memory", "processes", "disk"} <= set(found)
    if backend.host.root:
        assert found["memory"].startswith("cgroup")


@needs_root
async def test_a_closed_proxy_socket_is_refused_with_a_sentence(make, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o600)
        with pytest.raises(SandboxError, match="chmod 666"):
            await make(proxy_socket=str(tmp_path / "s"))
