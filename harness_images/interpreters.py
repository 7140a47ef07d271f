"""Find a Python that a harness runs on: the running one when it fits, else one on PATH.

Not a downloader of Pythons. What is found has been run, so a shim without a version behind it is not taken.
"""

import asyncio
import os
import shutil
import sys

import msgspec

from harness_images import python_spec
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.launch import HarnessError

PROBE = "import sys, venv; print(sys.version_info[0], sys.version_info[1], sys.base_prefix)"
PROBE_TIMEOUT_S = 20.0
NEWEST_MINOR, OLDEST_MINOR = 20, 8


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python that was seen to run."""

    executable: str
    version: tuple[int, int]
    prefix: str
    """Where its standard library is: `sys.base_prefix`."""


async def find(spec: str) -> Interpreter:
    """Return an interpreter that fits. Raises HarnessError."""
    running = Interpreter(executable=sys.executable, version=sys.version_info[:2], prefix=sys.base_prefix)
    if python_spec.satisfied(spec, running.version):
        return running
    for executable in _on_path(spec):
        found = await _probe(executable)
        if found is not None and python_spec.satisfied(spec, found.version):
            return found
    message = (
        f"It needs Python {spec}; the running one is {running.version[0]}.{running.version[1]}, and none on PATH fits. "
        "Install one and put it on PATH, or run orchard with it."
    )
    raise HarnessError("no_python", message, blame=Blame.INFRA, phase=Phase.SETUP)


def _on_path(spec: str) -> list[str]:
    minors = [minor for minor in range(NEWEST_MINOR, OLDEST_MINOR - 1, -1) if python_spec.satisfied(spec, (3, minor))]
    names = [*(f"python3.{minor}" for minor in minors), "python3", "python"]
    return [path for name in names if (path := shutil.which(name))]


async def _probe(executable: str) -> Interpreter | None:
    process = await asyncio.create_subprocess_exec(
        executable, "-I", "-c", PROBE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), PROBE_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    if process.returncode != 0:
        return None
    major, minor, prefix = os.fsdecode(out).strip().split(" ", 2)
    return Interpreter(executable=executable, version=(int(major), int(minor)), prefix=prefix)
