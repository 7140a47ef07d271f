"""Clear away what stands in the way of a file of the runner's: a command must not be able to keep its grader out.

With no more rights than a command has, in the sandbox's own mounts: nothing outside can be reached, by links or
otherwise. A link to a folder is followed first, as systems have such; if that does not help, it gives way too. Folders
that the system needs, and mount points, never do.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from env_service.agent.errors import FileError

_T = TypeVar("_T")
_IN_THE_WAY = frozenset(
    {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ELOOP}
)
_TOP = (
    "bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "media", "mnt", "opt", "proc", "root",
    "run", "sbin", "srv", "sys", "usr", "var",
)  # fmt: skip
_BELOW = ("usr/bin", "usr/lib", "usr/lib32", "usr/lib64", "usr/libexec", "usr/local", "usr/sbin", "usr/share")
_SYSTEM = frozenset({"/", *(f"/{name}" for name in (*_TOP, *_BELOW, "var/lib", "var/lock", "var/run"))})
_REMOVAL_S = 5.0
"""The supervisor waits nowhere long: what is left of a huge tree then stays, under a hidden name."""


def insist(path: str, act: Callable[[], _T]) -> _T:
    """Do `act`, which needs the folder of `path`; when something stands in the way, clear it and try again."""
    for replace_links in (False, True):
        try:
            return act()
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
        with contextlib.suppress(OSError):  # `act` fails again then, and says why
            _make_way(os.path.dirname(path), replace_links=replace_links)
    return act()


def _make_way(folder: str, *, replace_links: bool) -> None:
    """Make every step to `folder` a folder that we may use, as far as it exists."""
    path = "/"
    for name in folder.split("/"):
        path = os.path.join(path, name)
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) and os.path.isdir(path) and (path in _SYSTEM or not replace_links):
            path = os.path.realpath(path)
            found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(path)  # what is missing from here on is made by the caller
            return
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IMODE(found.st_mode) | stat.S_IRWXU)


def remove(path: str) -> None:
    """Remove whatever is at `path`; a folder with all that is in it."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    real = os.path.realpath(path)
    if real in _SYSTEM or any(f"{point}/".startswith(f"{real}/") for point in _mount_points()):
        raise FileError("is_a_directory", f"{path} is a folder, and one that is needed")
    aside = os.path.join(os.path.dirname(path), f".orchard-{os.urandom(8).hex()}")
    os.rename(path, aside)  # at once, however much is in it
    with contextlib.suppress(OSError):
        _remove_tree(aside)


def _mount_points() -> list[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split()[4] for line in file]
    return [os.fsdecode(field.decode("unicode_escape").encode("latin-1")) for field in fields]


def _remove_tree(path: str) -> None:
    """Remove a folder. Folders in folders are first moved to the top: no depth is too deep."""
    until = time.monotonic() + _REMOVAL_S
    os.chmod(path, stat.S_IRWXU)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while names := os.listdir(top):
            for name in names:
                if _is_folder(name, top):
                    _empty(name, top, until)
                    os.rmdir(name, dir_fd=top)
                else:
                    os.unlink(name, dir_fd=top)
                _hurry(until)
    finally:
        os.close(top)
    os.rmdir(path)


def _empty(name: str, top: int, until: float) -> None:
    """Empty a folder in `top`; folders in it become folders in `top`."""
    os.chmod(name, stat.S_IRWXU, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for below in os.listdir(folder):
            if _is_folder(below, folder):
                os.chmod(below, stat.S_IRWXU, dir_fd=folder)
                os.rename(below, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=folder)
            _hurry(until)
    finally:
        os.close(folder)


def _hurry(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
