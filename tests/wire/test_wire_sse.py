"""SSE framing: every byte comes out again, events come early, odd line ends are line ends and nothing else is."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.wire import sse


def parse(chunks: list[bytes]) -> list[sse.SseEvent]:
    parser = sse.SseParser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.close()


def datas(events: list[sse.SseEvent]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


CASES = {
    "lf": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "no space": (b"data:a\n\ndata:{}\n\n", [b"a", b"{}"]),
    "two spaces": (b"data:  a\n\n", [b" a"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "bare cr": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\ndata: d\n\r", [b"a", b"b", b"c", b"d"]),
    "multi-line": (b"data: {\ndata: }\n\n", [b"{\n}"]),
    "comment": (b": ping\n\ndata: a\n\n", [b"a"]),
    "comment inside": (b"data: a\n: ping\ndata: b\n\n", [b"a\nb"]),
    "other fields": (b"id: 1\nevent: x\nretry: 5\nfoo: bar\ndata: a\n\n", [b"a"]),
    "field without colon": (b"data\n\n", [b""]),
    "empty data": (b"data:\n\n", [b""]),
    "two empty data lines": (b"data\ndata\n\n", [b"\n"]),
    "no blank line at the end": (b"data: a\n\ndata: b\n", [b"a", b"b"]),
    "no line end at the end": (b"data: a\n\ndata: b", [b"a", b"b"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "byte order mark, blank line": (b"\xef\xbb\xbf\ndata: a\n\n", [b"a"]),
    "byte order mark, crlf": (b"\xef\xbb\xbfdata: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "mark in the middle is no mark": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    "blank lines": (b"\n\n\r\n\rdata: a\n\n\n\n", [b"a"]),
    "data prefix of another field": (b"database: a\n\n data: b\n\ndata : c\n\n", []),
    "colons in data": (b"data: a: b:\n\n", [b"a: b:"]),
    "unicode line ends": ("data: a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\n\n".encode(), None),
    "latin bytes": (b"data: \x85\xff\x00\n\n", [b"\x85\xff\x00"]),
    "done": (b"data: {}\n\ndata: [DONE]\n\n", [b"{}", b"[DONE]"]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_events_and_all_bytes(name: str) -> None:
    stream, expected = CASES[name]
    if expected is None:
        expected = [stream.removeprefix(b"data: ").removesuffix(b"\n\n")]
    assert datas(parse([stream])) == expected
    cuts = [(i, j) for i in range(len(stream) + 1) for j in range(i, len(stream) + 1)]
    for i, j in cuts:
        events = parse([stream[:i], stream[i:j], stream[j:]])
        assert b"".join(event.raw for event in events) == stream, (i, j)
        assert datas(events) == expected, (i, j)
    assert datas(parse([stream[i : i + 1] for i in range(len(stream))])) == expected


piece = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"data",
        b": c",
        b"event: e",
        b"id: 1",
        b"\n",
        b"\r",
        b"\r\n",
        b"x",
        b"\xe2\x80\xa8",
        b" ",
        b"\n\n",
        b"\xef\xbb\xbf",
        b"\r\n\r\n",
        b":",
        b"\x85",
    ]
)


@given(st.lists(piece, max_size=24).map(b"".join), st.lists(st.integers(0, 60), max_size=6))
@settings(deadline=None)
def test_any_stream_any_chunking(stream: bytes, cuts: list[int]) -> None:
    whole = parse([stream])
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events = parse([stream[a:b] for a, b in itertools.pairwise(bounds)])
    assert b"".join(e.raw for e in whole) == stream
    assert b"".join(e.raw for e in events) == stream
    assert [(e.data, e.event) for e in events if e.data is not None] == [
        (e.data, e.event) for e in whole if e.data is not None
    ]
    for event in whole:
        assert event.replaced(event.data or b"") == event.raw


@given(st.lists(piece, max_size=24).map(b"".join), st.sampled_from([b"new", b"", b"{}", b"a\nb", b"a\n\nb"]))
@settings(deadline=None)
def test_replaced_data_reads_back_and_keeps_the_rest(stream: bytes, new: bytes) -> None:
    for event in parse([stream]):
        edited = event.replaced(new)
        if event.data is None:
            assert edited == event.raw
            continue
        again = parse([(b"" if event.first else b"\n") + edited])
        assert [(e.data, e.event) for e in again if e.data is not None] == [(new, event.event)]


@pytest.mark.parametrize(
    ("stream", "data", "expected"),
    [
        (b"data: a\n\n", b"b", b"data: b\n\n"),
        (b"data:a\r\n\r\n", b"b", b"data:b\r\n\r\n"),
        (b"\xef\xbb\xbfevent: x\rdata: a\r: c\r\r", b"b", b"\xef\xbb\xbfevent: x\rdata: b\r: c\r\r"),
        (b"data: {\r\ndata: }\r\n\r\n", b"{}", b"data: {}\r\n\r\n"),
        (b"data: {}\r\n\r\n", b"{\n}", b"data: {\r\ndata: }\r\n\r\n"),
        (b"data: a", b"b", b"data: b"),
        (b"data: a", b"b\nc", b"data: b\ndata: c"),
        (b"data\n\n", b"b", b"data: b\n\n"),
        (b": ping\n\n", b"b", b": ping\n\n"),
    ],
)
def test_replaced(stream: bytes, data: bytes, expected: bytes) -> None:
    (event,) = parse([stream])
    assert event.replaced(data) == expected


def test_an_event_comes_as_soon_as_its_blank_line_is_complete() -> None:
    parser = sse.SseParser()
    assert [e.raw for e in parser.feed(b"data: a\n\n")] == [b"data: a\n\n"]
    assert [e.raw for e in parser.feed(b"data: b\r\r")] == [b"data: b\r\r"]
    assert [e.raw for e in parser.feed(b"data: c\r\n\r")] == [b"data: c\r\n\r"]
    assert [e.raw for e in parser.feed(b"\ndata: d\n\n")] == [b"\ndata: d\n\n"]
    assert parser.close() == []


def test_event_and_done() -> None:
    events = parse([b"event: error\ndata: x\n\ndata: [DONE] \n\ndata:[DONE]\n\n: [DONE]\n\n"])
    assert [e.event for e in events] == ["error", None, None, None]
    assert [sse.is_done(e) for e in events] == [False, True, True, False]


@pytest.mark.parametrize("text", [b"keep-alive", b"a\nb\r\n\r\nc", b""])
def test_comment_is_never_data(text: bytes) -> None:
    assert [e.data for e in parse([sse.comment(text)])] == [None]


@pytest.mark.parametrize("data", [b"{}", b"", b"a\nb", b"a\r\nb\rc"])
def test_encode_reads_back(data: bytes) -> None:
    assert datas(parse([sse.encode(data)])) == [data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_cost_is_linear(line_end: bytes) -> None:
    stream = b"data: " + b"x" * 200_000 + line_end * 2 + (b"data: y" + line_end) * 20_000 + line_end
    started = time.process_time()
    events = parse([stream[i : i + 1] for i in range(len(stream))])
    assert datas(events)[0] == b"x" * 200_000
    assert time.process_time() - started < 5


@pytest.mark.parametrize("step", [100, 65_536, 1 << 30])
def test_a_huge_event(step: int) -> None:
    stream = b"data: " + b"x" * 10_000_000 + b"\r\n\r\n"
    started = time.process_time()
    (event,) = parse([stream[i : i + step] for i in range(0, len(stream), step)])
    assert event.raw == stream
    assert time.process_time() - started < 5
