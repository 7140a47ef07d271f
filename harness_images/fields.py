"""The keys of `harness.toml` as structs. What they mean for an author is in docs/harness-manifest.md."""

from typing import Literal

import msgspec

Dialect = Literal["chat", "completions", "responses", "messages", "gemini"]
InstallKind = Literal["none", "pip"]
Source = Literal["stdout", "stdout_json", "file", "file_json"]

PLACEHOLDERS = frozenset(
    {"prompt", "model", "base_url", "root_url", "api_key", "workdir", "home", "install", "timeout_s"}
)
"""What every template may use; the names under [args] come on top."""


class Install(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the harness gets onto the disk."""

    kind: InstallKind = "none"
    python: str = ">=3.10"
    packages: list[str] = []
    constraints: str = ""
    files: list[str] = []


class LaunchFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that is written into the sandbox before the start."""

    path: str
    content: str = ""
    mode: int = 0o644


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the harness is started."""

    command: list[str]
    env: dict[str, str] = {}
    stdin: str = ""
    files: list[LaunchFile] = []


class Success(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When what was written counts as a completed run."""

    pointer: str = ""
    equals: list[str | int | bool] = []
    matches: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the outcome is."""

    source: Source = msgspec.field(name="from", default="stdout")
    path: str = ""
    answer: str = ""
    detail: str = ""
    success: Success = Success()


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `orchard harness check` does with the harness."""

    script: str = ""
    prompt: str = "Say that all is well."
    grade: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One harness."""

    name: str
    version: str
    description: str = ""
    licence: str = ""
    homepage: str = ""
    dialects: list[Dialect]
    args: dict[str, str] = {}
    install: Install = Install()
    launch: Launch
    result: Result = Result()
    check: Check = Check()
