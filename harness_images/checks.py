"""What the types of a manifest cannot say: checks across its keys, each with a sentence for the author. Pure."""

import re
from collections.abc import Iterator

from harness_images import python_spec, template
from harness_images.fields import PLACEHOLDERS, Manifest


def problems(manifest: Manifest) -> Iterator[str]:
    """Say what is wrong, most basic first."""
    for check in (_head, _install, _launch, _result, _templates):
        yield from check(manifest)


def _head(manifest: Manifest) -> list[str]:
    found = []
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", manifest.name):
        found.append(f"name is {manifest.name!r}; use lower-case letters, digits and single hyphens")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", manifest.version):
        found.append(f"version is {manifest.version!r}; pin one, like 2.4.6")
    if not manifest.dialects:
        found.append("dialects is empty; name the APIs that it speaks, like ['chat']")
    found += [
        f"[args] cannot have {name!r}: use a-z and _, and none of {template.listed(PLACEHOLDERS)}"
        for name in manifest.args
        if not re.fullmatch(r"[a-z_]+", name) or name in PLACEHOLDERS
    ]
    return found


def _install(manifest: Manifest) -> list[str]:
    install = manifest.install
    found = []
    if not python_spec.is_valid(install.python):
        found.append(f"[install] python is {install.python!r}; write it like '>=3.10,<3.14'")
    if install.kind == "pip" and not install.packages:
        found.append("[install] kind is 'pip' but packages is empty")
    if install.kind == "none" and (install.packages or install.constraints):
        found.append("[install] packages and constraints need kind = 'pip'")
    found += [
        f"[install] packages: {name!r} is not pinned; write NAME==VERSION"
        for name in install.packages
        if "==" not in name
    ]
    for name in filter(None, [*install.files, install.constraints, manifest.check.script]):
        if "/" in name or name in (".", ".."):
            found.append(f"{name!r} must be a plain name of a file beside harness.toml")
    return found


def _launch(manifest: Manifest) -> list[str]:
    launch = manifest.launch
    found = []
    if not launch.command or not launch.command[0]:
        found.append("[launch] command is empty; the first word is the program")
    found += [
        f"[launch.env] {name!r} is no name of a variable"
        for name in launch.env
        if not re.fullmatch(r"[A-Za-z_]\w*", name)
    ]
    found += [
        f"[[launch.files]] path {file.path!r} must begin with {{home}}, {{workdir}} or /tmp/: the rest is read-only"
        for file in launch.files
        if not _is_writable(file.path)
    ]
    uses = [*launch.command, *launch.env.values(), launch.stdin, *(file.content for file in launch.files)]
    if manifest.install.kind == "none" and not manifest.install.files and any("{install" in text for text in uses):
        found.append("[launch] uses {install}, but [install] puts nothing there")
    if not any("{prompt" in text for text in uses):
        found.append("[launch] uses {prompt} nowhere, so the harness would not learn its task")
    return found


def _is_writable(path: str) -> bool:
    return path.startswith(("{home}/", "{workdir}/", "/tmp/"))  # noqa: S108 (a path inside the sandbox)


def _result(manifest: Manifest) -> list[str]:
    result, success = manifest.result, manifest.result.success
    from_file, from_json = result.source.startswith("file"), result.source.endswith("_json")
    found = []
    if from_file and not _is_writable(result.path):
        found.append(f"[result] from = '{result.source}' needs a path that begins with {{home}}, {{workdir}} or /tmp/")
    if not from_file and result.path:
        found.append(f"[result] from = '{result.source}' reads no file; remove path")
    for key, pointer in (("answer", result.answer), ("detail", result.detail), ("success.pointer", success.pointer)):
        if pointer and not from_json:
            found.append(f"[result] {key} is a JSON pointer, but from = '{result.source}' is plain text")
        if pointer and not pointer.startswith("/"):
            found.append(f"[result] {key} is {pointer!r}; a JSON pointer begins with /")
    if bool(success.pointer) != bool(success.equals):
        found.append("[result.success] pointer and equals need each other")
    if success.matches and from_json:
        found.append("[result.success] matches is for plain text; with JSON use pointer and equals")
    return found + _pattern(success.matches)


def _pattern(pattern: str) -> list[str]:
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"[result.success] matches is no regular expression: {error}"]
    return []


def _templates(manifest: Manifest) -> list[str]:
    names = PLACEHOLDERS | manifest.args.keys()
    launch = manifest.launch
    texts = {
        "[launch] command": launch.command,
        "[launch.env]": list(launch.env.values()),
        "[launch] stdin": [launch.stdin],
        "[[launch.files]]": [text for file in launch.files for text in (file.path, file.content)],
        "[result] path": [manifest.result.path],
    }
    return [
        f"{key}: {problem}"
        for key, group in texts.items()
        for text in group
        for problem in template.problems(text, names)
    ]
