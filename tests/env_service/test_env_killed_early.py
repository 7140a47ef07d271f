"""kill -9 of any process of a sandbox at any moment of its start: an error or a sandbox, never a wait without end."""

import asyncio
import contextlib
import os
import random
import signal

import psutil
import pytest

from env_service.backends.local import LocalBackend
from orchard_proxy.schema.sandbox import SandboxError, SandboxSpec

TRIES = 25


def kill_one_below(chance):
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        below = psutil.Process().children(recursive=True)
        ours = [process for process in below if "bwrap" in " ".join(process.cmdline())]
        if ours:
            os.kill(chance.choice(ours).pid, signal.SIGKILL)


async def life(backend, name):
    sandbox = await backend.create(SandboxSpec(sandbox_id=name))
    try:
        return (await sandbox.exec("true")).exit_code
    finally:
        await sandbox.close()


@pytest.mark.timeout(180)
async def test_it_ends_whatever_is_killed_and_when():
    chance = random.Random(1)
    backend = LocalBackend()
    ended = set()
    for number in range(TRIES):
        task = asyncio.create_task(life(backend, f"s{number}"))
        await asyncio.sleep(chance.uniform(0.0, 0.12))
        kill_one_below(chance)
        async with asyncio.timeout(20):
            try:
                ended.add(await task)
            except SandboxError as error:
                ended.add(error.failure.code)
    assert ended <= {0, "sandbox_start", "sandbox_dead", "shim_killed"}
    assert ended & {"sandbox_start", "sandbox_dead"}
    assert not backend._open
    assert await life(backend, "after") == 0
    await backend.close()
