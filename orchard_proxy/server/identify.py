"""The first step of the pipeline: from a request line and headers to a rollout, or to a refusal. Pure.

Also decides which headers may be recorded and which may go upstream. Both are allow-lists: a credential that nobody
thought of is not on them.
"""

from collections.abc import Mapping

import msgspec

from orchard_proxy.server import keys
from orchard_proxy.server.registry import Entry, Refusal, Registry

CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
ROUTES = {CHAT_PATH: "POST", MODELS_PATH: "GET"}

_UPSTREAM_HEADERS = ("x-request-id", "x-session-id", "traceparent", "tracestate")
_RECORDED_HEADERS = (
    *_UPSTREAM_HEADERS,
    "user-agent",
    "content-type",
    "accept",
    "idempotency-key",
    "x-parent-session-id",
    "session-id",
    "originator",
)
_RECORDED_PREFIXES = ("x-stainless-", "x-orchard-")


class Identified(msgspec.Struct, frozen=True):
    """A request that is let in: whose it is, and its path without the key."""

    entry: Entry
    path: str


def identify(
    method: str, path: str, query: str, headers: Mapping[str, str], registry: Registry
) -> Identified | Refusal:
    """Say whose request this is and where it goes."""
    carried = keys.carried(path, query, headers)
    wanted = ROUTES.get(carried.path)
    if wanted is None:
        return Refusal(404, "unknown_route", _no_route(carried.path))
    if method != wanted:
        return Refusal(405, "method_not_allowed", f"{carried.path} takes {wanted}, not {method}.")
    if carried.conflict:
        return Refusal(400, "conflicting_keys", "The request carries two different keys. Send one, in one place.")
    who = registry.identify(carried.key)
    return who if isinstance(who, Refusal) else Identified(who, carried.path)


def recorded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Pick what the journal may hold."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in _RECORDED_HEADERS or name.lower().startswith(_RECORDED_PREFIXES)
    }


def upstream_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Pick what the engine may see."""
    return {name: headers[name] for name in _UPSTREAM_HEADERS if name in headers}


def _no_route(path: str) -> str:
    served = ", ".join(f"{method} {route}" for route, method in ROUTES.items())
    if f"/v1{path}" in ROUTES:
        return f"No route {path}. The base URL ends in /v1: you probably want /v1{path}."
    return f"No route {path}. Served here: {served}."
