"""Editing JSON by bytes: two ways with one result, no value re-spelled, nothing crashes."""

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from orchard_proxy.wire import jsonbytes as jb

REMOVE: dict[str, jb.Change] = {"b": None}
REPLACE: dict[str, jb.Change] = {"b": b"[0]"}


@pytest.mark.parametrize(
    ("body", "removed", "replaced", "set_"),
    [
        (b'{"a":1,"b":2,"c":3}', b'{"a":1,"c":3}', b'{"a":1,"b":[0],"c":3}', b'{"a":1,"b":[0],"c":3}'),
        (b'{"b":2}', b"{}", b'{"b":[0]}', b'{"b":[0]}'),
        (b"{}", b"{}", b"{}", b'{"b":[0]}'),
        (b"{ }", b"{ }", b"{ }", b'{ "b":[0]}'),
        (b'{ "b" : 2 , "a" : 1 }', b'{ "a" : 1 }', b'{ "b" : [0] , "a" : 1 }', b'{ "b" : [0] , "a" : 1 }'),
        (b'{"a": 1, "b": 2}', b'{"a": 1}', b'{"a": 1, "b": [0]}', b'{"a": 1, "b": [0]}'),
        (b'{\n  "a": 1\n}\n', b'{\n  "a": 1\n}\n', b'{\n  "a": 1\n}\n', b'{\n  "a": 1,"b":[0]\n}\n'),
        (b'{"b":1,"b":12,"a":1}', b'{"a":1}', b'{"b":[0],"b":[0],"a":1}', b'{"b":[0],"b":[0],"a":1}'),
        (b'{"b":12,"b":1}', b"{}", b'{"b":[0],"b":[0]}', b'{"b":[0],"b":[0]}'),
        (b'{"\\u0062":2}', b"{}", b'{"\\u0062":[0]}', b'{"\\u0062":[0]}'),
        (b'{"a":NaN,"b":-Infinity}', b'{"a":NaN}', b'{"a":NaN,"b":[0]}', b'{"a":NaN,"b":[0]}'),
        (b'{"a":"\xff","b":1}', b'{"a":"\xff"}', b'{"a":"\xff","b":[0]}', b'{"a":"\xff","b":[0]}'),
        (b'{"\xff":1,"b":1}', b'{"\xff":1}', b'{"\xff":1,"b":[0]}', b'{"\xff":1,"b":[0]}'),
        (b'{"\\ud800":1,"b":1}', b'{"\\ud800":1}', b'{"\\ud800":1,"b":[0]}', b'{"\\ud800":1,"b":[0]}'),
        (b'{"a":"\\"b\\":3,","b":"x\\\\"}', b'{"a":"\\"b\\":3,"}', None, None),
        (b'{"a":{"b":1},"b":{"b":"}"}}', b'{"a":{"b":1}}', b'{"a":{"b":1},"b":[0]}', None),
        (b'\xef\xbb\xbf{"b":1,"a":2}', b'\xef\xbb\xbf{"a":2}', None, None),
        (b'{"a":0.000071,"c":-2.02e-6,"b":1}', b'{"a":0.000071,"c":-2.02e-6}', None, None),
        (b'{"a":1E400,"c":123456789012345678901234567890,"b":1}', None, None, None),
        (b'{"a":"tab\there","b":1}', b'{"a":"tab\there"}', None, None),
    ],
)
def test_edits(body: bytes, removed: bytes | None, replaced: bytes | None, set_: bytes | None) -> None:
    if removed is not None:
        assert jb.edit(body, REMOVE) == removed
        assert jb.set_members(body, {"b": None}) == removed
    if replaced is not None:
        assert jb.edit(body, REPLACE) == replaced
    if set_ is not None:
        assert jb.set_members(body, {"b": b"[0]"}) == set_
    assert jb.edit(body, {"not there": None}) == body


BROKEN = [
    b"",
    b" ",
    b"{",
    b'{"b"',
    b'{"b":',
    b'{"b":1',
    b'{"b":1,',
    b'{"b":1,}',
    b'{"b":1}x',
    b'{"b":"',
    b'{"b":"\\"}',
    b'{"b":[1}',
    b"{b:1}",
    b'{"b" 1}',
    b'{"b":1 "a":2}',
    b'{"b":}',
    b'{,"b":1}',
    b"[]",
    b"[1",
    b'["b"]',
    b'"b"',
    b"null",
    b"<html>",
    b"\xff\xfe{\x00",
    b'{"a":1}{"b":1}',
]


@pytest.mark.parametrize("body", BROKEN)
def test_what_is_no_object_stays(body: bytes) -> None:
    assert jb.edit(body, REPLACE, {"c": b"1"}) == body
    assert jb.members(body) is None


@pytest.mark.parametrize("length", range(len(b'{"a":[{"b":"\\u00e9"}],"b":NaN}')))
def test_truncated_objects_stay(length: int) -> None:
    body = b'{"a":[{"b":"\\u00e9"}],"b":NaN}'[:length]
    assert jb.edit(body, REPLACE) == body


names = st.sampled_from(["a", "b", "c", "é", "\u2028", '"', "\\", "", "choices", "\x7f", "/"])
numbers = st.sampled_from(["0", "-1", "0.000071", "-2.02e-6", "1E5", "12345678901234567890123", "1", "12"])
texts = st.text(st.characters(codec="utf-8"), max_size=6).map(json.dumps)
raw_texts = st.text(st.characters(codec="utf-8", min_codepoint=0x20, exclude_characters='"\\'), max_size=6)
space = st.sampled_from(["", "", "", " ", "\n", "\t \r\n"])


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def padded(parts: list[tuple[str, str, str]], ends: str) -> str:
        return ends[0] + ",".join(a + value + b for a, value, b in parts) + ends[1]

    arrays = st.lists(st.tuples(space, inner, space), max_size=3).map(lambda parts: padded(parts, "[]"))
    return st.one_of(arrays, objects_of(inner, space))


def objects_of(inner: st.SearchStrategy[str], gap: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    keys = st.one_of(names.map(json.dumps), names.map(lambda name: json.dumps(name, ensure_ascii=False)))
    member = st.tuples(gap, keys, gap, gap, inner, gap).map(lambda m: f"{m[0]}{m[1]}{m[2]}:{m[3]}{m[4]}{m[5]}")
    return st.lists(member, max_size=5).map(lambda members: "{" + ",".join(members) + "}")


scalars = st.one_of(numbers, texts, raw_texts.map(lambda t: f'"{t}"'), st.sampled_from(["true", "false", "null"]))
values = st.recursive(scalars, compound, max_leaves=6)
objects = st.one_of(objects_of(values, space), objects_of(values, st.just("")))
changes = st.dictionaries(names, st.sampled_from([None, b"null", b"[1, 2]", b'"x"']), max_size=4)
additions = st.dictionaries(names, st.sampled_from([b"true", b"{}"]), max_size=2)


def model(pairs: list[tuple[str, Any]], edits: dict[str, Any], add: dict[str, Any]) -> list[tuple[str, Any]]:
    """Say what an edit means on the parsed members, duplicates and order kept."""
    every = {**edits, **add}
    out = [(k, every.get(k, v)) for k, v in pairs if not (k in every and every[k] is None)]
    present = {k for k, _ in pairs}
    return out + [(k, v) for k, v in add.items() if k not in present]


def pairs_of(text: bytes) -> list[tuple[str, Any]]:
    keep = json.JSONDecoder(object_pairs_hook=lambda pairs: ("object", pairs), parse_float=str, parse_int=str)
    kind, pairs = keep.decode(text.decode())
    assert kind == "object"
    return pairs


@given(objects, changes, additions)
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_both_ways_agree_with_the_meaning(text: str, edits: dict[str, Any], add: dict[str, bytes]) -> None:
    body = text.encode()
    edited = jb.edit(body, edits, add)
    scanned = jb._edit_spans(body, {**edits, **add}, add, None)
    assert edited == scanned

    def parsed(raw: bytes | None) -> Any:
        return None if raw is None else pairs_of(b'{"v":' + raw + b"}")[0][1]

    marks = {k: ("null",) if v == b"null" else parsed(v) for k, v in edits.items()}
    expected = model(pairs_of(body), marks, {k: parsed(v) for k, v in add.items()})
    assert pairs_of(edited) == [(k, None if v == ("null",) else v) for k, v in expected]


@given(objects)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_values_are_found_as_spelled(text: str) -> None:
    body = text.encode()
    spans = jb._spans(body, b"{")
    found = jb.members(body)
    assert spans is not None
    assert found is not None
    assert {k: bytes(v) for k, v in found.items()} == {s.key: body[s.value : s.end] for s in spans}
    for raw in found.values():
        bytes(raw).decode()
        json.loads(bytes(raw))


@given(st.binary(max_size=40).map(lambda noise: b'{"b":' + noise + b"}"))
@settings(deadline=None, max_examples=300)
def test_noise_never_raises(body: bytes) -> None:
    jb.edit(body, REPLACE, {"c": b"1"})
    jb.edit_each(body, REMOVE)
    jb.edit_each(b"[" + body + b"]", REMOVE)
    jb.members(body)
    jb.elements(body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"choices":[{"b":1,"x":{"b":1}},{"b":2}],"b":3}', b'{"choices":[{"x":{"b":1}},{}],"b":3}'),
        (b'{"choices": [ {"b": 1, "a": 1.50} , {"b":2} ] }', b'{"choices": [ {"a": 1.50} , {} ] }'),
        (b'{"choices":[{"b":NaN,"a":1},{"b":1}]}', b'{"choices":[{"a":1},{}]}'),
        (b'{"choices":[1,{"b":1},null,[{"b":1}]]}', b'{"choices":[1,{},null,[{"b":1}]]}'),
        (b'{"choices":{"b":1}}', b'{"choices":{}}'),
        (b'{"choices":null}', b'{"choices":null}'),
        (b'{"choices":[]}', b'{"choices":[]}'),
        (b'{"choices":[{"b":1}],"choices":[{"b":1,"c":1}]}', b'{"choices":[{}],"choices":[{"c":1}]}'),
    ],
)
def test_each(body: bytes, expected: bytes) -> None:
    assert jb.edit(body, {"choices": jb.each(REMOVE)}) == expected


def test_a_function_sees_the_value_as_spelled() -> None:
    seen: list[bytes] = []

    def note(raw: bytes) -> bytes:
        seen.append(raw)
        return raw

    assert jb.edit(b'{"b":0.10}', {"b": note}) == b'{"b":0.10}'
    assert jb.edit(b'{"b" : [1, 2] }', {"b": note}) == b'{"b" : [1, 2] }'
    assert seen == [b"0.10", b"[1, 2]"]


@pytest.mark.parametrize("depth", [500, 5_000, 200_000])
def test_deep_nesting(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    assert jb.edit(b'{"a":' + deep + b',"b":1}', REMOVE) == b'{"a":' + deep + b"}"
    found = jb.members(b'{"a":' + deep + b"}")
    assert found is not None
    assert bytes(found["a"]) == deep


@pytest.mark.parametrize("space", [b"", b" "], ids=["compact", "spaced"])
@pytest.mark.parametrize(
    "filler",
    [b'"' + b"x" * 64_000_000 + b'"', b'"' + b"\\n" * 16_000_000 + b'"', b"[" + b"1,2," * 8_000_000 + b"3]"],
    ids=["text", "escapes", "numbers"],
)
def test_64_mb(filler: bytes, space: bytes) -> None:
    body = b'{"a":' + space + filler + b',"b":1,"n":NaN}'
    started = time.process_time()
    assert jb.edit(body, REMOVE) == b'{"a":' + space + filler + b',"n":NaN}'
    strict = body.replace(b"NaN", b"0", 1)
    assert len(jb.edit(strict, REMOVE)) == len(strict) - len(b',"b":1')
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a":[1,null]}', {"a": [1, None]}),
        (b'[Infinity,"\\ud800"]', [float("inf"), "\ud800"]),
        (b'"\xff"', "\ufffd"),
        (b"\xef\xbb\xbf1", 1),
    ],
)
def test_loads_is_lenient(data: bytes, value: Any) -> None:
    assert jb.loads(data) == value


@pytest.mark.parametrize("data", [b"", b"{", b"<html>", b"[" * 100_000, b"{}{}"])
def test_loads_refuses(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        jb.loads(data)


def test_dumps() -> None:
    assert jb.dumps({"a": "é", "b": [1.5, None]}) == '{"a":"é","b":[1.5,null]}'.encode()
    assert jb.dumps(["\ud800", float("nan")]) == b'["\\ud800",null]'
    assert jb.dumps({"r": Raw(b"0.10")}) == b'{"r":0.10}'
