"""The file format of the journal: segments, frames, positions.

This is the one place that knows the bytes. It opens no file for writing and decides nothing about damage.

A segment is a header (magic, format version, session id, time, crc) and then frames
`u32 length, u8 type, 16-byte call id, payload, u32 crc32`, little-endian, length = len(payload). The crc covers
length..payload and starts from the crc of the session id. So a frame is bound to the session that wrote it: nobody
outside knows that id, and bytes that a client sent can never pass for a frame when a reader looks for the next good
one behind damage.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple, Self
from zlib import crc32

import msgspec

from orchard_proxy.errors import JournalDamagedError, JournalError
from orchard_proxy.schema.frames import FrameType

MAGIC = b"ORCHARDJ"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sI16sQ")
HEADER_BYTES = HEADER.size + 4
FRAME_HEAD = struct.Struct("<IB16s")
FRAME_HEAD_BYTES = FRAME_HEAD.size
CRC = struct.Struct("<I")
CRC_BYTES = CRC.size
FRAME_OVERHEAD_BYTES = FRAME_HEAD_BYTES + CRC_BYTES
MAX_PAYLOAD_BYTES = 1 << 30
"""Far above any body limit; a larger length field is damage."""
CONTROL_ID = bytes(16)
"""Call id of frames that belong to no call: ROLLOUT, FINISH."""
FRAME_TYPES = {int(kind): kind for kind in FrameType}

_NAME = re.compile(r"(?P<worker>[A-Za-z0-9_]+)-(?P<number>[0-9]{6,})\.orj")
_NAME_OR_BESIDE = re.compile(_NAME.pattern + r"(\..*)?")
"""Also what lies beside a segment: `.torn`, `.sum`."""
_ENCODER = msgspec.msgpack.Encoder()


class Frame(NamedTuple):
    """One frame before it is bound to a session."""

    kind: int
    call_id: bytes
    payload: bytes


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the first bytes of a segment say."""

    version: int
    session_id: bytes
    created_us: int

    @property
    def seed(self) -> int:
        """Return the start value of every frame's crc."""
        return session_seed(self.session_id)


class Position(msgspec.Struct, frozen=True):
    """A place between two frames: a segment's file name and a byte offset. Ordered within one worker."""

    segment: str
    offset: int

    @property
    def worker(self) -> str:
        """Return the worker that wrote the segment."""
        return split_name(self.segment)[0]

    @property
    def key(self) -> tuple[str, int, int]:
        """Return what positions are ordered by; numbers, because names stop sorting after six digits."""
        return (*split_name(self.segment), self.offset)

    def __lt__(self, other: Self) -> bool:
        return self.key < other.key

    def __le__(self, other: Self) -> bool:
        return self.key <= other.key

    def __gt__(self, other: Self) -> bool:
        return self.key > other.key

    def __ge__(self, other: Self) -> bool:
        return self.key >= other.key


def session_seed(session_id: bytes) -> int:
    """Return the start value of the crc of every frame that a session writes."""
    return crc32(session_id)


def encode_frame(kind: FrameType, call_id: bytes, payload: bytes | msgspec.Struct) -> Frame:
    """Return a frame for `Journal.append` or `Journal.commit`; a struct becomes msgpack."""
    data = _ENCODER.encode(payload) if isinstance(payload, msgspec.Struct) else payload
    if len(data) > MAX_PAYLOAD_BYTES:
        raise JournalError(f"a {kind.name} frame of {len(data)} bytes is too large for the journal (limit 1 GiB)")
    if len(call_id) != 16:
        raise ValueError(f"a call id has 16 bytes, not {len(call_id)}")
    return Frame(kind, call_id, data)


def seal(frame: Frame, seed: int) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of a frame in three pieces, so that a large payload is not copied."""
    kind, call_id, payload = frame
    head = FRAME_HEAD.pack(len(payload), kind, call_id)
    return head, payload, CRC.pack(crc32(payload, crc32(head, seed)))


def encode_header(session_id: bytes, created_us: int) -> bytes:
    """Return the header of a new segment."""
    head = HEADER.pack(MAGIC, FORMAT_VERSION, session_id, created_us)
    return head + CRC.pack(crc32(head))


def decode_header(data: bytes, path: Path) -> SegmentHeader | None:
    """Return the header; None when the writer was stopped inside it.

    Raise JournalDamagedError on anything else, JournalError when a newer Orchard wrote it.
    """
    if len(data) < HEADER_BYTES:
        return None
    magic, version, session_id, created_us = HEADER.unpack_from(data)
    if magic == MAGIC and version > FORMAT_VERSION:
        raise JournalError(
            f"{path} has journal format {version}; this Orchard reads up to {FORMAT_VERSION}. Use a newer Orchard."
        )
    if magic != MAGIC or crc32(data[: HEADER.size]) != CRC.unpack_from(data, HEADER.size)[0]:
        if not any(data):
            return None  # a power cut left zeros where the header should be
        raise JournalDamagedError(
            f"{path} does not begin like a journal segment, so none of it can be read. Restore the file from a copy, "
            "or move it out of the folder to go on without it."
        )
    return SegmentHeader(version=version, session_id=session_id, created_us=created_us)


def journal_dir(data_dir: Path) -> Path:
    """Return the folder of the segments."""
    return Path(data_dir) / "journal"


def segment_name(worker: str, number: int) -> str:
    """Return the file name of a segment."""
    return f"{worker}-{number:06d}.orj"


def split_name(name: str) -> tuple[str, int]:
    """Return (worker, number) of a segment's file name. Raise ValueError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a journal segment")
    return match["worker"], int(match["number"])


def list_segments(data_dir: Path) -> dict[str, list[Path]]:
    """Return the segments of each worker, oldest first. Empty when there is no journal."""
    folder = journal_dir(data_dir)
    if not folder.is_dir():
        return {}
    found: dict[str, list[Path]] = {}
    paths = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    for path in sorted(paths, key=lambda path: split_name(path.name)):
        found.setdefault(split_name(path.name)[0], []).append(path)
    return found


def next_number(data_dir: Path, worker: str) -> int:
    """Return the number of a worker's next segment.

    Files that lie beside segments count too: when someone has deleted the segments, their numbers are not used again,
    so that a reader's position never points past new frames.
    """
    matches = (_NAME_OR_BESIDE.fullmatch(path.name) for path in journal_dir(data_dir).iterdir())
    return max((int(match["number"]) for match in matches if match and match["worker"] == worker), default=0) + 1
