"""Tasks from a path: which reader it needs, and the digest that tells whether tasks have changed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import harbor, jsonl
from orchard_proxy.runner.tasks import Grade, HarborGrade, Task


def load(path: Path) -> list[Task]:
    """Read a JSONL file, a task folder or a folder of them. Raises UsageError that says where and what."""
    if path.is_dir():
        tasks = harbor.read(path)
    elif path.is_file():
        tasks = jsonl.parse(path.read_bytes(), name=str(path), folder=path.parent)
    else:
        raise UsageError(f"no such task file or folder: {path}")
    if not tasks:
        raise UsageError(f"{path} holds no task")
    for task in tasks:
        if task.rootfs is not None and not Path(task.rootfs).is_dir():
            raise UsageError(f"{path}: task {task.task_id!r}: no such rootfs folder: {task.rootfs}")
    return tasks


def digest(tasks: Sequence[Task]) -> str:
    """Hash all that makes the tasks what they are, the content of their folders too. Host paths do not count."""
    hasher = hashlib.sha256()
    for task in tasks:
        plain = msgspec.structs.replace(task, uploads=[], grade=_without_path(task.grade))
        hasher.update(msgspec.json.encode(plain, order="deterministic") + b"\n")
        for upload in task.uploads:
            hasher.update(f"{upload.target}\n".encode())
            _hash_tree(hasher, Path(upload.source))
        if isinstance(task.grade, HarborGrade):
            _hash_tree(hasher, Path(task.grade.tests))
    return hasher.hexdigest()


def _without_path(grade: Grade | None) -> Grade | None:
    return msgspec.structs.replace(grade, tests="") if isinstance(grade, HarborGrade) else grade


def _hash_tree(hasher: "hashlib._Hash", root: Path) -> None:
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    for path in files:
        data = path.read_bytes()
        hasher.update(f"{path.relative_to(root)} {path.stat().st_mode & 0o777:o} {len(data)}\n".encode() + data)
