"""Tasks in Harbor's folder layout: task.toml, instruction.md, environment/, tests/test.sh (docs/running.md).

Not Harbor: images are not built, services are not composed. What a task asks for and cannot have is either an error
(it could not work) or a warning that is kept in every row. Unknown keys of task.toml are ignored, as Harbor does.
"""

import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import dockerfile
from orchard_proxy.runner.tasks import HarborGrade, Task, Upload

logger = logging.getLogger(__name__)

SCRATCH = ["/tests", "/logs"]
WORKDIR = "/app"
"""Where neither task.toml nor a Dockerfile names one."""
_MIB = 1024 * 1024
_SIZES = {"": 1, "K": 1024, "M": _MIB, "G": 1024 * _MIB}
_SYSTEM = frozenset(
    {"/"} | {f"/{name}" for name in ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "run")}
) | {"/sbin", "/sys", "/tmp", "/usr", "/var"}  # noqa: S108 (the sandbox's own)
"""Not to be hidden under an empty folder."""
_HOST_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class _Agent(msgspec.Struct):
    timeout_sec: float | None = None


class _Verifier(msgspec.Struct):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class _Environment(msgspec.Struct):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = None
    memory: str | None = None
    gpus: int | None = None
    tpu: Any = None
    env: dict[str, str] = {}
    workdir: str | None = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    healthcheck: Any = None


class _Name(msgspec.Struct):
    name: str


class _TaskToml(msgspec.Struct):
    task: _Name | None = None
    agent: _Agent = msgspec.field(default_factory=_Agent)
    verifier: _Verifier = msgspec.field(default_factory=_Verifier)
    environment: _Environment = msgspec.field(default_factory=_Environment)
    metadata: dict[str, Any] = {}
    steps: list[Any] | None = None


def read(folder: Path) -> list[Task]:
    """Read one task folder, or every task folder in a folder, in the order of their names."""
    if (folder / "task.toml").is_file():
        return [read_task(folder)]
    children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    tasks = [read_task(child) for child in children if _is_task(child)]
    names: dict[str, int] = {}
    for task in tasks:
        names[task.task_id] = names.get(task.task_id, 0) + 1
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"{folder}: {twice[0]!r} is the name of {names[twice[0]]} tasks")
    return tasks


def _is_task(folder: Path) -> bool:
    missing = [name for name in ("task.toml", "instruction.md", "tests/test.sh") if not (folder / name).is_file()]
    if missing:
        logger.warning("%s is no task and was left out: %s is missing", folder, missing[0])
    return not missing


def read_task(folder: Path) -> Task:
    """Read one task folder. Raises UsageError that says what is wrong with it."""
    toml = _toml(folder)
    _refuse(folder, toml)
    recipe = _recipe(folder / "environment")
    here = toml.environment
    workdir = here.workdir or recipe.workdir or WORKDIR
    uploads = _uploads(folder, recipe, workdir)
    return Task(
        task_id=toml.task.name if toml.task else folder.resolve().name,
        prompt=_instruction(folder),
        uploads=uploads,
        grade=HarborGrade(
            tests=str(_inside(folder, folder / "tests")),
            timeout_s=toml.verifier.timeout_sec,
            env=_host_filled(toml.verifier.env),
        ),
        timeout_s=toml.agent.timeout_sec,
        workdir=workdir,
        env=recipe.env | _host_filled(here.env),
        memory_bytes=_memory_bytes(folder, here),
        scratch=[*SCRATCH, *_folders_of(uploads, workdir)],
        metadata=toml.metadata,
        warnings=_warnings(recipe, here),
    )


def _toml(folder: Path) -> _TaskToml:
    path = folder / "task.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _TaskToml)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}") from error


def _refuse(folder: Path, toml: _TaskToml) -> None:
    """Refuse what could not work here, instead of grading it wrongly."""
    separate = toml.verifier.environment is not None or toml.verifier.environment_mode == "separate"
    wanted = {
        "[[steps]]: tasks of several steps": toml.steps,
        "[verifier] environment_mode = separate": separate,
        "[environment] os other than linux": toml.environment.os != "linux",
        "[environment] gpus": toml.environment.gpus,
        "[environment] tpu": toml.environment.tpu,
        "docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
        "no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
    }
    for what, there in wanted.items():
        if there:
            raise UsageError(f"{folder}: {what}: the local sandbox cannot run this task")


def _recipe(environment: Path) -> dockerfile.Recipe:
    path = environment / "Dockerfile"
    return dockerfile.read(path.read_text(encoding="utf-8")) if path.is_file() else dockerfile.Recipe()


def _instruction(folder: Path) -> str:
    """Return instruction.md without the canary lines at its top."""
    try:
        lines = (folder / "instruction.md").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise UsageError(f"{folder / 'instruction.md'}: {error.strerror}") from error
    while lines and "canary" in lines[0].lower() and lines[0].lstrip().startswith(("<!--", "#")):
        lines = lines[1:]
        while lines and not lines[0].strip():
            lines = lines[1:]
    return "".join(lines)


def _uploads(folder: Path, recipe: dockerfile.Recipe, workdir: str) -> list[Upload]:
    """Return what COPY names; without a Dockerfile, the loose files of environment/ go to the workdir."""
    context = folder / "environment"
    if not (context / "Dockerfile").is_file():
        loose = sorted(context.iterdir()) if context.is_dir() else []
        return [Upload(source=str(_inside(folder, path)), target=f"{workdir}/{path.name}") for path in loose]
    return [upload for copy in recipe.copies for upload in _copied(folder, context, copy)]


def _copied(folder: Path, context: Path, copy: dockerfile.Copy) -> list[Upload]:
    found = []
    for pattern in copy.sources:
        paths = sorted(context.glob(pattern.lstrip("/"))) if pattern.strip("/") not in ("", ".") else [context]
        if not paths:
            raise UsageError(f"{context / 'Dockerfile'}: COPY {pattern}: there is no such file in {context}")
        for path in paths:
            into = copy.target.endswith("/") and path.is_file()
            target = copy.target + path.name if into else copy.target.rstrip("/") or "/"
            found.append(Upload(source=str(_inside(folder, path)), target=target))
    return found


def _folders_of(uploads: list[Upload], workdir: str) -> list[str]:
    """Return the top folders, other than the system's, that COPY wants outside of the workdir."""
    outside = [upload.target for upload in uploads if not f"{upload.target}/".startswith(f"{workdir.rstrip('/')}/")]
    return sorted({"/" + target.split("/")[1] for target in outside} - _SYSTEM)


def _inside(folder: Path, path: Path) -> Path:
    """Return the path, resolved. Raises UsageError when it, or a link below it, leads out of the task."""
    root = folder.resolve()
    for one in [path, *(path.rglob("*") if path.is_dir() else ())]:
        if not one.resolve().is_relative_to(root):
            raise UsageError(f"{one} leads out of its task folder")
    return path.resolve()


def _host_filled(env: dict[str, str]) -> dict[str, str]:
    """Fill `${VAR}` and `${VAR:-default}` from the host's environment, as Harbor does."""
    return {name: _HOST_VARIABLE.sub(_host_value, value) for name, value in env.items()}


def _host_value(match: re.Match[str]) -> str:
    name, default = match.groups()
    value = os.environ.get(name, default)
    if value is None:
        raise UsageError(f"a task needs the environment variable {name}, which is not set")
    return value


def _memory_bytes(folder: Path, here: _Environment) -> int | None:
    if here.memory_mb is not None:
        return here.memory_mb * _MIB
    if here.memory is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", here.memory.strip().upper())
    if match is None:
        raise UsageError(f'{folder}/task.toml: memory is a size such as "512M", not {here.memory!r}')
    return int(float(match[1]) * _SIZES[match[2]])


def _warnings(recipe: dockerfile.Recipe, here: _Environment) -> list[str]:
    wanted: dict[str, Any] = {
        f"docker_image {here.docker_image} is not pulled": here.docker_image,
        "mcp_servers are not started": here.mcp_servers,
        "skills_dir is not given to the harness": here.skills_dir,
        "healthcheck is not run": here.healthcheck,
    }
    found = [what for what, there in wanted.items() if there]
    return [*found, *(f"not built: {line}" for line in recipe.unbuilt)]
