"""Messages between a back end and the supervisor in its sandbox: a JSON header and raw bytes.

`u32 header length, u32 body length, header, body`, big-endian, over one stream socket. Both ends use this file. It does
no I/O: bytes in, messages out.
"""

import json
import struct
from collections.abc import Iterator

LENGTHS = struct.Struct("!II")
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_BODY_BYTES = 128 * 1024 * 1024

Header = dict[str, object]


class FrameError(Exception):
    """The other end does not speak this protocol."""


def encode(header: Header, body: bytes = b"") -> bytes:
    """Spell one message."""
    head = json.dumps(header, separators=(",", ":")).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


class Decoder:
    """Cut a byte stream into messages; what is incomplete waits for more."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Take bytes, give each message that they complete."""
        self._buffer += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> tuple[Header, bytes] | None:
        if len(self._buffer) < LENGTHS.size:
            return None
        head_bytes, body_bytes = LENGTHS.unpack_from(self._buffer)
        if head_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise FrameError(f"a message of {head_bytes} + {body_bytes} bytes")
        end = LENGTHS.size + head_bytes + body_bytes
        if len(self._buffer) < end:
            return None
        try:
            header = json.loads(self._buffer[LENGTHS.size : LENGTHS.size + head_bytes])
        except ValueError as error:
            raise FrameError("a header that is not JSON") from error
        if not isinstance(header, dict):
            raise FrameError("a header that is not an object")
        body = bytes(self._buffer[LENGTHS.size + head_bytes : end])
        del self._buffer[:end]
        return header, body
