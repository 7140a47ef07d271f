"""Recorded JSON as text that every reader accepts.

A client may send what Python prints but no JSON parser owes to read: NaN and Infinity, half a surrogate pair, bytes
that are not UTF-8. The journal keeps such bytes as they came. A JSON column holds valid JSON in valid UTF-8, so the
offending value alone is spelled as a string (`NaN` → `"NaN"`, a lone surrogate → its escape as readable text) and
every other byte stays. Valid JSON is never touched.
"""

import json
import re
from typing import NoReturn

import msgspec

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?Infinity|NaN', re.DOTALL)
_HALF = re.compile(r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})")
"""An escaped backslash, a whole pair, or (group 1) half a pair, in this order, so that only the last is changed."""
_CONTROL = re.compile(r"[\x00-\x1f\ud800-\udfff]")


def json_text(raw: bytes | msgspec.Raw) -> str:
    """Return recorded JSON as valid JSON text; what cannot be read at all becomes `{"_invalid": "<the text>"}`."""
    data = bytes(raw)
    try:
        msgspec.json.decode(data)
        return data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    repaired = _TOKEN.sub(_repair, text)
    return repaired if is_valid(repaired) else json.dumps({"_invalid": _CONTROL.sub(_readable, text)})


def is_valid(text: str) -> bool:
    """Say whether the text is JSON by the letter (RFC 8259), without half surrogate pairs."""
    try:
        json.loads(text, parse_constant=_refuse, parse_float=str, parse_int=str)
        text.encode()
    except (ValueError, RecursionError):
        return False
    return not any(half.group(1) for half in _HALF.finditer(text))


def _repair(match: re.Match[str]) -> str:
    token = match.group()
    if token[0] != '"':
        return f'"{token}"'
    return _CONTROL.sub(_escape, _HALF.sub(lambda half: f"\\{half.group()}" if half.group(1) else half.group(), token))


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\u{code:04x}" if code < 0x20 else f"\\\\u{code:04x}"


def _readable(match: re.Match[str]) -> str:
    character = match.group()
    return character if ord(character) < 0x20 else f"\\u{ord(character):04x}"


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
