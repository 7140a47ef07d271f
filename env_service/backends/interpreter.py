"""Which Python runs the supervisor, and what it needs to be visible.

It is the one that runs Orchard: it is known to be new enough, and its prefix must be visible anyway, at the same path,
for virtual environments made with it. Over a foreign root it also needs the C library that it was built for: then it is
started by the host's own loader, with the host's libraries, so the root may have another C library, or none.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from env_service.backends.bwrap import HOST_ROOT
from orchard_proxy.schema.sandbox import Mount


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """How to start Python inside."""

    argv: Sequence[str]
    binds: Sequence[Mount]


def on_host_folders(path: str, prefix: str) -> Interpreter:
    """Use it among the host's own system folders."""
    return Interpreter(argv=[path], binds=_prefix(prefix))


def on_rootfs(path: str, prefix: str) -> Interpreter:
    """Use it over a foreign root."""
    libraries = _libraries()
    folders = sorted({str(library.parent) for library in libraries})
    at = {folder: f"{HOST_ROOT}/lib{number}" for number, folder in enumerate(folders)}
    loader = next(library for library in libraries if library.name.startswith("ld"))
    binds = [*(Mount(source=folder, target=place) for folder, place in at.items()), *_prefix(prefix)]
    if not _prefix(prefix):
        binds.append(Mount(source=prefix, target=HOST_ROOT + prefix))
        path = HOST_ROOT + path
    start = [f"{at[str(loader.parent)]}/{loader.name}", "--library-path", ":".join(at.values())]
    return Interpreter(argv=[*start, path], binds=binds)


def _prefix(prefix: str) -> list[Mount]:
    return [] if PurePosixPath(prefix).is_relative_to("/usr") else [Mount(source=prefix, target=prefix)]


def _libraries() -> list[PurePosixPath]:
    """Name the system's libraries that this very process runs on, its loader among them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if ".so" in line}
    return [PurePosixPath(path) for path in sorted(paths) if path.startswith(("/usr/lib", "/lib"))]
