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


class SseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One block of the stream, up to and with its blank line."""

    raw: bytes
    """The exact bytes, terminator included."""
    data: bytes | None = None
    """The data lines joined with LF; None when the block has no data field (a comment, a stray blank line)."""
    event: str | None = None
    """The event field; None when absent."""

    def replaced(self, data: bytes) -> bytes:
        """Return the same event with other data; everything but the data is kept byte for byte."""
        if self.data is None:
            return self.raw
        out: list[bytes] = []
        lines = _ANY_LINE_END.split(data)
        written = False
        for prefix, line, end in _lines(self.raw):
            field, value = _field(line)
            if field != b"data":
                out.append(prefix + line + end)
            elif not written:
                written = True
                head = line[: len(line) - len(value)] or b"data: "
                if not head.endswith((b":", b": ")):
                    head = b"data: "
                out.append(prefix + (end or b"\n").join(head + part for part in lines) + end)
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
            return SseEvent(raw=raw, data=raw[6:-2])
        data: list[bytes] = []
        event: str | None = None
        for _, line, _ in _lines(raw, first=first):
            field, value = _field(line)
            if field == b"data":
                data.append(value)
            elif field == b"event":
                event = value.decode("utf-8", "replace")
        return SseEvent(raw=raw, data=b"\n".join(data) if data else None, event=event)


def encode(data: bytes) -> bytes:
    """Frame one line of data as an event."""
    return b"data: " + data + b"\n\n"


def comment(text: bytes) -> bytes:
    """Frame a comment, which every client ignores: a keep-alive."""
    return b": " + b" ".join(_ANY_LINE_END.split(text)) + b"\n\n"


def is_done(event: SseEvent) -> bool:
    """Say whether the event is the `[DONE]` that ends an OpenAI stream."""
    return event.data is not None and event.data.strip() == DONE


def _lines(raw: bytes, *, first: bool = True) -> list[tuple[bytes, bytes, bytes]]:
    """Split into (byte order mark or nothing, line, line end); joined again they are `raw`."""
    prefix = _BOM if first and raw.startswith(_BOM) else b""
    out: list[tuple[bytes, bytes, bytes]] = []
    at = len(prefix)
    while at < len(raw):
        found = _LINE.match(raw, at)
        assert found is not None
        out.append((prefix, found[1], found[2]))
        prefix = b""
        at = found.end()
    return out


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if colon and value.startswith(b" "):
        value = value[1:]
    return name, value
