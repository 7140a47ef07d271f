"""Files from the host into a sandbox, over its control socket."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from env_service.agent import frames
from env_service.backends import faults
from orchard_proxy.schema.sandbox import MIB

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
    while data := await asyncio.to_thread(next, parts, b""):
        await request({"op": "append", "path": part}, data)
    await request({"op": "finish", "path": path, "part": part, "mode": mode})


async def upload(request: Request, source: Path, target: str) -> None:
    """Copy a file, or a folder with all that is in it: files, folders, symbolic links."""
    if not source.exists():
        raise faults.bad_spec("no_such_source", f"there is no {source} to upload")
    if not source.is_dir():
        await _file(request, source, target)
        return
    folders, others = await asyncio.to_thread(_tree, source, target)
    for _, path in folders:  # parents come first
        await request({"op": "mkdir", "path": path})
    for start in range(0, len(others), _AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for entry, path in others[start : start + _AT_ONCE]:
                group.create_task(_entry(request, entry, path))
    for entry, path in reversed(folders):  # a folder that forbids writing gets its mode last
        await request({"op": "chmod", "path": path, "mode": entry.stat().st_mode & 0o777})


def _tree(source: Path, target: str) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    folders, others = [], []
    for here, names, files in os.walk(source):
        base = os.path.normpath(os.path.join(target, Path(here).relative_to(source)))  # noqa: PTH118 - inside
        folders.append((Path(here), base))
        links = [name for name in names if (Path(here) / name).is_symlink()]
        others += [(Path(here) / name, f"{base}/{name}") for name in (*files, *links)]
    return folders, others


async def _entry(request: Request, entry: Path, path: str) -> None:
    if entry.is_symlink():
        await request({"op": "symlink", "path": path, "target": str(entry.readlink())})
    elif entry.is_file():  # sockets, pipes and devices stay behind
        await _file(request, entry, path)


async def _file(request: Request, source: Path, target: str) -> None:
    mode = source.stat().st_mode & 0o777
    if source.stat().st_size <= _CHUNK_BYTES:
        await request({"op": "write", "path": target, "mode": mode}, await asyncio.to_thread(source.read_bytes))
        return
    with source.open("rb") as file:
        await _in_parts(request, target, iter(lambda: file.read(_CHUNK_BYTES), b""), mode)
