"""System V shared memory, semaphores and message queues: they belong to no process and outlive them all."""

import contextlib
import ctypes

_IPC_RMID = 0
_libc = ctypes.CDLL(None, use_errno=True)


def _ids(kind: str) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}", "rb") as file:
        return [int(line.split()[1]) for line in file.read().splitlines()[1:]]
    return []


def remove_all() -> None:
    """Remove every object of this IPC namespace; all are of our uid. For process 1 of a sandbox only."""
    for number in _ids("shm"):
        _libc.shmctl(number, _IPC_RMID, None)
    for number in _ids("sem"):
        _libc.semctl(number, 0, _IPC_RMID)
    for number in _ids("msg"):
        _libc.msgctl(number, _IPC_RMID, None)
