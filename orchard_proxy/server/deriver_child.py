"""Keeps the deriver running: a child process, started again when it dies, let finish when we stop.

The recording does not need it: whatever it has not derived yet is in the journal, and the next one goes on from there.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import Counter

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 10.0
_FINISH_S = 30.0


class DeriverChild:
    """The child of one server. Leave the context after the journal is closed, so that it sees the end."""

    def __init__(self, data_dir: Path, restarts: Counter) -> None:
        self._data_dir = data_dir
        self._restarts = restarts
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_FINISH_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the deriver did not finish in %g s; `orchard derive` goes on where it stopped", _FINISH_S)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int | None:
        """Process id of the deriver, while there is one."""
        return None if self._process is None else self._process.pid

    async def _keep(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            started = asyncio.get_running_loop().time()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "orchard_proxy.cli.main",
                "derive",
                "--follow",
                "--data",
                str(self._data_dir),
                "--parent-pid",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; the deriver ends after we did.
            )
            status = await self._process.wait()
            lived_s = asyncio.get_running_loop().time() - started
            wait_s = _FIRST_WAIT_S if lived_s > _LONGEST_WAIT_S else min(2 * wait_s, _LONGEST_WAIT_S)
            logger.warning("the deriver ended with status %s; starting it again in %.1f s", status, wait_s)
            self._restarts.inc()
            await asyncio.sleep(wait_s)
