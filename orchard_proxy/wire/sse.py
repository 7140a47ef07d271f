"""Server-sent events as bytes: cut a stream into events without losing one byte of it.

Not a client: nothing is reconnected and no event is thrown away. The invariant: the `raw` of all events, joined, is
the input, however it was chunked; lines end at LF, CRLF or CR only, so that U+2028 and its kin stay data.
"""

import re

import msgspec

DONE = b"[DONE]"

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"[\r\n]")
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")
_ANY_LINE_END = re.compile(rb"\r\n|\r|\n")


class SseEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One block of the stream, up to and with its blank line."""

    raw: bytes
    """The exact bytes, terminator included."""
    data: bytes | None = None
    """The data lines joined with LF; None when the block has no data field (a comment, a stray blank line)."""
    event: str | None = None
    """The event field; None when absent."""
    first: bool = False
    """First of its stream: a byte order mark at its head is no part of it."""

    def replaced(self, data: bytes) -> bytes:
        """Return the same event with other data; everything but the data is kept byte for byte.

        New data of several lines becomes as many data lines. An event without data is returned as it is.
        """
        if self.data is None or data == self.data:
            return self.raw
        mark, lines = _lines(self.raw, first=self.first)
        out = [mark]
        new = _ANY_LINE_END.split(data)
        for line, end in lines:
            name, value = _field(line)
            if name != b"data":
                out += (line, end)
            elif new:
                head = line[: len(line) - len(value)] if b":" in line else b"data: "
                out += ((end or b"\n").join(head + part for part in new), end)
                new = []
        return b"".join(out)


class SseParser:
    """Cut a byte stream into events, as soon as each one's blank line is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scan = 0
        """Where the search for the next line end goes on."""
        self._line = 0
        """Where the current line begins."""
        self._after_cr = False
        """The last byte seen was a CR that ended a line: an LF that follows is part of that line end."""
        self._cr_seen = False
        self._first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes; return the events that they complete."""
        if not chunk:
            return []
        self._buffer += chunk
        self._cr_seen = self._cr_seen or b"\r" in chunk
        self._swallow_lf()
        events: list[SseEvent] = []
        start = 0
        while (end := self._next_blank()) >= 0:
            events.append(self._event(bytes(self._buffer[start:end])))
            start = end
        if start:
            del self._buffer[:start]
            self._scan -= start
            self._line -= start
        return events

    def close(self) -> list[SseEvent]:
        """End the stream; return what is left as a last event, though no blank line ended it."""
        raw = bytes(self._buffer)
        self._buffer.clear()
        self._scan = self._line = 0
        self._after_cr = False
        return [self._event(raw)] if raw else []

    def _swallow_lf(self) -> None:
        if self._after_cr and self._buffer[self._scan] == 0x0A:
            self._scan += 1
            self._line = self._scan
        self._after_cr = False

    def _next_blank(self) -> int:
        """Return the offset just past the next blank line, or -1."""
        buffer = self._buffer
        while (at := self._line_end()) >= 0:
            end = at + 1
            if buffer[at] == 0x0D:
                if end == len(buffer):
                    self._after_cr = True
                elif buffer[end] == 0x0A:
                    end += 1
            blank = at == self._line or (self._first and buffer[self._line : at] == _BOM)
            self._line = self._scan = end
            if blank:
                return end
        self._scan = len(buffer)
        return -1

    def _line_end(self) -> int:
        if not self._cr_seen:
            return self._buffer.find(b"\n", self._scan)
        found = _LINE_END.search(self._buffer, self._scan)
        return found.start() if found else -1

    def _event(self, raw: bytes) -> SseEvent:
        first, self._first = self._first, False
        if raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
            return SseEvent(raw=raw, data=raw[6:-2], first=first)
        data: list[bytes] = []
        event: str | None = None
        for line, _ in _lines(raw, first=first)[1]:
            name, value = _field(line)
            if name == b"data":
                data.append(value)
            elif name == b"event":
                event = value.decode("utf-8", "replace")
        return SseEvent(raw=raw, data=b"\n".join(data) if data else None, event=event, first=first)


def encode(data: bytes) -> bytes:
    """Frame data as an event; each of its lines becomes a data line."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_ANY_LINE_END.split(data))
    return b"data: " + data + b"\n\n"


def comment(text: bytes) -> bytes:
    """Frame a comment, which every client ignores: a keep-alive."""
    return b": " + b" ".join(_ANY_LINE_END.split(text)) + b"\n\n"


def is_done(event: SseEvent) -> bool:
    """Say whether the event is the `[DONE]` that ends an OpenAI stream."""
    return event.data is not None and event.data.strip() == DONE


def _lines(raw: bytes, *, first: bool) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Split into a byte order mark (or nothing) and (line, line end) pairs; joined again they are `raw`."""
    mark = _BOM if first and raw.startswith(_BOM) else b""
    return mark, [(found[1], found[2]) for found in _LINE.finditer(raw, len(mark)) if found[0]]


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if colon and value.startswith(b" "):
        value = value[1:]
    return name, value
