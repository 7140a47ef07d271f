"""Another root than the host's, and another user than root."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from env_kit import needs_root

from orchard_proxy.schema.sandbox import SandboxError

PROGRAMS = ("sh", "cat", "ls", "id", "touch", "sleep")
NOBODY_UID = 54321


@pytest.fixture(scope="module")
def rootfs() -> Iterator[Path]:
    """Make a root of a handful of programs and the libraries they need."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        for name in PROGRAMS:
            source = os.path.realpath(shutil.which(name) or "")
            said = subprocess.run(["ldd", source], capture_output=True, text=True, check=True).stdout
            (root / "bin").mkdir(exist_ok=True)
            shutil.copy(source, root / "bin" / name)
            for library in (word for word in said.split() if word.startswith("/")):
                (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, root / library[1:])
        (root / "opt").mkdir()
        (root / "opt" / "marker").write_text("another root\n")
        yield root


async def test_a_rootfs_is_the_whole_system(make, rootfs):
    sb = await make(rootfs=str(rootfs))
    assert (await sb.exec("cat /opt/marker")).stdout == b"another root\n"
    assert (await sb.exec("ls /usr/bin/env")).exit_code != 0
    assert (await sb.exec("id -u")).stdout == b"1000\n"
    assert (await sb.exec("touch /workspace/a /home/agent/b /tmp/c && ls /workspace")).stdout == b"a\n"
    assert (await sb.exec("sleep 60", timeout_s=0.5)).timed_out
    await sb.write("/workspace/x", b"1")
    assert await sb.read("/workspace/x") == b"1"


async def test_what_is_written_over_a_rootfs_stays_in_the_sandbox(make, rootfs):
    def state() -> list[tuple[str, int, int]]:
        return sorted((str(path), path.stat().st_uid, path.stat().st_mtime_ns) for path in rootfs.rglob("*"))

    before = state()
    for _ in range(2):
        sb = await make(rootfs=str(rootfs), workdir="/srv/work", home="/root", scratch=["/tests"])
        result = await sb.exec(
            "touch /new /opt/new /bin/new /tests/new new && echo more >> /opt/marker && ls && ls /opt"
        )
        assert (result.stdout, result.stderr) == (b"new\nmarker\nnew\n", b"")
        assert (await sb.exec("cat /opt/marker")).stdout == b"another root\nmore\n"
        await sb.close()
    assert state() == before


@needs_root
async def test_a_file_system_that_cannot_map_owners_is_refused(make):
    with pytest.raises(SandboxError) as caught:
        await make(rootfs="/proc")
    assert caught.value.failure.code == "rootfs_unsupported"


AS_USER = """
import asyncio, sys
from env_service.backends.local import LocalBackend
from orchard_proxy.schema.sandbox import MIB, Limits, SandboxSpec

async def main():
    backend = LocalBackend()
    found = await backend.check()
    assert found["memory"] == "rlimit, each process", found
    sb = await backend.create(SandboxSpec(sandbox_id="x", limits=Limits(processes=20, memory_bytes=256 * MIB)))
    assert (await sb.exec("id -u; echo $HOME")).stdout == b"1000\\n/home/agent\\n"
    assert (await sb.exec("cat /proc/self/status | grep -c 'CapEff:.0000000000000000'")).stdout == b"1\\n"
    assert (await sb.exec("setsid sleep 9 & sleep 9", timeout_s=0.5)).timed_out
    assert b"fork" in (await sb.exec("for i in $(seq 50); do sleep 5 & done")).stderr
    assert await sb.kill_all() > 10
    lines = open(f"/proc/{sb.pid}/status").read().splitlines()
    print(next(line for line in lines if line.startswith("Uid")).split()[1])
    rootfs = await backend.create(SandboxSpec(sandbox_id="r", rootfs=sys.argv[1]))
    print((await rootfs.exec("touch /opt/new && cat /opt/marker; ls /opt")).stdout.decode())
    await backend.close()

asyncio.run(main())
"""


def user_python() -> str | None:
    """Find an interpreter of our version that another user can run; ours may be in a closed home."""
    names = (f"/usr/bin/python3.{sys.version_info.minor}", f"/usr/local/bin/python3.{sys.version_info.minor}")
    return next((name for name in names if Path(name).exists()), None)


@needs_root
@pytest.mark.skipif(user_python() is None, reason="no Python of this version outside a closed home")
def test_it_works_without_root(rootfs, tmp_path):
    mine = Path(tempfile.mkdtemp())
    mine.chmod(0o755)
    shutil.copytree(rootfs, mine / "root", symlinks=True)
    for path in (mine, *mine.rglob("*")):
        os.chown(path, NOBODY_UID, NOBODY_UID)
    repository = Path(__file__).parents[2]
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    words = ["setpriv", "--reuid", str(NOBODY_UID), "--regid", str(NOBODY_UID), "--clear-groups", str(user_python())]
    env = {"PYTHONPATH": f"{repository}:{packages}", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = [*words, "-c", AS_USER, str(mine / "root")]
        done = subprocess.run(run, capture_output=True, text=True, env=env, cwd="/", check=False)
    finally:
        shutil.rmtree(mine)
    assert done.stdout.split() == [str(NOBODY_UID), "another", "root", "marker", "new"], done
