"""What a command printed, in bounded memory: the head, the tail, and how much there was in all."""

_NOTE_BYTES = 64
"""The note takes the place of the first bytes of the tail."""


class Capture:
    """Keep the first and the last bytes of a stream; count the rest."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total_bytes += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Cut at twice the size, not at each chunk: each byte is then moved at most once on average.
        if len(self._tail) > 2 * self._tail_bytes:
            self._trim()

    def _trim(self) -> None:
        del self._tail[: len(self._tail) - self._tail_bytes]

    def value(self) -> bytes:
        """Give all of it, or head, a line that says how much is missing, and tail; never more than the limit."""
        if len(self._tail) > self._tail_bytes:
            self._trim()
        kept = len(self._head) + len(self._tail)
        if kept == self.total_bytes:
            return bytes(self._head + self._tail)
        if len(self._tail) <= _NOTE_BYTES:  # too small a limit for a note
            return bytes(self._head + self._tail)
        note = b"\n[%d bytes left out]\n" % (self.total_bytes - kept + _NOTE_BYTES)
        return bytes(self._head) + note.ljust(_NOTE_BYTES, b"\n") + bytes(self._tail[_NOTE_BYTES:])
