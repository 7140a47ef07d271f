"""What a person sees while a run runs: a bar on a terminal, else a line every ten seconds. On stderr, either way."""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from orchard_proxy.runner.plan import Job
from orchard_proxy.runner.rollout import Ended

LINE_EVERY_S = 10.0


class Board:
    """Counts, and shows the counts. A Watcher of the scheduler."""

    def __init__(self, total: int, done: int, *, stream: TextIO | None = None, every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._total = total
        self._done = done
        self._running = 0
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._problem: str | None = None
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._stack = ExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._shown())
        if self._bar is None:
            self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._say(self.line())
        self._stack.close()

    def begun(self, job: Job, rollout_id: str) -> None:  # noqa: ARG002 (the door of the scheduler)
        """Count an attempt that began."""
        self._running += 1
        self._refresh()

    def ended(self, job: Job, ended: Ended, *, final: bool) -> None:  # noqa: ARG002 (the door of the scheduler)
        """Count an attempt that ended."""
        self._running -= 1
        self._done += final
        if ended.reward is not None:
            self._rewards.append(ended.reward)
        if ended.failure is not None:
            self._failures[ended.failure.code] += 1
        self._refresh()

    def waits(self, problem: str | None) -> None:
        """Show why no rollout begins just now."""
        self._problem = problem
        self._refresh()

    def line(self) -> str:
        """Say it all in one line."""
        seconds = time.monotonic() - self._began
        return f"{self._done}/{self._total} rollouts, {self._running} running{self._extras()}, {seconds:.0f} s"

    def _extras(self) -> str:
        mean = f", mean reward {sum(self._rewards) / len(self._rewards):.3f}" if self._rewards else ""
        failed = ", ".join(f"{code} {count}" for code, count in self._failures.most_common(4))
        waits = f", waiting for the policy server: {self._problem}" if self._problem else ""
        return waits + mean + (f", failures: {failed}" if failed else "")

    def _shown(self) -> AbstractContextManager[object]:
        if not self._stream.isatty():
            return nullcontext()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=Console(file=self._stream),
            expand=True,
        )
        self._bar_task = self._bar.add_task("rollouts", total=self._total, completed=self._done, told="")
        return _with_logs_above(self._bar)

    def _refresh(self) -> None:
        if self._bar is not None and self._bar_task is not None:
            self._bar.update(self._bar_task, completed=self._done, told=f"{self._running} running{self._extras()}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._say(self.line())

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


@contextmanager
def _with_logs_above(bar: Progress) -> Iterator[None]:
    """Show the bar, and have what is logged meanwhile printed above it instead of through it."""
    ours = [handler for handler in logging.getLogger().handlers if getattr(handler, "stream", None) is sys.stderr]
    handlers = [handler for handler in ours if isinstance(handler, logging.StreamHandler)]
    before = sys.stderr
    with bar:
        for handler in handlers:
            handler.setStream(sys.stderr)  # While the bar is shown, rich's.
        try:
            yield
        finally:
            for handler in handlers:
                handler.setStream(before)
