"""Try a harness for real: install, sandbox, scripted policy, proxy, one rollout, and what was recorded of it.

Only composition, and the same as `orchard run` makes, so that what works here works there.
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from env_service.backends.local import LocalBackend
from harness_images.harness import ManifestHarness
from orchard_proxy.errors import OrchardError
from orchard_proxy.runner.control import ControlClient
from orchard_proxy.runner.plan import Job, RunPlan, Slot
from orchard_proxy.runner.proxy import ProxyChild
from orchard_proxy.runner.rollout import Attempt, Ended, House
from orchard_proxy.runner.run import wait_until_ready
from orchard_proxy.runner.tasks import CommandGrade, Task
from orchard_proxy.schema.launch import HarnessError
from orchard_proxy.schema.records import Accounting
from orchard_proxy.schema.sandbox import SandboxError

_log = logging.getLogger(__name__)

MODEL = "tiny"
DEFAULT_SCRIPT = '[[rule]]\ntext = "All is well."\n'
POLICY_START_S = 60.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    seconds: float


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a check."""

    harness: str
    version: str
    ok: bool
    steps: list[Step]
    data: str | None = None
    """Where the record of a failed check was left."""


async def check(harness: ManifestHarness, *, timeout_s: float, told: Callable[[Step], None]) -> Checked:
    """Try a harness, step by step, up to the first that fails. `told` hears of each step when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="orchard-check-"))
    trial = _Trial(harness, folder, timeout_s, told)
    ok = await trial.all_steps()
    if ok:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return Checked(
        harness=harness.name, version=harness.version, ok=ok, steps=trial.steps, data=None if ok else str(folder)
    )


class _FailedError(Exception):
    """A step failed; the message is for the user."""


class _Trial:
    def __init__(self, harness: ManifestHarness, folder: Path, timeout_s: float, told: Callable[[Step], None]) -> None:
        self.steps: list[Step] = []
        self._harness = harness
        self._folder = folder
        self._timeout_s = timeout_s
        self._told = told
        self._stack = AsyncExitStack()
        self._backend = LocalBackend()

    async def all_steps(self) -> bool:
        async with self._stack:
            self._stack.push_async_callback(self._backend.close)
            return (
                await self._step("install", self._install())
                and await self._step("sandbox", self._sandbox())
                and await self._step("proxy", self._proxy())
                and await self._step("run", self._run())
                and await self._step("record", self._record())
            )

    async def _step(self, name: str, work: Awaitable[str]) -> bool:
        began = time.monotonic()
        try:
            detail, ok = await work, True
        except (_FailedError, HarnessError, SandboxError, OrchardError, OSError) as error:
            detail, ok = str(error), False
        step = Step(name=name, ok=ok, detail=detail, seconds=round(time.monotonic() - began, 2))
        self.steps.append(step)
        self._told(step)
        return ok

    async def _install(self) -> str:
        await self._harness.install()
        return await self._harness.installed() or "nothing to install"

    async def _sandbox(self) -> str:
        facts = await self._backend.check()
        return ", ".join(f"{name}: {how}" for name, how in facts.items() if name in ("uid", "network", "memory"))

    async def _proxy(self) -> str:
        upstream = await self._stack.enter_async_context(_scripted_policy(self._script(), self._folder))
        data = self._folder / "data"
        self._child = await self._stack.enter_async_context(ProxyChild(data, ["--upstream", upstream]))
        self._control = await self._stack.enter_async_context(
            ControlClient(lambda: self._child.url, self._child.admin_key)
        )
        await wait_until_ready(self._control)
        return "orchard serve before orchard policy tiny"

    async def _run(self) -> str:
        self._attempt = Attempt(self._house(), Job(slot=Slot(task=self._task(), sample=0)))
        ended = await self._attempt.run()
        if ended.failure is not None:
            raise _FailedError(_why(ended))
        if self._harness.manifest.check.grade and not ended.reward:
            raise _FailedError(f"it ended as if done, but its work is not: {ended.metadata.get('grade')}")
        answer = ended.metadata.get("answer")
        return f"answered {answer!r}" if answer else "ended well"

    async def _record(self) -> str:
        calls = await self._control.calls(self._attempt.rollout_id)
        if not calls:
            raise _FailedError("it ended well without a single model call: its base URL does not lead to the proxy")
        made = await self._control.samples(self._attempt.rollout_id)
        branches, accounting = len(made["samples"]), msgspec.convert(made["accounting"], Accounting)
        told = f"{len(calls)} calls, {branches} {'branch' if branches == 1 else 'branches'}, {accounting.line()}"
        if branches > 1:
            told += "; it does not send its history back unchanged, so turns are separate rows"
        return told

    def _script(self) -> Path:
        name = self._harness.manifest.check.script
        if not name:
            path = self._folder / "script.toml"
            path.write_text(DEFAULT_SCRIPT)
            return path
        path = self._harness.folder / name
        if not path.is_file():
            raise _FailedError(f"[check] names {name!r}, but {path} is not a file")
        return path

    def _task(self) -> Task:
        wanted = self._harness.manifest.check
        grade = CommandGrade(command=wanted.grade, timeout_s=60) if wanted.grade else None
        return Task(task_id="check", prompt=wanted.prompt, grade=grade, timeout_s=self._timeout_s)

    def _house(self) -> House:
        plan = RunPlan(
            run_id="check", tasks="", tasks_sha256="", harness=self._harness.name, started_s=time.time(), retries=0,
            harness_at=str(self._harness.folder), harness_version=self._harness.version, model=MODEL,
            n=1, timeout_s=self._timeout_s, concurrency=1,
        )  # fmt: skip
        return House(plan=plan, control=self._control, proxy=self._child, backend=self._backend, harness=self._harness)


def _why(ended: Ended) -> str:
    assert ended.failure is not None
    lines = [f"{ended.failure.code} (blame: {ended.failure.blame}): {ended.failure.message}"]
    told = ended.metadata.get("harness_run", {})
    lines += [f"{name}: {told[name].strip()}" for name in ("stdout", "stderr") if told.get(name, "").strip()]
    return "\n".join(lines)


@asynccontextmanager
async def _scripted_policy(script: Path, folder: Path) -> AsyncIterator[str]:
    """Run `orchard policy tiny`; give its URL."""
    port_file, log_path = folder / "policy.port", folder / "policy.log"
    words = ["policy", "tiny", "--port", "0", "--port-file", str(port_file), "--script", str(script)]
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "orchard_proxy.cli.main", *words,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + POLICY_START_S
        while not port_file.exists():
            if process.returncode is not None or time.monotonic() > until:
                said = log_path.read_text(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
                advice = "; pip install 'orchard-proxy[policy]'" if "No module named" in said else ""
                raise _FailedError(f"orchard policy tiny did not start: {said.removeprefix('orchard: ')}{advice}")
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)  # it keeps nothing
        await process.wait()
