"""What `harness.toml` says, and the launch plan that follows from it. Pure: text in, structs out.

Not here: where manifests are found (registry), how a harness gets onto the disk (install), what its output means
(result). Every key is documented in docs/harness-manifest.md.

Invariant: a manifest that `parse` returns can be planned: its templates use known placeholders only, and what one key
needs of another is there. A key that nobody reads is an error, not a silent nothing.
"""

import difflib
import re
import tomllib
from typing import Any, get_args

import msgspec

from harness_images import checks, template
from harness_images.fields import (
    Check,
    Dialect,
    Install,
    InstallKind,
    Launch,
    LaunchFile,
    Manifest,
    Result,
    Source,
    Success,
)
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.launch import FileToWrite, HarnessError, LaunchPlan, LaunchRequest
from orchard_proxy.schema.sandbox import Mount

MOST_ARGUMENT_BYTES = 128 * 1024 - 1
"""Linux takes no longer argument and no longer NAME=value (MAX_ARG_STRLEN, with its closing NUL)."""


class ManifestError(HarnessError):
    """A manifest cannot be used. The message names the file, the key, and what to write instead."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__("bad_manifest", f"{where}: {problem}" + ("" if problem.endswith("?") else "."))


def parse(text: str, *, where: str = "harness.toml") -> Manifest:
    """Read a manifest; `where` is what error messages call it. Raises ManifestError."""
    try:
        manifest = msgspec.convert(tomllib.loads(text), Manifest)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(where, f"not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ManifestError(where, _reworded(str(error))) from error
    for problem in checks.problems(manifest):
        raise ManifestError(where, problem)
    return manifest


def plan(
    manifest: Manifest, request: LaunchRequest, *, install: str, mounts: list[Mount], args: dict[str, str]
) -> LaunchPlan:
    """Fill the templates for one rollout. `args` are all of the manifest's, defaults included."""
    values = args | _values(request) | {"install": install}
    launch = manifest.launch
    made = LaunchPlan(
        harness=manifest.name,
        version=manifest.version,
        argv=[template.fill(word, values) for word in launch.command],
        env={name: template.fill(value, values) for name, value in launch.env.items()},
        stdin=template.fill(launch.stdin, values),
        files=[_file(file, values) for file in launch.files],
        mounts=mounts,
        timeout_s=request.timeout_s,
        result_from=manifest.result.source,
        result_path=template.fill(manifest.result.path, values),
        result_pointer=manifest.result.answer,
    )
    _check_sizes(made)
    return made


def with_args(manifest: Manifest, given: dict[str, str]) -> dict[str, str]:
    """Return all arguments of the manifest, the given ones in place of their defaults."""
    for name in given:
        if name not in manifest.args:
            known = ", ".join(sorted(manifest.args)) or "none"
            near = _nearest(name, list(manifest.args))
            raise HarnessError("unknown_argument", f"{manifest.name} has no argument {name!r}{near}; it has: {known}.")
    return manifest.args | given


def _values(request: LaunchRequest) -> dict[str, str]:
    return {
        "prompt": request.prompt,
        "model": request.model,
        "base_url": request.base_url,
        "root_url": request.base_url.removesuffix("/").removesuffix("/v1"),
        "api_key": request.api_key,
        "workdir": request.workdir,
        "home": request.home,
        "timeout_s": f"{request.timeout_s:g}",
    }


def _file(file: LaunchFile, values: dict[str, str]) -> FileToWrite:
    return FileToWrite(
        path=template.fill(file.path, values), content=template.fill(file.content, values), mode=file.mode
    )


def _check_sizes(made: LaunchPlan) -> None:
    for text in [*made.argv, *(f"{name}={value}" for name, value in made.env.items())]:
        size = len(text.encode())
        if size > MOST_ARGUMENT_BYTES:
            raise _unlaunchable(
                "argument_too_long", made, f"the system takes {MOST_ARGUMENT_BYTES} bytes of it, not {size}"
            )
        if "\0" in text:
            raise _unlaunchable("argument_with_nul", made, "it cannot hold a NUL character")


def _unlaunchable(code: str, made: LaunchPlan, why: str) -> HarnessError:
    message = (
        f"{made.harness} takes the prompt on its command line, and {why}. Put long text in a file of the task and name "
        "it in the prompt, or use a harness that reads the prompt from stdin or a file (react does)."
    )
    return HarnessError(code, message, blame=Blame.TASK, phase=Phase.LAUNCH)


# What msgspec says, in the words of the file's author.

_TABLES: dict[str, type[msgspec.Struct]] = {
    "": Manifest,
    "install": Install,
    "launch": Launch,
    "launch.files[...]": LaunchFile,
    "result": Result,
    "result.success": Success,
    "check": Check,
}
_CHOICES = {"dialects": Dialect, "install.kind": InstallKind, "result.from": Source}
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_MISSING = re.compile(r"Object missing required field `(.+)`")


def _reworded(message: str) -> str:
    problem, _, path = message.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    table = f"[{place}]" if place else "the top of the file"
    if unknown := _UNKNOWN.fullmatch(problem):
        return f"{table} has no key `{unknown[1]}`{_nearest(unknown[1], _keys(place))}"
    if missing := _MISSING.fullmatch(problem):
        return f"{table} lacks the key `{missing[1]}`"
    choices = _CHOICES.get(re.sub(r"\[\d+\]", "", place))
    hint = f"; it can be {', '.join(map(repr, get_args(choices)))}" if choices else ""
    return f"{place or 'the file'}: {problem[:1].lower()}{problem[1:]}{hint}"


def _keys(place: str) -> list[str]:
    table: Any = _TABLES.get(re.sub(r"\[\d+\]", "[...]", place))
    return [field.encode_name for field in msgspec.structs.fields(table)] if table else []


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
