"""Capabilities: how a key is made, how a request carries it, how it is kept out of every record.

A rollout's key is an HMAC of its id under a secret in DATA, so that creating the same rollout again, also after a
restart, gives the same key without any key being stored. Records hold its sha256 alone.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from multidict import MultiMapping

KEY_PREFIX = "orch-"
PATH_PREFIX = "/r/"
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET_LIKE = re.compile(
    r"(?i:sk-|sk_|pk-|aiza|hf_|gsk_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|ya29\.|akia|asia|nvapi-|r8_|pypi-|npm_|eyj|orch-)"
)
"""How the credentials of providers begin. They are no names, so nobody misses them as labels."""


class Carried(msgspec.Struct, frozen=True):
    """What a request says about who it is: the key, or why there is none; and the path without the key."""

    key: str | None
    path: str
    conflict: bool = False


def carried(path: str, query: str, headers: Mapping[str, str]) -> Carried:
    """Find the key. Order: Bearer (or Basic), x-api-key, x-goog-api-key, ?key=, path. Two different keys conflict.

    Every line of a header that is sent twice counts.
    """
    path_key, rest = _split_path(path)
    found = [
        key
        for key in (
            *map(_authorization, _lines(headers, "Authorization")),
            *_lines(headers, "x-api-key"),
            *_lines(headers, "x-goog-api-key"),
            *parse_qs(query).get("key", ()),
            path_key,
        )
        if key
    ]
    return Carried(found[0] if found else None, rest, conflict=len(set(found)) > 1)


def _lines(headers: Mapping[str, str], name: str) -> list[str]:
    """Return a header's values; a mapping that is no multidict has at most one."""
    if isinstance(headers, MultiMapping):
        return headers.getall(name, [])
    return [headers[name]] if name in headers else []


def _split_path(path: str) -> tuple[str | None, str]:
    if not path.startswith(PATH_PREFIX):
        return None, path
    key, slash, rest = path[len(PATH_PREFIX) :].partition("/")
    return key, slash + rest


def _authorization(value: str) -> str | None:
    scheme, _, credential = value.strip().partition(" ")
    credential = credential.strip()
    match scheme.lower():
        case "bearer":
            return credential or None
        case "basic":
            return _basic(credential)
        case _:
            return None


def _basic(credential: str) -> str | None:
    """Take the password, or the user name where there is no password."""
    try:
        user, _, password = base64.b64decode(credential, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return password or user or None


def digest(key: str) -> str:
    """Hash a key for the record."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def mint(secret: bytes, rollout_id: str) -> str:
    """Make the key of a rollout. The same secret and id give the same key."""
    mac = hmac.new(secret, rollout_id.encode(), hashlib.sha256).digest()
    return KEY_PREFIX + base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


def label(key: str) -> str:
    """Name the rollout of an open-mode key. Whatever looks like a real credential is hashed, never written."""
    if _LABEL.fullmatch(key) and not _SECRET_LIKE.match(key) and key.strip("."):
        return key
    return "anon-" + digest(key)[:12]


def load_or_create(path: Path) -> str:
    """Read a secret from a 0600 file, or make one. Atomic: two starters agree on one secret."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # Another starter was first; its secret is the one.
    finally:
        draft.unlink()
    return path.read_text().strip()
