"""File work that the supervisor does itself, with no more rights than a command has.

What is written is the runner's, a grader's files among it, so what a command left in the way gives way (`clearing`).
"""

import errno
import os
import stat

from env_service.agent import clearing, frames
from env_service.agent.errors import FileError

_CODES = {
    errno.ENOENT: "no_such_file",
    errno.ENOTDIR: "no_such_file",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.EROFS: "read_only",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "file_too_large",
    errno.EISDIR: "is_a_directory",
    errno.ELOOP: "symlink_loop",
    errno.ENAMETOOLONG: "name_too_long",
    errno.EAGAIN: "no_resources",
    errno.ENOMEM: "no_resources",
    errno.EMFILE: "no_resources",
}


def code_of(error: OSError) -> str:
    """Name an OS error."""
    return _CODES.get(error.errno or 0, "file_error")


def answer(header: frames.Header, body: bytes) -> tuple[frames.Header, bytes]:
    """Do one request. Raises FileError, OSError, or ValueError for one that is not known."""
    path = str(header["path"])
    match header["op"]:
        case "write":
            write(path, body, _mode(header))
        case "begin":
            return {"part": begin(path)}, b""
        case "append":
            append(path, body)
        case "finish":
            finish(str(header["part"]), path, _mode(header))
        case "discard":
            os.unlink(path)
        case "mkdir":
            clearing.insist(f"{path}/.", lambda: os.makedirs(path, exist_ok=True))
        case "chmod":
            clearing.insist(f"{path}/.", lambda: _shape(path, _mode(header)))
        case "symlink":
            link(path, str(header["target"]))
        case "read":
            return {}, read(path, int(str(header["limit_bytes"])))
        case other:
            raise ValueError(f"no operation {other!r}")
    return {}, b""


def _mode(header: frames.Header) -> int:
    return int(str(header["mode"])) & 0o777


def write(path: str, data: bytes, mode: int) -> None:
    """Put the whole content in place at once: readers see the old file or the new one."""
    part = begin(path)
    try:
        append(part, data)
        finish(part, path, mode)
    except (OSError, FileError):
        os.unlink(part)
        raise


def begin(path: str) -> str:
    """Make an empty file beside `path` for its new content; give its name."""
    return clearing.insist(path, lambda: _begin(os.path.dirname(path)))


def _begin(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    # A short name of its own: the file's name may already be as long as names can be.
    part = os.path.join(folder, f".orchard-{os.urandom(8).hex()}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return part


def append(part: str, data: bytes) -> None:
    """Add bytes to a begun file."""
    with open(part, "ab", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def finish(part: str, path: str, mode: int) -> None:
    """Put a begun file in place, and a folder that is there out of it."""
    os.chmod(part, mode)
    try:
        os.replace(part, path)
    except IsADirectoryError:
        clearing.remove(path)
        os.replace(part, path)


def read(path: str, limit_bytes: int) -> bytes:
    """Read a regular file whole. Nothing here waits: a pipe or a device is refused, not read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise FileError("is_a_directory", f"{path} is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise FileError("not_a_file", f"{path} is not a regular file")
        if found.st_size > limit_bytes:
            raise FileError("file_too_large", f"{path} has {found.st_size} bytes, more than {limit_bytes}")
        data = _up_to(file.fileno(), limit_bytes + 1)
    if len(data) > limit_bytes:  # it grew, or tells no size (/proc)
        raise FileError("file_too_large", f"{path} has more than {limit_bytes} bytes")
    return data


def _up_to(fd: int, most_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < most_bytes and (chunk := os.read(fd, min(most_bytes - len(data), 1 << 20))):
        data += chunk
    return bytes(data)


def link(path: str, target: str) -> None:
    """Make a symbolic link, in the place of what is there."""
    clearing.insist(path, lambda: _link(path, target))


def _shape(path: str, mode: int) -> None:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)


def _link(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        clearing.remove(path)
    os.symlink(target, path)
