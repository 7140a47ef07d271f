"""Bind a folder so that what root owns in it appears to be owned by another uid. A program of its own, run by root.

Usage: python idmap.py SOURCE TARGET UID OTHERS. Owners from 1 to 65535 appear from OTHERS on. On disk nothing changes:
this is an id-mapped mount (mount_setattr(2); Linux 5.12, for overlay layers 5.19, and a file system that supports it).
Exit status 1: not possible here.
"""

import ctypes
import os
import signal
import struct
import sys

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
_MOUNT_ATTR_IDMAP = 0x00100000
_CLONE_NEWUSER = 0x10000000

COMPLAINT = "id-mapped mount of"

_libc = ctypes.CDLL(None, use_errno=True)


def bind(source: str, target: str, uid: int, others: int) -> None:
    """Make the mount. Raises OSError."""
    namespace = _user_namespace(f"0 {uid} 1\n1 {others} 65535\n")
    tree = _call(_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
    _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
    _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)


def _user_namespace(id_map: str) -> int:
    """Make a user namespace with a map; only its file descriptor keeps it."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        status = _libc.unshare(_CLONE_NEWUSER)
        os.write(tell, b"y" if status == 0 else b"n")
        signal.pause()  # until it is killed
        os._exit(0)
    try:
        if os.read(ready, 1) != b"y":
            raise OSError("no user namespace")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib is slow to load
                file.write(id_map)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _call(number: int, *arguments: int | bytes) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


if __name__ == "__main__":
    try:
        bind(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    except OSError as error:
        sys.exit(f"{COMPLAINT} {sys.argv[1]}: {error}")
