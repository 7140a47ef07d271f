"""JSON columns hold valid JSON whatever a client sent, and valid JSON is not touched."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard_proxy.export.jsontext import is_valid, json_text

KEPT = {
    "floats keep their spelling": b'{"t": 1.0, "p":1e2 , "q": -0.0}',
    "duplicate keys": b'{"a":1,"a":2}',
    "whole pair": b'"\\ud83d\\ude00"',
    "escaped backslash before u": b'"\\\\ud800"',
    "nul": b'"\\u0000"',
    "big integer": b"123456789012345678901234567890",
    "number beyond a double": b'{"a": 1e999}',
    "utf-8": '"\u00e4\u4e2d"'.encode(),
    "NaN within a string": b'"NaN Infinity"',
}
REPAIRED = {
    "nan": (b'{"a": NaN, "b":"NaN"}', '{"a": "NaN", "b":"NaN"}'),
    "infinities": (b"[Infinity,-Infinity]", '["Infinity","-Infinity"]'),
    "lone high": (b'{"a":"x\\ud800y", "t": 1.0}', '{"a":"x\\\\ud800y", "t": 1.0}'),
    "lone low": (b'"\\uDC00"', '"\\\\uDC00"'),
    "lone after a pair": (b'"\\ud83d\\ude00\\ud83d"', '"\\ud83d\\ude00\\\\ud83d"'),
    "raw bytes": (b'"a\xffb"', '"a\\\\udcffb"'),
    "raw control characters": (b'"a\nb"', '"a\\u000ab"'),
    "byte order mark": (b"\xef\xbb\xbf[1]", "[1]"),
}
INVALID = {"empty": b"", "cut": b'{"a":', "two values": b"1 2", "deep": b"[" * 200_000, "text": b"hello \xff"}


@pytest.mark.parametrize("raw", KEPT.values(), ids=KEPT)
def test_valid_json_is_kept_byte_for_byte(raw: bytes) -> None:
    assert json_text(raw) == raw.decode()
    assert json_text(msgspec.Raw(raw)) == raw.decode()


@pytest.mark.parametrize(("raw", "text"), REPAIRED.values(), ids=REPAIRED)
def test_only_the_offending_value_is_spelled_anew(raw: bytes, text: str) -> None:
    assert json_text(raw) == text
    assert is_valid(text)
    json.loads(text)


@pytest.mark.parametrize("raw", INVALID.values(), ids=INVALID)
def test_what_cannot_be_read_is_kept_as_text(raw: bytes) -> None:
    kept = json.loads(json_text(raw))["_invalid"]
    assert kept == raw.decode("utf-8", "backslashreplace").replace("\\xff", "\\udcff")


@given(st.binary(max_size=40))
def test_any_bytes_become_valid_json(raw: bytes) -> None:
    assert is_valid(json_text(raw))


@given(st.text(alphabet='"\\ud8C0NaInfity-{}[]:,1. e\n', max_size=30))
def test_near_json_becomes_valid_json(text: str) -> None:
    assert is_valid(json_text(text.encode()))


@pytest.mark.parametrize("text", ["NaN", '"\\ud800"', "", "[1,]", '"\ud800"'])
def test_is_valid_refuses(text: str) -> None:
    assert not is_valid(text)
