import logging
import os

import pytest
from derive_kit import Scribe

from orchard_proxy.record.segments import HEADER_BYTES, Position
from orchard_proxy.record.tail import Step, Tail
from orchard_proxy.schema.frames import FrameType


def kinds(tail: Tail) -> list[str]:
    return [_kind(step) for step in tail.steps()]


def _kind(step: Step) -> str:
    if step.damage is not None:
        return "damage"
    return "session" if step.read is None else step.read.kind.name


def test_frames_come_once_and_in_order(tmp_path):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    assert kinds(tail) == ["session", "ROLLOUT"]
    assert kinds(tail) == []
    scribe.finish("r")
    assert kinds(tail) == ["FINISH"]
    assert tail.position == scribe.position


def test_an_empty_segment_is_a_place_too(tmp_path):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    assert kinds(tail) == ["session"]
    assert tail.position == scribe.position == Position("w0-000001.orj", HEADER_BYTES)


def test_positions_stand_around_each_frame(tmp_path):
    scribe = Scribe(tmp_path)
    before = scribe.position
    scribe.rollout("r")
    (_, step) = Tail(tmp_path, "w0", None).steps()
    assert (step.start, step.end) == (before, scribe.position)
    assert [again.end for again in Tail(tmp_path, "w0", step.start).steps()] == [step.end]


@pytest.mark.parametrize(("same", "told"), [(True, ["FINISH"]), (False, ["session", "FINISH"])], ids=["same", "new"])
def test_a_new_session_is_told_and_a_new_segment_is_not(tmp_path, same, told):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    kinds(tail)
    scribe.next_segment(2, None if same else os.urandom(16))
    scribe.finish("r")
    assert kinds(tail) == told


def test_it_goes_on_in_the_session_where_it_starts_again(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.rollout("r")
    place = scribe.position
    scribe.next_segment(2)
    scribe.finish("r")
    assert kinds(Tail(tmp_path, "w0", place)) == ["FINISH"]


def test_a_torn_end_waits_and_then_is_passed_over(tmp_path, caplog):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    whole = scribe.path.read_bytes()
    scribe.finish("r")
    torn = scribe.path.read_bytes()[:-3]
    scribe.path.write_bytes(torn)
    assert kinds(tail) == ["session", "ROLLOUT"]
    assert tail.position.offset == len(whole)
    scribe.next_segment(2, os.urandom(16))
    with caplog.at_level(logging.WARNING):
        assert kinds(tail) == ["session"]
    assert "no whole frame" in caplog.text


@pytest.mark.parametrize("written", [0, 1, HEADER_BYTES - 1])
def test_a_header_that_is_still_being_written_is_waited_for(tmp_path, written):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    kinds(tail)
    scribe.next_segment(2)
    header = scribe.path.read_bytes()
    scribe.path.write_bytes(header[:written])
    assert kinds(tail) == []
    scribe.path.write_bytes(header)
    scribe.finish("r")
    assert kinds(tail) == ["FINISH"]


@pytest.mark.parametrize("content", [b"", b"garbage" * 20], ids=["no-header", "garbage"])
def test_a_segment_without_a_header_is_passed_over_once_there_is_another(tmp_path, content, caplog):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    scribe.next_segment(2)
    scribe.path.write_bytes(content)
    scribe.next_segment(3)
    scribe.finish("r")
    assert kinds(tail) == ["session", "ROLLOUT", *(["damage"] if content else []), "FINISH"]
    assert ("does not begin like" in caplog.text) == bool(content)


def test_garbage_at_the_end_is_reported_once(tmp_path, caplog):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    scribe.next_segment(2)
    scribe.path.write_bytes(b"garbage" * 20)
    for _ in range(3):
        kinds(tail)
    assert caplog.text.count("does not begin like") == 1


def test_removed_segments_are_passed_over(tmp_path, caplog):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    scribe.rollout("r")
    kinds(tail)
    scribe.path.unlink()
    scribe.next_segment(7)
    scribe.finish("r")
    with caplog.at_level(logging.WARNING):
        assert kinds(tail) == ["FINISH"]
    assert "is gone" in caplog.text


def test_idle_never_hides_news(tmp_path):
    scribe, tail = Scribe(tmp_path), Tail(tmp_path, "w0", None)
    assert not tail.idle
    kinds(tail)
    assert tail.idle
    scribe.write(FrameType.ROLLOUT, bytes(16), b"")
    assert not tail.idle
    kinds(tail)
    assert tail.idle
    scribe.next_segment(2)
    assert not tail.idle
    kinds(tail)
    assert tail.idle
