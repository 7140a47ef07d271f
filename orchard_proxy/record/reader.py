"""Read the journal, from any position, also while it is being written.

Nothing here changes a file. Invariants: a frame is yielded only when its crc holds; an incomplete last frame ends the
iteration and will be read by the next one; damage with a good frame behind it is skipped and reported, never taken
for the end. Files are read with `pread`, not mapped: a writer that cuts a failed write back would turn a mapping
into SIGBUS.
"""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from orchard_proxy.errors import JournalDamagedError
from orchard_proxy.record.segments import (
    CRC,
    CRC_BYTES,
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    FRAME_OVERHEAD_BYTES,
    FRAME_TYPES,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Position,
    SegmentHeader,
    decode_header,
    list_segments,
)
from orchard_proxy.schema.frames import FrameType

logger = logging.getLogger(__name__)

WINDOW_BYTES = 1 << 20
SMALL_FRAME_BYTES = 1 << 16
"""Below this a candidate is simply checked; above it, first whether something like a frame follows."""

_PLAUSIBLE_HEAD = re.compile(rb"(?s)(?=...[\x00-\x40][\x01-\x09])")
"""Length below 1 GiB + 1, then a known type. Text has neither, so a search skips it at the speed of the regex."""


class Read(NamedTuple):
    """One frame as read. `next_offset` is where to go on."""

    kind: FrameType
    call_id: bytes
    payload: bytes
    next_offset: int


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes [start, end) of a segment that hold no good frame, with a good one behind them."""

    path: Path
    start: int
    end: int
    call_id: bytes | None = None
    """Whose frame it was, where it is one frame whose length is still right; None: nobody can say."""


def read_header(path: Path) -> SegmentHeader | None:
    """Return a segment's header; None when it is not (yet) whole. Raise JournalDamagedError when it is garbage."""
    with path.open("rb") as file:
        return decode_header(file.read(HEADER_BYTES), path)


def is_torn(path: Path, offset: int) -> bool:
    """Say whether the bytes from `offset` to the end look like a write that was stopped: half a frame, or zeros.

    Else they are a whole frame, or more, whose crc does not hold.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - CRC_BYTES))
        last = file.read()
        file.seek(offset)
        head = file.read(FRAME_HEAD_BYTES)
    if len(head) < FRAME_HEAD_BYTES or not any(last):
        return True
    return bool(offset + FRAME_HEAD.unpack(head)[0] + FRAME_OVERHEAD_BYTES > size)


def read_frames(
    path: Path,
    offset: int = 0,
    *,
    kinds: Collection[FrameType] | None = None,
    on_damage: Callable[[Damage], None] | None = None,
) -> Iterator[Read]:
    """Yield the frames of one segment from `offset` (0, or the `next_offset` of a frame) to the last whole one.

    With `kinds`, the other frames are hopped over by their length, which is much faster for long streams.
    Raise JournalDamagedError when the file does not begin like a segment, OSError when it cannot be read.
    """
    header = read_header(path)
    if header is None:
        return
    with path.open("rb", buffering=0) as file:
        scan = _Scan(path, file.fileno(), header.seed, on_damage)
        yield from scan.frames(max(offset, HEADER_BYTES), kinds)


def read_journal(data_dir: Path, after: dict[str, Position] | None = None) -> Iterator[tuple[Read, Position]]:
    """Yield every frame behind `after` (per worker; nothing = from the start), with the position behind it.

    A segment that cannot be read at all is logged and left out.
    """
    for worker, paths in list_segments(data_dir).items():
        start = (after or {}).get(worker)
        for path in paths:
            if start is not None and Position(path.name, start.offset) < Position(start.segment, start.offset):
                continue
            offset = start.offset if start is not None and start.segment == path.name else 0
            for read in _readable(path, offset):
                yield read, Position(path.name, read.next_offset)


def end_of_journal(data_dir: Path) -> dict[str, Position]:
    """Return, per worker, the position behind the last frame that can be read now; no entry where there is none.

    It is always behind a frame, so that one who counts frames reaches it; a segment without any is passed over.
    """
    ends = {}
    for worker, paths in list_segments(data_dir).items():
        for path in reversed(paths):
            offset = max((read.next_offset for read in _readable(path, 0)), default=None)
            if offset is not None:
                ends[worker] = Position(path.name, offset)
                break
    return ends


def _readable(path: Path, offset: int) -> Iterator[Read]:
    try:
        yield from read_frames(path, offset)
    except JournalDamagedError as error:
        logger.error("%s", error)  # noqa: TRY400 - a damaged file, not a bug: the sentence says all


class _Scan:
    """A moving window over one segment."""

    def __init__(self, path: Path, fd: int, seed: int, on_damage: Callable[[Damage], None] | None) -> None:
        self._path = path
        self._fd = fd
        self._seed = seed
        self._on_damage = on_damage
        self._base = 0
        self._window = b""

    def frames(self, offset: int, kinds: Collection[FrameType] | None) -> Iterator[Read]:
        """Yield frames from `offset`; hop over those not in `kinds`."""
        trusted = check_until = offset
        while True:
            if kinds is not None and offset >= check_until and (hop := self._hop(offset, kinds)):
                offset = hop
                continue
            read = self._frame_at(offset)
            if read is not None:
                offset = trusted = read.next_offset
                if kinds is None or read.kind in kinds:
                    yield read
            elif offset >= self._size():
                return
            elif offset != trusted:
                # A length that was hopped over may be damaged: check every crc up to here.
                check_until, offset = offset, trusted
            elif (resumed := self._behind_damage(offset)) is not None:
                offset = trusted = resumed
            else:
                return

    def _hop(self, offset: int, kinds: Collection[FrameType]) -> int | None:
        at = self._load(offset, FRAME_HEAD_BYTES)
        if at is None:
            return None
        length, kind, _ = FRAME_HEAD.unpack_from(self._window, at)
        if length > MAX_PAYLOAD_BYTES or kind not in FRAME_TYPES or kind in kinds:
            return None
        return offset + int(length) + FRAME_OVERHEAD_BYTES

    def _frame_at(self, offset: int, size: int | None = None) -> Read | None:
        """Return the frame at `offset` if it lies whole below `size` and its crc holds."""
        at = self._load(offset, FRAME_HEAD_BYTES)
        if at is None:
            return None
        length, kind, call_id = FRAME_HEAD.unpack_from(self._window, at)
        if length > MAX_PAYLOAD_BYTES or kind not in FRAME_TYPES:
            return None
        total = length + FRAME_OVERHEAD_BYTES
        if size is not None and offset + total > size:
            return None
        at = self._load(offset, total)
        if at is None:
            return None
        end = at + FRAME_HEAD_BYTES + length
        if crc32(memoryview(self._window)[at:end], self._seed) != CRC.unpack_from(self._window, end)[0]:
            return None
        return Read(FRAME_TYPES[kind], call_id, self._window[at + FRAME_HEAD_BYTES : end], offset + total)

    def _load(self, offset: int, count: int) -> int | None:
        """Bring bytes [offset, offset + count) into the window; return where they begin, None when there are fewer."""
        at = offset - self._base
        if at >= 0 and at + count <= len(self._window):
            return at
        if count > WINDOW_BYTES and offset + count > self._size():
            return None  # do not allocate what a damaged length asks for
        self._base, self._window = offset, os.pread(self._fd, max(count, WINDOW_BYTES), offset)
        return 0 if len(self._window) >= count else None

    def _size(self) -> int:
        return os.fstat(self._fd).st_size

    def _forget(self) -> None:
        self._window = b""

    def _behind_damage(self, offset: int) -> int | None:
        """Return where to go on behind what cannot be read at `offset`; None when no good frame follows.

        A live writer may have completed, or cut back and rewritten, the frame since it was read: so it is read afresh
        before the search, only bytes that were there then are searched, and it is read once more after a find.
        """
        self._forget()
        size = self._size()
        if self._frame_at(offset, size) is not None:
            return offset
        found = self._next_good(offset, size)
        if found is None:
            return None
        self._forget()
        if self._frame_at(offset) is not None:
            return offset
        damage = Damage(path=self._path, start=offset, end=found, call_id=self._owner(offset, found))
        logger.warning("%s: bytes %d to %d are damaged and were skipped", self._path, offset, found)
        if self._on_damage is not None:
            self._on_damage(damage)
        return found

    def _owner(self, start: int, end: int) -> bytes | None:
        """Return the call id of the one frame that these bytes were; None when they are not just one."""
        head = os.pread(self._fd, FRAME_HEAD_BYTES, start)
        if len(head) < FRAME_HEAD_BYTES:
            return None
        length, _, call_id = FRAME_HEAD.unpack(head)
        return bytes(call_id) if start + length + FRAME_OVERHEAD_BYTES == end else None

    def _next_good(self, offset: int, size: int) -> int | None:
        at = self._load(offset, FRAME_HEAD_BYTES)
        if at is not None:
            by_length = offset + FRAME_HEAD.unpack_from(self._window, at)[0] + FRAME_OVERHEAD_BYTES
            if self._frame_at(by_length, size) is not None:
                return int(by_length)
        return next((at for at in self._candidates(offset + 1, size) if self._frame_at(at, size) is not None), None)

    def _candidates(self, offset: int, size: int) -> Iterator[int]:
        """Yield offsets whose bytes could be the head of a frame that ends below `size`."""
        while offset < size:
            block = os.pread(self._fd, min(WINDOW_BYTES, size - offset), offset)
            for match in _PLAUSIBLE_HEAD.finditer(block):
                at = offset + match.start()
                end = at + int.from_bytes(block[match.start() : match.start() + 4], "little") + FRAME_OVERHEAD_BYTES
                if end <= size and (end - at <= SMALL_FRAME_BYTES or self._head_or_end(end, size)):
                    yield at
            if len(block) <= FRAME_HEAD_BYTES:
                return
            offset += len(block) - FRAME_HEAD_BYTES

    def _head_or_end(self, offset: int, size: int) -> bool:
        """Say whether a frame, zeros or the end are at `offset`: a cheap test before the crc of a long candidate."""
        head = os.pread(self._fd, min(5, size - offset), offset)
        return len(head) < 5 or not any(head) or _PLAUSIBLE_HEAD.match(head) is not None
