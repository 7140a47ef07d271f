"""One rollout from its creation to its finish: create, launch, watch, grade, finish.

Invariant: a rollout that was created is finished, with a reward or with a failure that says code, blame and phase,
whatever happens in between; only the death of this process can leave one running, and `--resume` finishes that.
"""

import asyncio
import logging
from typing import Any

import msgspec

from orchard_proxy.errors import OrchardError
from orchard_proxy.runner import grading, plan, verdict
from orchard_proxy.runner.control import ControlClient
from orchard_proxy.runner.grading import Graded
from orchard_proxy.runner.plan import Job, RunPlan
from orchard_proxy.runner.proxy import Proxy
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.launch import Harness, HarnessError, HarnessResult, LaunchPlan, LaunchRequest
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult, Limits, Sandbox, SandboxBackend, SandboxError, SandboxSpec

logger = logging.getLogger(__name__)

BASE_URL = "http://127.0.0.1:8080/v1"
WORKDIR, HOME = "/workspace", "/home/agent"
_TAIL_CHARS = 2000
_ANSWER_CHARS = 20_000
_ABORT_PATIENCE_S = 5.0
_NOT_THERE = frozenset({"read_only", "not_permitted", "no_such_file"})
_HINT = "with a root folder of its own (--rootfs DIR) all of the sandbox can be written"
_ASKED_FOR = frozenset({"bad_path", "no_such_rootfs"})


class House(msgspec.Struct, frozen=True, kw_only=True):
    """What all rollouts of a run share."""

    plan: RunPlan
    control: ControlClient
    proxy: Proxy
    backend: SandboxBackend
    harness: Harness
    limits: Limits = Limits()


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    rollout_id: str
    status: RolloutStatus
    reward: float | None = None
    rewards: dict[str, float] = {}
    failure: Failure | None = None
    metadata: dict[str, Any] = {}


class Attempt:
    """One attempt at one slot."""

    def __init__(self, house: House, job: Job) -> None:
        self._house = house
        self._job = job
        self._task = job.slot.task
        self._phase = Phase.CREATE
        self._key = ""
        self.rollout_id = plan.rollout_id(house.plan.run_id, job)

    async def models(self) -> list[str]:
        """Return the models that the policy server lists. Creates the rollout, which `run` then finds."""
        created = await self._house.control.create(self.rollout_id, **self._fields())
        return await self._house.control.models(created.api_key)

    async def run(self) -> Ended:
        """Run the attempt. Raises what ends the whole run: the proxy is lost, or we are cancelled."""
        try:
            created = await self._house.control.create(self.rollout_id, **self._fields())
            self._key = created.api_key
            ended = self._without_key(await self._judged())
        except asyncio.CancelledError:
            await self._finish_quickly(self._aborted())
            raise
        try:
            await self._finish(ended)
        except asyncio.CancelledError:
            await self._finish_quickly(ended)
            raise
        return ended

    async def _finish(self, ended: Ended, *, patience_s: float | None = None) -> None:
        await self._house.control.finish(
            self.rollout_id,
            status=ended.status,
            reward=ended.reward,
            rewards=ended.rewards,
            metadata=ended.metadata,
            failure=ended.failure,
            patience_s=patience_s,
        )

    async def _finish_quickly(self, ended: Ended) -> None:
        """Finish while somebody waits for us to stop."""
        try:
            await self._finish(ended, patience_s=_ABORT_PATIENCE_S)
        except OrchardError as error:
            logger.warning("rollout %s stays open until --resume: %s", self.rollout_id, error)

    def _fields(self) -> dict[str, Any]:
        run, task = self._house.plan, self._task
        metadata = {"sample": self._job.slot.sample, "task": task.metadata}
        return {
            "group_id": plan.group_id(run.run_id, task),
            "task_id": task.task_id,
            "attempt": self._job.attempt,
            "run_id": run.run_id,
            "harness": run.harness,
            "harness_version": run.harness_version,
            "model": run.model,
            "metadata": metadata | ({"warnings": task.warnings} if task.warnings else {}),
        }

    async def _judged(self) -> Ended:
        """Do the work; what goes wrong becomes a failure of this rollout."""
        try:
            return await self._work()
        except (SandboxError, HarnessError) as error:
            return self._fallen(error.failure)
        except OrchardError:
            raise
        except Exception as error:  # A bug of ours in one rollout must not take a thousand others with it.
            logger.exception("rollout %s", self.rollout_id)
            return self._ended(self._failure("internal_error", Blame.INFRA, f"{type(error).__name__}: {error}"))

    async def _work(self) -> Ended:
        launch = self._house.harness.plan(self._request())
        sandbox = await self._created(self._spec(launch))
        try:
            self._phase = Phase.SETUP
            if failure := await self._set_up(sandbox, launch):
                return self._ended(failure)
            return await self._run(sandbox, launch)
        finally:
            await self._close(sandbox)

    async def _created(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox. What cannot be created because the task asks for it is the task's fault."""
        try:
            return await self._house.backend.create(spec)
        except SandboxError as error:
            if error.failure.code in _ASKED_FOR:
                message = self._hinted(str(error), of_path=error.failure.code == "bad_path")
                error.failure = msgspec.structs.replace(error.failure, blame=Blame.TASK, message=message)
            raise

    def _hinted(self, message: str, *, of_path: bool) -> str:
        """Say what helps where the host's system, which is read-only, has no room for what a task wants."""
        alone = self._task.rootfs is None and self._house.plan.rootfs is None
        return f"{message}; {_HINT}" if of_path and alone else message

    async def _close(self, sandbox: Sandbox) -> None:
        """Close the sandbox; that it cannot be removed changes nothing of how the rollout ended."""
        try:
            await sandbox.close()
        except SandboxError as error:
            logger.warning("rollout %s: %s", self.rollout_id, error)

    def _request(self) -> LaunchRequest:
        task = self._task
        return LaunchRequest(
            prompt=task.prompt,
            model=self._house.plan.model,
            base_url=BASE_URL,
            api_key=self._key,
            workdir=task.workdir or WORKDIR,
            home=HOME,
            timeout_s=task.timeout_s or self._house.plan.timeout_s,
        )

    def _spec(self, launch: LaunchPlan) -> SandboxSpec:
        task, limits = self._task, self._house.limits
        if task.memory_bytes is not None:
            limits = msgspec.structs.replace(limits, memory_bytes=task.memory_bytes)
        return SandboxSpec(
            sandbox_id=self.rollout_id,
            workdir=task.workdir or WORKDIR,
            home=HOME,
            scratch=task.scratch,
            env=task.env,
            mounts=launch.mounts,
            rootfs=task.rootfs or self._house.plan.rootfs,
            proxy_socket=str(self._house.proxy.socket),
            limits=limits,
        )

    async def _set_up(self, sandbox: Sandbox, launch: LaunchPlan) -> Failure | None:
        """Write what task and harness bring, run the setup command; return why that failed."""
        if failure := await self._bring(sandbox):
            return failure
        if self._task.setup is not None:
            run = await sandbox.exec(self._task.setup, timeout_s=self._task.setup_timeout_s, cwd=sandbox.spec.workdir)
            if run.timed_out:
                return self._failure("setup_timeout", Blame.TASK, f"still running after {run.duration_s:.0f} s")
            if not run.ok:
                said = self._text(run.stdout + run.stderr)[-500:]
                return self._failure("setup_failed", Blame.TASK, f"exit code {run.exit_code}: {said}")
        for file in launch.files:
            await sandbox.write(file.path, file.content.encode(), mode=file.mode)
        return None

    async def _bring(self, sandbox: Sandbox) -> Failure | None:
        """Put the task's files in place. A path that the sandbox refuses is the task's fault."""
        try:
            for upload in self._task.uploads:
                await sandbox.upload(upload.source, upload.target)
            for path, text in self._task.files.items():
                target = grading.in_workdir(sandbox, path)
                await sandbox.write(target, text.encode(), mode=grading.mode_of(text))
        except SandboxError as error:
            if error.failure.retryable:
                raise
            message = self._hinted(str(error), of_path=error.failure.code in _NOT_THERE)
            return self._failure("bad_file", Blame.TASK, message)
        return None

    async def _run(self, sandbox: Sandbox, launch: LaunchPlan) -> Ended:
        self._phase = Phase.LAUNCH
        generation = self._house.proxy.generation
        run = await self._launched(sandbox, launch)
        self._phase = Phase.RUN
        await sandbox.kill_all()  # From here on nothing of the agent is alive.
        failure: Failure | None
        if isinstance(run, Failure):
            result, failure = HarnessResult(completed=False, answer=None, detail=run.message), run
        else:
            result, failure = self._read(launch, run, await self._written(sandbox, launch))
        if failure is not None:
            failure = await self._reassigned(failure, run, generation)
        graded = Graded()
        if verdict.is_graded(failure) and self._task.grade is not None:
            self._phase = Phase.GRADE
            graded = await grading.grade(sandbox, self._task.grade, result.answer)
        self._phase = Phase.FINISH
        return Ended(
            rollout_id=self.rollout_id,
            status=verdict.status_of(failure or graded.failure),
            reward=graded.reward,
            rewards=graded.rewards,
            failure=failure or graded.failure,
            metadata=self._told(run, result, graded),
        )

    def _read(self, launch: LaunchPlan, run: ExecResult, written: bytes | None) -> tuple[HarnessResult, Failure | None]:
        """Read what the harness wrote. What nobody can read is the agent's failure, and graded like any other."""
        try:
            result = _printable(self._house.harness.result(launch, run, written))
        except HarnessError as error:
            if error.failure.blame is not Blame.AGENT:
                raise
            result = HarnessResult(completed=False, answer=None, detail=str(error))
            late = verdict.failure_of_run(run, result, launch.timeout_s) if run.timed_out else None
            return result, late or error.failure
        return result, verdict.failure_of_run(run, result, launch.timeout_s)

    async def _launched(self, sandbox: Sandbox, launch: LaunchPlan) -> ExecResult | Failure:
        """Run the harness to its end; what it did to the sandbox is its failure, and graded like any other."""
        try:
            return await sandbox.exec(
                launch.argv,
                timeout_s=launch.timeout_s,
                env=launch.env,
                cwd=sandbox.spec.workdir,
                stdin=launch.stdin.encode(),
            )
        except SandboxError as error:
            if error.failure.blame is not Blame.AGENT:
                raise
            return error.failure

    async def _written(self, sandbox: Sandbox, launch: LaunchPlan) -> bytes | None:
        if not launch.result_from.startswith("file"):
            return None
        try:
            return await sandbox.read(launch.result_path)
        except SandboxError as error:
            if error.failure.retryable:
                raise
            return None

    async def _reassigned(self, failure: Failure, run: ExecResult | Failure, generation: int) -> Failure:
        """Ask the record whether it was the agent that failed. Whether the proxy died is known after it answered."""
        calls = await self._house.control.calls(self.rollout_id)
        not_ready = await self._house.control.ready()
        return verdict.reassigned(
            failure,
            calls,
            exit_code=run.exit_code if isinstance(run, ExecResult) else None,
            proxy_restarted=self._house.proxy.generation != generation,
            not_ready=not_ready,
        )

    def _told(self, run: ExecResult | Failure, result: HarnessResult, graded: Graded) -> dict[str, Any]:
        """Return what a person needs who asks how it came to this end."""
        harness: dict[str, Any] = {"detail": result.detail}
        if isinstance(run, ExecResult):
            harness |= self._described(run, failed=not result.completed)
        answer = result.answer if result.answer is None else result.answer[:_ANSWER_CHARS]
        told: dict[str, Any] = {"answer": answer, "harness_run": harness}
        return told | ({"grade": graded.detail} if graded.detail else {})

    def _described(self, run: ExecResult, *, failed: bool) -> dict[str, Any]:
        told: dict[str, Any] = {
            "exit_code": run.exit_code,
            "signal": run.signal,
            "timed_out": run.timed_out,
            "duration_s": round(run.duration_s, 3),
            "lingering": run.lingering,
        }
        return told | ({"stdout": self._text(run.stdout), "stderr": self._text(run.stderr)} if failed else {})

    def _text(self, output: bytes) -> str:
        return output.decode(errors="replace")[-_TAIL_CHARS:]

    def _without_key(self, ended: Ended) -> Ended:
        """Take the capability out of everything that is told: a harness or a grader may have printed it."""
        told = msgspec.json.encode(ended).replace(self._key.encode(), b"[key]")
        return msgspec.json.decode(told, type=Ended)

    def _failure(self, code: str, blame: Blame, message: str, *, retryable: bool = False) -> Failure:
        return Failure(code=code, blame=blame, phase=self._phase, retryable=retryable, message=message)

    def _ended(self, failure: Failure) -> Ended:
        return Ended(rollout_id=self.rollout_id, status=RolloutStatus.FAILED, failure=failure)

    def _fallen(self, failure: Failure) -> Ended:
        """End without a look at the work. An agent that brought its own sandbox down has done none."""
        if failure.blame is Blame.AGENT and self._phase is Phase.RUN and self._task.grade is not None:
            return msgspec.structs.replace(self._ended(failure), reward=0.0)
        if self._phase is Phase.GRADE:
            failure = msgspec.structs.replace(failure, phase=Phase.GRADE)
        return self._ended(failure)

    def _aborted(self) -> Ended:
        failure = self._failure("interrupted", Blame.INFRA, "the run was stopped", retryable=True)
        return Ended(rollout_id=self.rollout_id, status=RolloutStatus.ABORTED, failure=failure)


def _printable(result: HarnessResult) -> HarnessResult:
    """Make a result fit for JSON: a lone surrogate cannot be written as UTF-8. And a detail is no log."""
    answer = None if result.answer is None else result.answer.encode("utf-8", "replace").decode()
    detail = result.detail.encode("utf-8", "replace").decode()[-_TAIL_CHARS:]
    return msgspec.structs.replace(result, answer=answer, detail=detail)
