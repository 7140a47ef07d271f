"""Typed settings: `orchard.toml` < `ORCHARD_…` < flag.

Each setting has its unit in its name and the reason for its default beside it. An unknown key is an error, because a
misspelt setting that is silently ignored costs somebody a training run.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.schema.enums import UpstreamStream

ENV_PREFIX = "ORCHARD_"
MIB = 1024 * 1024
_TABLES = frozenset({"run", "serve"})
_T = TypeVar("_T")
Positive = Annotated[float, msgspec.Meta(gt=0)]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `orchard serve` needs to know. The table `[serve]` of orchard.toml has the same names."""

    upstream: str = "http://127.0.0.1:8001"
    """Base URL of the policy server, without /v1. The port that `orchard policy` listens on."""
    upstream_key: str | None = None
    """Key for the policy server. Never reaches a harness, never recorded."""
    engine: Literal["auto", "vllm", "llamacpp", "openai"] = "auto"
    """Kind of policy server; `auto` looks at what it answers."""
    upstream_stream: UpstreamStream = UpstreamStream.AUTO
    data: str = "orchard-data"
    host: str = "127.0.0.1"
    """Loopback: a recording proxy on a public address is a decision, not a default."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """0 takes a free port; --port-file tells which."""
    port_file: str | None = None
    uds: str | None = None
    """Unix socket that serves the data plane only; what a sandbox gets."""
    uds_fd: int | None = None
    """The same, as a listening socket that was inherited: it outlives this process, so that a starter who holds it can
    start another one on it and what connected in between only waits."""
    open: bool = False
    admin_key: str | None = None
    durability: Literal["process", "power"] = "process"
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * MIB
    """Room for images in a request, not for an accident."""
    max_rollout_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * MIB
    """Requests of one rollout that are being read or answered, together: no agent may fill the memory of all."""
    connect_timeout_s: Positive = 10.0
    """An engine that does not take a connection in this time is down, not slow."""
    silence_timeout_s: Positive = 1800.0
    """An engine may queue and prefill for minutes; half an hour without a byte is a hung one."""
    keepalive_s: Positive = 15.0
    """Load balancers cut connections that are silent for 60 s; a comment four times as often keeps them."""
    client_stall_s: Positive = 600.0
    """A client that reads nothing for this long is gone, whatever its socket says."""
    side_timeout_s: Positive = 10.0
    """How long the end of a call waits for evidence requests that run beside it."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long a stopping proxy lets calls finish."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `orchard run` may be told beside its flags; the table `[run]`. None: the default, or the resumed run's."""

    harness: str | None = None
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    retries: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rootfs: str | None = None
    proxy: str | None = None
    admin_key: str | None = None
    """Of `proxy`. Better in ORCHARD_RUN__ADMIN_KEY than in a flag, which every user of the machine can see."""


def load_serve(flags: Mapping[str, Any], *, config: Path | None = None) -> ServeSettings:
    """Merge the file, the environment and the flags that were given (None: not given).

    Raises UsageError that names the key and where it came from.
    """
    return _load(ServeSettings, "serve", flags, config)


def load_run(flags: Mapping[str, Any], *, config: Path | None = None) -> RunSettings:
    """Merge the settings of `orchard run`, like `load_serve`."""
    return _load(RunSettings, "run", flags, config)


def _load(kind: type[_T], table: str, flags: Mapping[str, Any], config: Path | None) -> _T:
    path = config or Path("orchard.toml")
    sources = {
        f"{path}, [{table}]": _from_file(path, table, needed=config is not None),
        f"the environment, {ENV_PREFIX}{table.upper()}__…": _from_environment(os.environ, table),
        "the flags": {name: value for name, value in flags.items() if value is not None},
    }
    merged: dict[str, Any] = {}
    for source, settings in sources.items():
        merged |= settings
        try:
            made = msgspec.convert(merged, kind, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"a setting is not valid ({source}): {error}.") from error
    return made


def _from_file(path: Path, table: str, *, needed: bool) -> dict[str, Any]:
    if not needed and not path.exists():
        return {}
    try:
        parsed = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    known = ", ".join(f"[{name}]" for name in sorted(_TABLES))
    for name, value in parsed.items():
        if name not in _TABLES or not isinstance(value, dict):
            raise UsageError(f"{path}: {name!r} is no table of settings; known: {known}.")
    return dict(parsed.get(table, {}))


def _from_environment(environment: Mapping[str, str], table: str) -> dict[str, Any]:
    prefix = f"{ENV_PREFIX}{table.upper()}__"
    return {name[len(prefix) :].lower(): value for name, value in environment.items() if name.startswith(prefix)}
