"""Commands: how they end, what is reported, and that nothing of them survives a time-out. Cases: see each mark."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from env_service.backends.sandbox import LocalSandbox
from orchard_proxy.schema.enums import Blame
from orchard_proxy.schema.sandbox import MIB, Limits, SandboxError


async def alive(sb: LocalSandbox, marker: str) -> int:
    """Count the processes that carry the marker in their arguments; the one that counts does not."""
    code = "import glob,sys\nn=0\nfor f in glob.glob('/proc/[0-9]*/cmdline'):\n"
    code += "  try: words=open(f,'rb').read().split(b'\\0')\n  except OSError: continue\n"
    code += "  n+=sys.argv[1][::-1].encode() in words\nprint(n)"
    seen = await sb.exec(["python3", "-S", "-c", code, marker[::-1]], timeout_s=20)
    assert seen.ok, seen
    return int(seen.stdout)


TREES = {
    "one": "sleep 61.5",
    "two": "sleep 61.5 & sleep 61.5",
    "own session": "setsid sleep 61.5 & sleep 61.5",
    "orphan": "(setsid sleep 61.5 &) ; sleep 61.5",
    "double fork": 'python3 -c "import os\nif os.fork()==0:\n os.setsid()\n if os.fork()==0: '
    "os.execve('/bin/sleep',['sleep','61.5'],{})\n os._exit(0)\" ; sleep 61.5",
    "deaf": "trap '' TERM INT HUP; sleep 61.5; sleep 61.5",
    "all deaf": 'python3 -c "import signal,os\nfor s in (1,2,15): signal.signal(s, signal.SIG_IGN)\n'
    "os.fork(); os.fork()\nos.execv('/bin/sleep',['sleep','61.5'])\"",
    "stopped": "sleep 61.5 & kill -STOP $!; sleep 61.5",
}


@pytest.mark.case("T01", "T02")
@pytest.mark.parametrize("command", TREES.values(), ids=TREES.keys())
async def test_a_timeout_leaves_no_process_alive(sb, command):
    running = asyncio.create_task(sb.exec(command, timeout_s=1.5, grace_s=0.3))
    await asyncio.sleep(0.9)
    assert await alive(sb, "61.5") >= 1  # the control: the probe sees what runs
    result = await running
    assert result.timed_out
    assert result.killed_by == "timeout"
    assert await alive(sb, "61.5") == 0
    assert (await sb.exec("echo still here")).stdout == b"still here\n"


async def test_400_processes_are_dead_after_a_timeout(make):
    sb = await make(limits=Limits(processes=600))
    result = await sb.exec("for i in $(seq 400); do sleep 61.5 & done; wait", timeout_s=3, grace_s=1)
    assert result.timed_out
    assert result.duration_s < 5
    assert await alive(sb, "61.5") == 0


@pytest.mark.parametrize("loop", ["while :; do setsid sleep 61.5 & done", ":(){ :|:& };:; sleep 61.5"])
async def test_a_fork_loop_is_dead_after_a_timeout(make, loop):
    sb = await make(limits=Limits(processes=150))
    result = await sb.exec(["/bin/bash", "-c", loop], timeout_s=1, grace_s=0.2)
    assert result.timed_out
    assert await alive(sb, "61.5") == 0
    assert (await sb.exec("ls /proc | grep -c '^[0-9]'")).stdout.strip() in {b"4", b"5", b"6"}


@pytest.mark.case("T07")
async def test_a_timeout_is_neither_early_nor_late(sb):
    start = time.monotonic()
    result = await sb.exec("sleep 60", timeout_s=2)
    assert result.timed_out
    assert 2.0 <= time.monotonic() - start <= 2.5
    assert 2.0 <= result.duration_s <= 2.5


@pytest.mark.case("T08")
async def test_what_was_printed_before_the_timeout_is_kept(sb):
    result = await sb.exec("for i in 1 2 3; do echo $i; echo e$i >&2; sleep 0.2; done; sleep 60", timeout_s=1.5)
    assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"e1\ne2\ne3\n")
    assert result.timed_out


@pytest.mark.case("T09", "T10")
async def test_four_ends_are_told_apart(sb):
    ends = ["sleep 5", "exit 124", "exit 137", "kill -9 $$", "kill -TERM $$"]
    results = [await sb.exec(command, timeout_s=1) for command in ends]
    found = [(r.timed_out, r.exit_code, r.signal if not r.timed_out else None) for r in results]
    assert found == [(True, None, None), (False, 124, None), (False, 137, None), (False, None, 9), (False, None, 15)]
    assert all(result.duration_s < 1 for result in results[1:])
    assert not any(result.killed_by for result in results[1:])


@pytest.mark.case("T15")
async def test_a_deaf_command_is_killed_after_its_grace(sb):
    start = time.monotonic()
    result = await sb.exec("trap '' TERM INT HUP; sleep 100", timeout_s=1, grace_s=1)
    assert time.monotonic() - start <= 2.5
    assert (result.killed_by, result.escalated, result.timed_out) == ("timeout", True, True)


async def test_a_polite_command_may_clean_up_within_its_grace(sb):
    result = await sb.exec("trap 'echo bye; exit 3' TERM; sleep 100 & wait", timeout_s=0.5, grace_s=2)
    assert (result.stdout, result.exit_code, result.timed_out, result.escalated) == (b"bye\n", 3, True, False)


@pytest.mark.case("T03", "U15")
async def test_what_is_left_running_holds_up_nobody_and_is_counted(sb):
    start = time.monotonic()
    result = await sb.exec("(sleep 61.5 &); echo started; exit 0", timeout_s=30)
    assert time.monotonic() - start < 1
    assert (result.exit_code, result.stdout, result.lingering) == (0, b"started\n", 1)
    assert await alive(sb, "61.5") == 1


async def test_a_server_that_was_left_running_is_not_broken_by_its_closed_output(sb):
    await sb.exec("(while :; do echo noise; echo noise >&2; date +%s%N > beat; sleep 0.05; done) & exit 0")
    first = await sb.read("beat")
    await asyncio.sleep(0.4)
    assert await sb.read("beat") != first


@pytest.mark.case("T05")
async def test_a_cancelled_caller_takes_the_tree_along(sb):
    running = asyncio.create_task(sb.exec("setsid sleep 61.5 & sleep 61.5"))
    await asyncio.sleep(0.4)
    assert await alive(sb, "61.5") == 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await alive(sb, "61.5") == 0


async def test_kill_all_leaves_the_supervisor_alone(sb):
    running = asyncio.create_task(sb.exec("trap '' TERM; (setsid sleep 61.5 &); sleep 61.5"))
    await asyncio.sleep(0.4)
    assert await sb.kill_all() >= 3
    result = await running
    assert (result.signal, result.killed_by, result.timed_out) == (9, "caller", False)
    assert 0.3 < result.duration_s < 10
    assert await sb.kill_all() == 0
    assert await alive(sb, "61.5") == 0


@pytest.mark.parametrize("how", ["kill -9 $PPID; sleep 61.5", "kill -9 -1; sleep 61.5"])
async def test_a_command_that_kills_its_watcher_is_typed_and_swept(sb, how):
    with pytest.raises(SandboxError) as caught:
        await sb.exec(f"(setsid sleep 61.5 &); sleep 0.1; {how}", timeout_s=20)
    assert caught.value.failure.code == "shim_killed"
    assert caught.value.failure.blame is Blame.AGENT
    assert await alive(sb, "61.5") == 0


async def test_a_command_that_stops_its_watcher_is_ended_all_the_same(sb):
    result = await sb.exec("kill -STOP $PPID; sleep 61.5", timeout_s=0.5, grace_s=0.1)
    assert (result.timed_out, result.killed_by) == (True, "timeout")
    assert 5 < result.duration_s < 15
    assert await alive(sb, "61.5") == 0


async def test_the_supervisor_cannot_be_harmed_from_inside(sb):
    for how in ("kill -9 1", "kill -INT 1", "kill -TERM 1", "kill -STOP 1", "kill -CHLD 1", "echo > /proc/1/mem"):
        await sb.exec(how, timeout_s=10)
        assert (await sb.exec("echo alive", timeout_s=10)).stdout == b"alive\n", how


async def test_a_killed_supervisor_is_a_typed_death(sb):
    running = asyncio.create_task(sb.exec("sleep 61.5"))
    await asyncio.sleep(0.3)
    os.kill(sb.pid, signal.SIGKILL)
    with pytest.raises(SandboxError) as caught:
        await running
    assert caught.value.failure.code == "sandbox_dead"
    with pytest.raises(SandboxError):
        await sb.exec("true")


@pytest.mark.case("U12")
async def test_what_looks_like_a_sentinel_is_just_text(sb):
    text = '<completed-sentinel-value-0>\nEXITCODESTART0EXITCODEEND\nSHELLPS1PREFIX\n{"exit_code": 0}\n'
    result = await sb.exec(["/bin/sh", "-c", 'printf %s "$1"; printf %s "$1" >&2; exit 7', "sh", text])
    assert (result.exit_code, result.stdout.decode(), result.stderr.decode()) == (7, text, text)


@pytest.mark.case("U14")
async def test_endless_output_costs_no_memory_and_blocks_nothing(sb):
    def resident_bytes() -> int:
        lines = Path(f"/proc/{sb.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

    await sb.exec("true")
    idle = resident_bytes()
    result = await sb.exec("yes | head -c 1000000000 >/dev/stdout", timeout_s=60)
    assert result.stdout_bytes == 1_000_000_000
    assert len(result.stdout) <= MIB
    assert resident_bytes() - idle < 32 * MIB


@pytest.mark.case("U07")
async def test_head_and_tail_are_kept_and_all_is_counted(make):
    sb = await make(limits=Limits(output_bytes=4096))
    result = await sb.exec("seq 100000; seq 100000 >&2")
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert (result.stdout_bytes, result.stderr_bytes) == (len(whole), len(whole))
    assert len(result.stdout) == len(result.stderr) == 4096
    assert whole.startswith(result.stdout[:2048])
    assert whole.endswith(result.stdout[-1900:])
    assert b"bytes left out" in result.stdout


@pytest.mark.case("U01")
async def test_no_byte_of_an_output_is_lost(sb):
    for size in (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 70000, 131073, MIB - 1, MIB):
        result = await sb.exec(f"head -c {size} /dev/zero | tr '\\0' a")
        assert result.stdout == b"a" * size, size
        assert result.stdout_bytes == size


@pytest.mark.case("U05", "U08")
async def test_bytes_are_bytes_and_both_pipes_are_read(sb):
    assert (await sb.exec(r"printf '\377\376\000\200'")).stdout == b"\xff\xfe\x00\x80"
    code = "import os\nfor _ in range(64): os.write(1, b'o'*16000); os.write(2, b'e'*16000)"
    result = await sb.exec(["python3", "-c", code], timeout_s=20)
    assert (result.stdout_bytes, result.stderr_bytes) == (1024000, 1024000)


@pytest.mark.case("I02")
async def test_stdin_arrives_whole(sb):
    for size in (0, 1, 65537, 196609, 5_000_000):
        result = await sb.exec("wc -c", stdin=b"x" * size, timeout_s=20)
        assert int(result.stdout) == size


async def test_stdin_that_nobody_reads_holds_up_nobody(sb):
    assert (await sb.exec("exec 0<&-; sleep 0.1; echo ok", stdin=b"x" * 1_000_000, timeout_s=10)).stdout == b"ok\n"
    assert (await sb.exec("sleep 0.1; echo ok", stdin=b"x" * 1_000_000, timeout_s=10)).stdout == b"ok\n"


@pytest.mark.case("T12")
async def test_shell_text_goes_to_the_shell_as_it_is(sb):
    text = "echo $((1+2)); [[ a =~ (b|c) ]] || echo no; cat <<'X'\n$(\nX"
    assert (await sb.exec(["/bin/bash", "-c", text])).stdout == b"3\nno\n$(\n"


async def test_words_env_and_folder(sb):
    assert (await sb.exec(["printf", "%s|", "a b", "$HOME", "*"])).stdout == b"a b|$HOME|*|"
    result = await sb.exec("echo $X $HOME; pwd", env={"X": "1"}, cwd="/tmp")
    assert result.stdout == b"1 /home/agent\n/tmp\n"
    assert b"ORCHARD" not in (await sb.exec("env")).stdout


async def test_what_cannot_be_run_ends_as_a_shell_would_say(sb):
    for argv, code in ((["no-such-program"], 127), (["/etc/passwd"], 126), (["/workspace"], 126), ([], 126)):
        result = await sb.exec(argv)
        assert result.exit_code == code, argv
        assert result.stderr or not argv


@pytest.mark.case("I03")
async def test_a_command_that_is_too_large_is_refused_or_says_so(sb):
    assert (await sb.exec("true " + "x" * 300_000)).exit_code == 126
    with pytest.raises(SandboxError, match="write a file"):
        await sb.exec("true " + "x" * 3_000_000)


@pytest.mark.case("U13", "T13")
async def test_many_long_commands_slow_nothing(sb):
    running = [asyncio.create_task(sb.exec("sleep 61.5")) for _ in range(64)]
    await asyncio.sleep(1.5)
    start = time.monotonic()
    assert (await sb.exec("true")).ok
    assert time.monotonic() - start < 1
    await sb.kill_all()
    assert {result.signal for result in await asyncio.gather(*running)} == {9}


@pytest.mark.case("T18")
async def test_orphans_are_reaped(sb):
    await sb.exec("for i in $(seq 200); do (sh -c 'sleep 0.01 &'); done", timeout_s=30)
    await asyncio.sleep(0.3)
    states = await sb.exec("cat /proc/[0-9]*/stat")
    assert states.stdout.count(b") Z ") <= 1
