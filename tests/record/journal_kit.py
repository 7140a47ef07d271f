"""Frames and journals for the tests of tests/record. No fakes: everything is written by the real journal."""

import contextlib
from pathlib import Path

from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import Read, read_frames
from orchard_proxy.record.recorder import CallRecorder, Recorder
from orchard_proxy.record.segments import Frame, encode_frame, list_segments
from orchard_proxy.schema.enums import Outcome
from orchard_proxy.schema.frames import BeginFrame, EditFrame, EndFrame, FrameType, RolloutFrame

EDIT = EditFrame(engine="vllm", engine_url="http://127.0.0.1:1", edits=[], upstream_stream=True)
END = EndFrame(outcome=Outcome.COMPLETE, ended_us=2)


def begin_frame(rollout_id="r", seq=0, body=b"{}"):
    return BeginFrame(
        rollout_id=rollout_id,
        seq=seq,
        begun_us=1,
        dialect="chat",
        path="/v1/chat/completions",
        headers={"content-type": "application/json"},
        body=body,
    )


def rollout_frame(rollout_id="r", **fields):
    return RolloutFrame(rollout_id=rollout_id, created_us=1, **fields)


def begin(recorder: Recorder, *, seq=0, body=b"{}", rollout_id="r") -> CallRecorder:
    return recorder.begin(begin_frame(rollout_id, seq, body), EDIT)


def chunk(call_id: bytes, data: bytes) -> Frame:
    return encode_frame(FrameType.CHUNK, call_id, bytes(8) + data)


def end(call_id: bytes) -> Frame:
    return encode_frame(FrameType.END, call_id, END)


def call_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def segments(data_dir: Path, worker="w0") -> list[Path]:
    return list_segments(data_dir).get(worker, [])


def frames_of(data_dir: Path) -> list[Read]:
    return [read for path in segments(data_dir) for read in read_frames(path)]


def ended_calls(data_dir: Path) -> list[str]:
    return [read.call_id.hex() for read in frames_of(data_dir) if read.kind is FrameType.END]


async def write_calls(data_dir: Path, payloads: list[bytes], **options) -> list[Read]:
    """Write one call per payload (CHUNK, END) in one segment; return what a reader sees."""
    async with Journal.open(data_dir, **options) as journal:
        for number, data in enumerate(payloads):
            await journal.commit([chunk(call_id(number), data), end(call_id(number))])
    return frames_of(data_dir)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    value = path.read_bytes()[offset]
    overwrite(path, offset, bytes([value ^ 0xFF]))


def open_files(folder: Path) -> set[str]:
    """Return the names of the files below `folder` that this process holds open."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(fd.readlink())
    return {link.name for link in links if link.is_relative_to(folder)}
