"""JSON edited as bytes: members are replaced or cut, everything else keeps its spelling.

Not a JSON library: values are opaque. The invariant: a value that was not edited leaves exactly as it came
(`0.000071` stays so), whatever the whitespace, the duplicate keys or the NaN around it. What cannot be read as an
object is returned unchanged; nothing here raises on bad input, except `loads`.

Two ways give the same bytes. The quick one decodes to raw members and encodes them again; it is trusted only where
encoding the unedited members reproduces the input. All else goes through a scanner of spans.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

Change = bytes | None | Callable[[bytes], bytes | None]
"""What becomes of a member's value: these bytes, removal (None), or what a function makes of its bytes."""

NULL = b"null"

_UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What the quick way raises on text that it cannot take; the scanner then has its turn."""

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_ARRAY = msgspec.json.Decoder(list[Raw])
_ANY = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode

_SPACE = rb"[ \t\r\n]*+"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN = re.compile(rb"(?:\xef\xbb\xbf)?" + _SPACE + rb"([\[{])" + _SPACE)
_KEY = re.compile(_SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE, re.DOTALL)
_SCALAR = re.compile(_STRING + rb'|[^ \t\r\n,:\[\]{}"]++', re.DOTALL)
_TOKEN = re.compile(rb"[\[{]|[\]}]|" + _STRING + rb'|"', re.DOTALL)
_AFTER = re.compile(_SPACE + rb"([,\]}])" + _SPACE)
_END = re.compile(_SPACE + rb"\Z")


class _MalformedError(Exception):
    """The scanner cannot follow the text."""


class _Span(NamedTuple):
    """One member (or element) of the text: key may be None for an element."""

    key: str | None
    start: int
    value: int
    end: int


def members(body: bytes) -> dict[str, Raw] | None:
    """Return the members of a JSON object as raw values, the last of equal keys; None when it is not an object."""
    try:
        return _OBJECT.decode(body)
    except _UNREADABLE:
        spans = _spans(body, b"{")
    if spans is None:
        return None
    return {span.key: Raw(body[span.value : span.end]) for span in spans if span.key is not None}


def elements(body: bytes) -> list[Raw] | None:
    """Return the elements of a JSON array as raw values; None when it is not an array."""
    try:
        return _ARRAY.decode(body)
    except _UNREADABLE:
        spans = _spans(body, b"[")
    return None if spans is None else [Raw(body[span.value : span.end]) for span in spans]


def set_members(body: bytes, values: Mapping[str, bytes | None]) -> bytes:
    """Set members of an object: replaced where present, else added at the end; None removes."""
    return edit(
        body, {k: v for k, v in values.items() if v is None}, {k: v for k, v in values.items() if v is not None}
    )


def edit(body: bytes, changes: Mapping[str, Change], add: Mapping[str, bytes] | None = None) -> bytes:
    """Apply `changes` to the members that are present, and set those of `add`.

    Every one of duplicate members is changed. Not an object: returned unchanged.
    """
    add = add or {}
    changes = {**changes, **add} if add else changes
    try:
        found = _OBJECT.decode(body)
    except _UNREADABLE:
        return _edit_spans(body, changes, add, None)
    if not add and not any(key in found for key in changes):
        return body
    if _encode(found) != body:
        return _edit_spans(body, changes, add, found)
    return _encode(_changed(found, changes, add))


def each(changes: Mapping[str, Change]) -> Change:
    """Return a change that edits every object of an array (or the object itself)."""

    def change(raw: bytes) -> bytes:
        return edit_each(raw, changes)

    return change


def edit_each(body: bytes, changes: Mapping[str, Change]) -> bytes:
    """Apply `changes` to each object in an array; to the object itself when it is one."""
    if not body.startswith(b"["):
        return edit(body, changes)
    try:
        found = _OBJECTS.decode(body)
    except _UNREADABLE:
        found = None
    if found is None or _encode(found) != body:
        return map_elements(body, lambda raw: edit(raw, changes))
    return _encode([_changed(item, changes, {}) for item in found])


def map_elements(body: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Replace each element of an array by what `change` makes of it; not an array: unchanged."""
    try:
        found = _ARRAY.decode(body)
    except _UNREADABLE:
        found = None
    if found is not None and _encode(found) == body:
        return _encode([Raw(change(bytes(raw))) for raw in found])
    spans = _spans(body, b"[", None if found is None else dict(enumerate(found)))
    if spans is None:
        return body
    out: list[bytes] = []
    at = 0
    for span in spans:
        out += (body[at : span.value], change(body[span.value : span.end]))
        at = span.end
    return b"".join([*out, body[at:]])


def loads(data: bytes) -> Any:
    """Decode JSON as leniently as Python does: NaN, lone surrogates, bytes that are not UTF-8. Raise ValueError."""
    with contextlib.suppress(*_UNREADABLE):
        return _ANY.decode(data)
    try:
        return json.loads(data.decode("utf-8-sig", "replace"))
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def dumps(value: Any) -> bytes:
    """Encode as compact UTF-8 JSON; lone surrogates are escaped, NaN becomes null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, separators=(",", ":")).encode()


def _changed(found: dict[str, Raw], changes: Mapping[str, Change], add: Mapping[str, bytes]) -> dict[str, Raw]:
    for key, change in changes.items():
        old = found.get(key)
        if old is None:
            continue
        new = _apply(change, bytes(old))
        if new is None:
            del found[key]
        else:
            found[key] = Raw(new)
    for key, value in add.items():
        found.setdefault(key, Raw(value))
    return found


def _apply(change: Change, value: bytes) -> bytes | None:
    return change(value) if callable(change) else change


def _edit_spans(
    body: bytes, changes: Mapping[str, Change], add: Mapping[str, bytes], known: dict[str, Raw] | None
) -> bytes:
    spans = _spans(body, b"{", known)
    if spans is None:
        return body
    at = _opening(body, b"{")
    out = [body[:at]]
    kept = False
    missing = dict(add)
    for span in spans:
        gap, at = body[at : span.start], span.end
        value: bytes | None = body[span.value : span.end]
        if span.key is not None and span.key in changes:
            value = _apply(changes[span.key], body[span.value : span.end])
            missing.pop(span.key, None)
        if value is not None:
            out += (gap if kept else b"", body[span.start : span.value], value)
            kept = True
    for key, raw in missing.items():
        out += (b"," if kept else b"", _encode(key), b":", raw)
        kept = True
    return b"".join([*out, body[at:]])


def _opening(body: bytes, kind: bytes) -> int:
    """Return the offset of the first member, or -1 when the text does not open an object (array)."""
    opened = _OPEN.match(body)
    return opened.end() if opened is not None and opened[1] == kind else -1


def _spans(body: bytes, kind: bytes, known: Mapping[Any, Raw] | None = None) -> list[_Span] | None:
    """Return the spans of the members of an object or the elements of an array; None when it is neither or broken.

    `known` holds values by key (by number, in an array) and saves looking for their ends. One that is not the value
    at its place, as with equal keys, either fails to match or leads to a broken text: then it is done without.
    """
    at = _opening(body, kind)
    if at < 0:
        return None
    for hints in (known, {}) if known else ({},):
        try:
            return list(_scan(body, at, keyed=kind == b"{", known=hints))
        except _MalformedError:
            continue
    return None


def _scan(body: bytes, at: int, *, keyed: bool, known: Mapping[Any, Raw]) -> Iterator[_Span]:
    close = b"}" if keyed else b"]"
    if body[at : at + 1] == close:
        _expect(_END, body, at + 1)
        return
    for number in itertools.count():
        start, key = at, None
        if keyed:
            found = _expect(_KEY, body, at)
            start, key, at = found.start(1), _text(found[1]), found.end()
        hint = known.get(number if key is None else key)
        end = _value_end(body, at) if hint is None else _known_end(body, at, bytes(hint))
        yield _Span(key, start, at, end)
        after = _expect(_AFTER, body, end)
        at = after.end()
        if after[1] == close:
            _expect(_END, body, at)
            return
        if after[1] != b",":
            raise _MalformedError


def _expect(pattern: re.Pattern[bytes], body: bytes, at: int) -> re.Match[bytes]:
    found = pattern.match(body, at)
    if found is None:
        raise _MalformedError
    return found


def _known_end(body: bytes, at: int, value: bytes) -> int:
    return at + len(value) if body.startswith(value, at) else _value_end(body, at)


def _value_end(body: bytes, at: int) -> int:
    """Return the offset just past the value at `at`. Iterative: nesting costs no stack."""
    if body[at : at + 1] not in (b"{", b"["):
        return _expect(_SCALAR, body, at).end()
    depth = 0
    for token in _TOKEN.finditer(body, at):
        text = body[token.start()]
        if text in b"[{":
            depth += 1
        elif text in b"]}":
            depth -= 1
            if depth == 0:
                return token.end()
        elif token.end() == token.start() + 1:
            break
    raise _MalformedError


def _text(quoted: bytes) -> str:
    if b"\\" not in quoted:
        return quoted[1:-1].decode("utf-8", "surrogateescape")
    try:
        return str(json.loads(quoted.decode("utf-8", "surrogateescape"), strict=False))
    except ValueError:
        return quoted[1:-1].decode("utf-8", "surrogateescape")
