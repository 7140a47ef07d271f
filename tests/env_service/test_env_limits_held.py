"""Limits, met from inside."""

import pytest
from env_kit import needs_root

from env_service.backends.local import LocalBackend
from orchard_proxy.schema.enums import Blame
from orchard_proxy.schema.sandbox import MIB, Limits, SandboxError, SandboxSpec

EAT = ["python3", "-c", "import sys; x = b'x' * (int(sys.argv[1]) << 20); print('ate')"]


@needs_root
@pytest.mark.case("A01")
async def test_memory_of_the_whole_sandbox(make):
    sb = await make(limits=Limits(memory_bytes=128 * MIB))
    fits = await sb.exec([*EAT, "60"])
    assert (fits.stdout, fits.oom) == (b"ate\n", False)
    result = await sb.exec([*EAT, "300"])
    assert (result.signal, result.oom, result.timed_out) == (9, True, False)
    by_shell = await sb.exec(["/bin/sh", "-c", "python3 -c \"x = b'x' * (300 << 20)\"; exit $?"])
    assert (by_shell.exit_code, by_shell.oom) == (137, True)
    many = await sb.exec(
        "for i in 1 2 3 4; do python3 -c \"x = b'x' * (50 << 20); import time; time.sleep(1)\" & done; wait"
    )
    assert many.oom
    after = await sb.exec("echo alive")
    assert (after.stdout, after.oom) == (b"alive\n", False)


@needs_root
async def test_memory_that_files_take_is_bounded_and_kills_nobody(make):
    sb = await make(limits=Limits(memory_bytes=128 * MIB))
    result = await sb.exec("for d in /workspace /home/agent /tmp /dev/shm; do head -c 500M /dev/zero > $d/fill; done")
    assert result.stderr.count(b"No space left") >= 3
    assert not result.oom
    assert (await sb.exec("echo alive")).stdout == b"alive\n"


async def test_memory_of_each_process_where_there_is_no_cgroup():
    backend = LocalBackend(use_cgroups=False)
    assert (await backend.check())["memory"] == "rlimit, each process"
    sb = await backend.create(SandboxSpec(sandbox_id="x", limits=Limits(memory_bytes=128 * MIB, processes=30)))
    assert (await sb.exec([*EAT, "60"])).stdout == b"ate\n"
    assert b"MemoryError" in (await sb.exec([*EAT, "300"])).stderr
    assert b"fork" in (await sb.exec("for i in $(seq 100); do sleep 5 & done", timeout_s=10)).stderr
    await backend.close()


@pytest.mark.case("T16")
async def test_processes(make):
    sb = await make(limits=Limits(processes=64))
    few = await sb.exec("for i in $(seq 40); do sleep 1 & done; wait", timeout_s=20)
    assert few.ok
    storm = await sb.exec(
        ["/bin/bash", "-c", "for i in $(seq 2000); do sleep 50 & done; wait"], timeout_s=2, grace_s=0.5
    )
    assert b"fork: retry: Resource temporarily unavailable" in storm.stderr
    assert storm.timed_out
    held = await sb.exec("for i in $(seq 2000); do sleep 50 & done; wait", timeout_s=10)
    assert b"Cannot fork" in held.stderr
    assert held.lingering <= 64 + 8
    assert (await sb.exec("echo alive")).stdout == b"alive\n"  # the supervisor and its shims have room of their own
    assert await sb.kill_all() == held.lingering


async def test_file_size_and_core_files(make):
    sb = await make(limits=Limits(file_bytes=1 * MIB))
    result = await sb.exec("head -c 2M /dev/zero > big; stat -c %s big")
    assert int(result.stdout) == MIB
    assert (await sb.exec("ulimit -c; ulimit -Hc")).stdout == b"0\n0\n"
    assert (await sb.exec("ulimit -c unlimited")).exit_code != 0


async def test_limits_cannot_be_changed_from_inside(make):
    sb = await make(limits=Limits(file_bytes=1 * MIB))
    for how in ("ulimit -f unlimited", "prlimit --pid 1 --nproc=1:1", "prlimit --pid 1 --cpu=1:1"):
        assert (await sb.exec(how)).exit_code != 0, how


async def test_too_little_memory_is_refused(make):
    with pytest.raises(SandboxError) as caught:
        await make(limits=Limits(memory_bytes=1 * MIB))
    assert caught.value.failure.code == "memory_too_small"


@needs_root
async def test_a_sandbox_that_dies_for_want_of_memory_says_so(make):
    """Everything the supervisor can lose memory to is the agent's doing."""
    sb = await make(limits=Limits(memory_bytes=48 * MIB))
    code = "import os\nopen('/proc/self/oom_score_adj','w').write('0')\nx=[]\nwhile True: x.append(b'x'*(1<<20))"
    result = await sb.exec(["python3", "-c", code], timeout_s=30)
    assert result.oom
    assert (await sb.exec("echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ({"workdir": "/"}, "bad_path"),
        ({"workdir": "relative"}, "bad_path"),
        ({"workdir": "/a/../etc"}, "bad_path"),
        ({"home": "/usr/home"}, "bad_path"),
        ({"proxy_socket": "/nowhere"}, "no_proxy_socket"),
        ({"proxy_socket": "/etc/passwd"}, "no_proxy_socket"),
        ({"rootfs": "/nowhere"}, "no_such_rootfs"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused_before_anything_starts(make, wanted, code):
    with pytest.raises(SandboxError) as caught:
        await make(**wanted)
    assert caught.value.failure.code == code
    assert caught.value.failure.blame is Blame.INFRA
