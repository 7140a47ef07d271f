"""The part of a Dockerfile that means something without building it: WORKDIR, ENV, and COPY of local files. Pure.

Everything else is named in `unbuilt`, so that a task whose image would hold more than our sandbox says so. Stages: only
the last one counts, as in `docker build`.
"""

import json
import posixpath
import re

import msgspec

_CONTINUED = re.compile(r"[ \t]*\\[ \t]*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"""(\w+)=("(?:[^"\\]|\\.)*"|'[^']*'|(?:\\.|[^\s\\])*)""")
_SILENT = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "SHELL", "USER", "VOLUME"})
"""Instructions that change nothing for a command that is executed in the sandbox, whose user is fixed."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """COPY or ADD of files of the build context."""

    sources: list[str]
    target: str
    """Absolute; ends in / when it is a folder."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What can be honoured, and what cannot."""

    workdir: str | None = None
    env: dict[str, str] = {}
    copies: list[Copy] = []
    unbuilt: list[str] = []


def read(text: str) -> Recipe:
    """Read a Dockerfile."""
    reader = _Reader()
    for line in _instructions(text):
        word, _, rest = line.partition(" ")
        reader.take(word.upper(), rest.strip(), line)
    return reader.recipe()


def _instructions(text: str) -> list[str]:
    """Join continued lines; leave comments and blank lines out. A heredoc's body is its instruction's."""
    found: list[str] = []
    open_line = ""
    heredoc: str | None = None
    for line in text.splitlines():
        if heredoc is not None:
            heredoc = None if line.strip() == heredoc else heredoc
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        continued = _CONTINUED.search(line)
        open_line += (line[: continued.start()] if continued else line).strip() + " "
        if continued:
            continue
        found.append(" ".join(open_line.split()))
        marker = re.search(r"<<-?[\"']?(\w+)", open_line)
        heredoc = marker.group(1) if marker else None
        open_line = ""
    return [*found, " ".join(open_line.split())] if open_line.strip() else found


class _Reader:
    def __init__(self) -> None:
        self._begin_stage()

    def _begin_stage(self) -> None:
        self._workdir: str | None = None
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._copies: list[Copy] = []
        self._unbuilt: list[str] = []

    def recipe(self) -> Recipe:
        return Recipe(workdir=self._workdir, env=self._env, copies=self._copies, unbuilt=self._unbuilt)

    def take(self, word: str, rest: str, line: str) -> None:
        match word:
            case "FROM":
                self._begin_stage()
            case "WORKDIR":
                self._workdir = self._absolute(self._filled(rest.strip("\"'")))
            case "ENV":
                self._set_env(rest)
            case "ARG":
                name, _, value = rest.partition("=")
                self._args[name] = value.strip("\"'")
            case "COPY" | "ADD":
                self._copy(rest, line)
            case "RUN" if _only_makes_folders(rest):
                pass  # A folder is there as soon as something is put into it.
            case _ if word not in _SILENT:
                self._unbuilt.append(line if len(line) <= 120 else line[:117] + "...")

    def _set_env(self, rest: str) -> None:
        pairs = _ASSIGNMENT.findall(rest)
        if pairs and rest.split(maxsplit=1)[0].find("=") > 0:
            self._env |= {name: self._filled(_unquoted(value)) for name, value in pairs}
        else:
            name, _, value = rest.partition(" ")
            self._env[name] = self._filled(value.strip())

    def _copy(self, rest: str, line: str) -> None:
        flags = [word for word in rest.split() if word.startswith("--")]
        words = _words(rest)[len(flags) :]
        remote = any(word.startswith(("http://", "https://", "git@")) for word in words)
        if len(words) < 2 or remote or "<<" in rest or any(flag.startswith("--from") for flag in flags):
            self._unbuilt.append(line)
            return
        *sources, target = [self._filled(word) for word in words]
        into = self._absolute(target)
        folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
        self._copies.append(Copy(sources=sources, target=into.rstrip("/") + "/" if folder else into))

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir or "/", path))

    def _filled(self, text: str) -> str:
        known = self._args | self._env
        return _VARIABLE.sub(lambda m: known.get(m[1] or m[3], m[2] or ""), text)


def _words(rest: str) -> list[str]:
    start = rest.find("[")
    if start >= 0 and rest.endswith("]"):
        try:
            listed = json.loads(rest[start:])
        except ValueError:
            return rest.split()
        return [*rest[:start].split(), *map(str, listed)]
    return rest.split()


def _unquoted(value: str) -> str:
    if value[:1] in ("'", '"'):
        value = value[1:-1]
    return re.sub(r"\\(.)", r"\1", value)


def _only_makes_folders(rest: str) -> bool:
    return re.fullmatch(r"mkdir (-p )?[\w./ -]+", rest) is not None
