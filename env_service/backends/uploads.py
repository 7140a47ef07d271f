"""Files from the host into a sandbox, over its control socket."""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from env_service.agent import frames
from env_service.backends import faults
from orchard_proxy.schema.sandbox import MIB, SandboxError

_CHUNK_BYTES = 4 * MIB
_AT_ONCE = 32


class Request(Protocol):
    """A request to the supervisor."""

    async def __call__(self, header: frames.Header, body: bytes = b"") -> tuple[frames.Header, bytes]:
        """Send it, give the answer."""
        ...


async def write(request: Request, path: str, data: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    if len(data) <= _CHUNK_BYTES:
        await request({"op": "write", "path": path, "mode": mode}, data)
        return
    await _in_parts(request, path, (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)), mode)


async def _in_parts(request: Request, path: str, parts: Iterator[bytes], mode: int) -> None:
    part = (await request({"op": "begin", "path": path}))[0]["part"]
    try:
        while data := await asyncio.to_thread(next, parts, b""):
            await request({"op": "append", "path": part}, data)
        await request({"op": "finish", "path": path, "part": part, "mode": mode})
    except SandboxError:
        await request({"op": "discard", "path": part})
        raise


async def upload(request: Request, source: Path, target: str) -> None:
    """Copy a file, or a folder with all that is in it: files, folders, symbolic links. Other kinds stay behind."""
    entries = await asyncio.to_thread(_tree, source, target)
    folders = [entry for entry in entries if entry.kind == "folder"]
    for folder in folders:  # parents come first
        await request({"op": "mkdir", "path": folder.target})
    others = [entry for entry in entries if entry.kind != "folder"]
    for start in range(0, len(others), _AT_ONCE):
        await asyncio.gather(*(_send(request, entry) for entry in others[start : start + _AT_ONCE]))
    for folder in reversed(folders):  # a folder that forbids writing gets its mode last
        await request({"op": "chmod", "path": folder.target, "mode": folder.mode})


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to copy."""

    source: Path
    target: str
    kind: Literal["folder", "file", "link"]
    mode: int
    size_bytes: int


def _tree(source: Path, target: str) -> list[_Entry]:
    if not source.exists():
        raise faults.bad_spec("no_such_source", f"there is no {source} to upload")
    if not source.is_dir():
        return list(_entry(source.resolve(), target))
    found = list(_entry(source.resolve(), target))
    for here, names, files in os.walk(source):
        base = os.path.normpath(os.path.join(target, Path(here).relative_to(source)))  # noqa: PTH118 - inside
        for name in (*names, *files):
            found += _entry(Path(here) / name, f"{base}/{name}")
    return found


def _entry(source: Path, target: str) -> Iterator[_Entry]:
    found = source.lstat()
    kinds: dict[int, Literal["folder", "file", "link"]] = {
        stat.S_IFDIR: "folder",
        stat.S_IFREG: "file",
        stat.S_IFLNK: "link",
    }
    if (kind := kinds.get(stat.S_IFMT(found.st_mode))) is not None:
        mode = found.st_mode & 0o777
        yield _Entry(source=source, target=target, kind=kind, mode=mode, size_bytes=found.st_size)


async def _send(request: Request, entry: _Entry) -> None:
    if entry.kind == "link":
        goal = await asyncio.to_thread(os.readlink, entry.source)
        await request({"op": "symlink", "path": entry.target, "target": goal})
    elif entry.size_bytes <= _CHUNK_BYTES:
        data = await asyncio.to_thread(entry.source.read_bytes)
        await request({"op": "write", "path": entry.target, "mode": entry.mode}, data)
    else:
        with await asyncio.to_thread(entry.source.open, "rb") as file:
            await _in_parts(request, entry.target, iter(lambda: file.read(_CHUNK_BYTES), b""), entry.mode)
