import itertools

import pytest
from journal_kit import begin_frame, flip, rollout_frame, segments, write_calls

from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import read_header
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.record.recovery import load_rollouts, repair
from orchard_proxy.record.segments import HEADER_BYTES, encode_frame
from orchard_proxy.record.summary import RolloutState, RolloutStates, load_summary
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.frames import FinishFrame, FrameType


def _summary_path(segment):
    return segment.with_name(segment.name + ".sum")


async def _one_rollout(data_dir):
    async with Journal.open(data_dir) as journal:
        await Recorder(journal).rollout(rollout_frame("a", key_sha256="k"))
    assert repair(data_dir) == []
    (path,) = segments(data_dir)
    return path


async def test_a_checked_segment_is_not_read_again(tmp_path):
    path = await _one_rollout(tmp_path)
    expected = load_rollouts(tmp_path)
    flip(path, HEADER_BYTES + 30)
    assert load_rollouts(tmp_path) == expected
    assert repair(tmp_path) == []
    _summary_path(path).unlink()
    assert load_rollouts(tmp_path) == {}
    assert len(repair(tmp_path)) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda segment: _summary_path(segment).write_bytes(b""),
        lambda segment: _summary_path(segment).write_bytes(b"\xc1 garbage"),
        lambda segment: _summary_path(segment).write_bytes(_summary_path(segment).read_bytes()[:-3]),
        lambda segment: segment.write_bytes(segment.read_bytes() + b"longer"),
    ],
    ids=["empty", "garbage", "half", "segment changed"],
)
async def test_a_summary_that_does_not_fit_is_not_believed(tmp_path, spoil):
    path = await _one_rollout(tmp_path)
    expected = load_rollouts(tmp_path)
    assert load_summary(path, read_header(path).session_id) is not None
    spoil(path)
    assert load_summary(path, read_header(path).session_id) is None
    assert load_rollouts(tmp_path) == expected
    repair(tmp_path)
    assert load_summary(path, read_header(path).session_id) is not None


async def test_a_summary_of_another_segment_is_not_believed(tmp_path):
    path = await _one_rollout(tmp_path)
    assert load_summary(path, bytes(16)) is None


async def test_a_summary_that_cannot_be_written_is_only_logged(tmp_path, caplog):
    await write_calls(tmp_path, [b"x"])
    (path,) = segments(tmp_path)
    _summary_path(path).mkdir()
    assert repair(tmp_path) == []
    assert "the next start reads the segment again" in caplog.text


def test_states_are_the_same_in_any_order():
    frames = [
        (FrameType.ROLLOUT, rollout_frame("a", key_sha256="k", body_sha256="b")),
        (FrameType.BEGIN, begin_frame("a", seq=4)),
        (FrameType.BEGIN, begin_frame("a", seq=2)),
        (FrameType.FINISH, FinishFrame(rollout_id="a", finished_us=5, status=RolloutStatus.FAILED, version=1)),
        (FrameType.FINISH, FinishFrame(rollout_id="a", finished_us=9, status=RolloutStatus.COMPLETED, version=2)),
    ]
    for order in itertools.permutations(frames):
        states = RolloutStates()
        for kind, frame in order:
            states.add_frame(kind, encode_frame(kind, bytes(16), frame).payload)
        assert states.by_id == {
            "a": RolloutState(
                rollout_id="a",
                key_sha256="k",
                body_sha256="b",
                created_us=1,
                finished_us=5,
                finish_version=2,
                next_seq=5,
            )
        }


def test_a_frame_that_does_not_decode_is_logged_and_ignored(caplog):
    states = RolloutStates()
    states.add_frame(FrameType.ROLLOUT, b"\xc1")
    states.add_frame(FrameType.CHUNK, b"\xc1")
    assert states.by_id == {}
    assert caplog.text.count("cannot be decoded") == 1
