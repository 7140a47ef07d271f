"""What one command does to those that come after it, the grader foremost."""

import os

import pytest
from env_kit import needs_root

from orchard_proxy.schema.sandbox import MIB, Limits

FILL = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for _ in range(int(sys.argv[1])):
    number = libc.shmget(0, 10 << 20, 0o1000)
    where = libc.shmat(number, None, 0)
    if number >= 0 and where not in (None, 2**64 - 1):
        ctypes.memset(where, 1, 10 << 20)
libc.semget(5, 3, 0o1600)
libc.msgget(6, 0o1600)
print(number, libc.mq_open(b"/left", 0o102, 0o600, None), ctypes.get_errno())
"""
EAT = ["python3", "-c", "x = b'x' * (80 << 20); print('ate')"]
COUNT = "cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | grep -vc key"


@needs_root
async def test_system_v_objects_are_gone_after_kill_all(make):
    sb = await make(limits=Limits(memory_bytes=128 * MIB))
    filled = await sb.exec(["python3", "-c", FILL.replace("0o1000", "0o1600"), "8"])
    assert filled.ok, filled
    assert int((await sb.exec(COUNT)).stdout) == 10
    assert (await sb.exec(EAT)).oom  # the control: what is left behind counts
    await sb.kill_all()
    assert int((await sb.exec(COUNT)).stdout) == 0
    result = await sb.exec(EAT)
    assert (result.stdout, result.oom) == (b"ate\n", False)


async def test_objects_that_nobody_may_use_are_removed_too(sb):
    made = await sb.exec(["python3", "-c", FILL, "2"])
    assert made.stdout.split()[1:] == [b"-1", b"38"]
    assert int((await sb.exec(COUNT)).stdout) == 4
    await sb.kill_all()
    assert int((await sb.exec(COUNT)).stdout) == 0


DEGRADE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(result):
    print(result, ctypes.get_errno())
param = ctypes.c_int(0)
attr = (ctypes.c_uint32 * 12)(48, 5, 0, 0, 19)
one_cpu = ctypes.c_uint64(1 << min(os.sched_getaffinity(0)))
tried(libc.syscall(203, 1, 8, ctypes.byref(one_cpu)))
tried(libc.syscall(144, 1, 5, ctypes.byref(param)))
tried(libc.syscall(142, 1, ctypes.byref(param)))
tried(libc.syscall(314, 1, attr, 0))
for kind, who in ((0, 1), (1, 1), (2, 0), (2, 1000)):
    tried(libc.setpriority(kind, who, 19))
for kind, who in ((1, 1), (2, 1), (3, 0), (3, 1000)):
    tried(libc.syscall(251, kind, who, 3 << 13))
"""
SCHEDULED = """
import ctypes, os
io = ctypes.CDLL(None).syscall(252, 1, 0)
print(os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), io)
print(os.getpriority(os.PRIO_PROCESS, 1), os.getpgid(1))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are of x86_64")
async def test_how_the_supervisor_is_scheduled_is_not_for_commands_to_say(sb):
    before = (await sb.exec(["python3", "-c", SCHEDULED])).stdout
    assert before.split()[-1] == b"1"
    tried = await sb.exec(["python3", "-c", DEGRADE])
    assert tried.stdout == b"-1 1\n" * 12, tried
    await sb.exec("renice -n 19 -p 1; renice -n 19 -g 1; renice -n 19 -u agent; chrt -i -p 0 1; taskset -p 1 1")
    await sb.kill_all()
    assert (await sb.exec(["python3", "-c", SCHEDULED])).stdout == before
    own = await sb.exec(["nice", "-n", "5", "nice"])
    assert own.stdout == b"5\n"  # its own is its own affair
    assert (await sb.exec("renice -n 7 -p $$ >/dev/null && nice")).stdout == b"7\n"
