"""How a harness is launched: what a manifest becomes, and what the runner needs to start it and to read its result."""

from typing import Literal, Protocol

import msgspec

from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult, Mount


class FileToWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the harness wants in its sandbox before it starts (a config file)."""

    path: str
    content: str
    mode: int = 0o644


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner knows about one rollout."""

    prompt: str
    model: str
    base_url: str
    """The data plane as seen from inside, with /v1."""
    api_key: str
    workdir: str
    home: str
    timeout_s: float


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything it takes to run one harness once."""

    harness: str
    version: str
    argv: list[str]
    env: dict[str, str] = {}
    stdin: str = ""
    files: list[FileToWrite] = []
    mounts: list[Mount] = []
    timeout_s: float
    result_from: Literal["stdout", "stdout_json", "file", "file_json"] = "stdout"
    """Where the final answer is."""
    result_path: str = ""
    """Path inside the sandbox, for `file` and `file_json`."""
    result_pointer: str = ""
    """JSON pointer to the answer, for the `…_json` kinds."""


class HarnessResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one run of a harness. Exit codes lie: `completed` is judged by what the harness wrote."""

    completed: bool
    answer: str | None
    detail: str = ""


class HarnessError(Exception):
    """A harness cannot be found, installed or launched. `failure` goes into the rollout's row as it is."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        blame: Blame = Blame.CLIENT,
        phase: Phase = Phase.LAUNCH,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(code=code, blame=blame, phase=phase, retryable=retryable, message=message)


class Harness(Protocol):
    """One harness, ready to be launched."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def version(self) -> str:
        """Pinned version."""
        ...

    async def install(self) -> None:
        """Put it into the cache, if it is not there. Raises HarnessError that says what failed and what to do."""
        ...

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Say how to launch it. Pure. Raises HarnessError, e.g. for a prompt that no command line can hold."""
        ...

    def result(self, plan: LaunchPlan, run: ExecResult, written: bytes | None) -> HarnessResult:
        """Read the outcome from the exec and, where the plan names a file, its content (None: there is none). Pure."""
        ...
