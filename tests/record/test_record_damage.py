"""A journal that lost bytes after they were written: what is kept, what is marked, and what everyone is told."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from derive_kit import Scribe, calls_of, contents, vllm_answer

from orchard_proxy.assemble.samples import account
from orchard_proxy.cli.main import cli
from orchard_proxy.record import deriver
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.reader import read_frames
from orchard_proxy.schema.frames import FrameType
from orchard_proxy.schema.records import Call, JournalDamage


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def damages_of(data_dir: Path) -> list[JournalDamage]:
    with Catalog.open(data_dir) as catalog:
        return catalog.damages()


def flip(scribe: Scribe, kind: FrameType, number: int = 0, *, at: int = 25) -> int:
    """Flip a bit of the payload of one frame of a kind; return where the frame lies."""
    start = 40
    frames = []
    for read in read_frames(scribe.path):
        frames += [start] if read.kind is kind else []
        start = read.next_offset
    data = bytearray(scribe.path.read_bytes())
    data[frames[number] + at] ^= 1
    scribe.path.write_bytes(data)
    return frames[number]


def told(data_dir: Path) -> Scribe:
    """Write two calls that run at once, both whole, and a third behind them."""
    scribe = Scribe(data_dir)
    scribe.rollout("r")
    first, second = scribe.begin("r"), scribe.begin("r", seq=1)
    scribe.answer(first, vllm_answer([1], [2, 3]))
    scribe.answer(second, vllm_answer([4], [5, 6]))
    scribe.end(first)
    scribe.end(second)
    scribe.call("r", [7], [8])
    scribe.finish("r")
    return scribe


def marked(calls: list[Call]) -> list[bool]:
    assert all(call.evidence_rejected for call in calls if "journal_damaged" in call.problems)
    return ["journal_damaged" in call.problems for call in calls]


@pytest.mark.parametrize(
    ("kind", "number", "at", "expected"),
    [
        pytest.param(FrameType.CHUNK, 0, 40, [True, False, False], id="chunk-of-the-first"),
        pytest.param(FrameType.CHUNK, 2, 40, [False, True, False], id="chunk-of-the-second"),
        pytest.param(FrameType.CHUNK, 0, 6, [True, True, False], id="id-damaged"),
        pytest.param(FrameType.CHUNK, 0, 1, [True, True, False], id="length-damaged"),
        pytest.param(FrameType.EDIT, 1, 25, [False, True, False], id="edit"),
        pytest.param(FrameType.ROLLOUT, 0, 25, [False, False, False], id="rollout"),
        pytest.param(FrameType.DELIVERED, 0, 25, [False, False, False], id="delivered"),
    ],
)
def test_calls_whose_frames_may_be_missing_are_marked(tmp_path, kind, number, at, expected):
    place = flip(told(tmp_path), kind, number, at=at)
    deriver.derive(tmp_path)
    calls = calls_of(tmp_path)
    assert marked(calls) == expected
    for call in calls:
        if "journal_damaged" in call.problems:
            assert (call.problems, str(call.outcome)) == (["journal_damaged"], "complete")
    assert [(one.segment, one.offset) for one in damages_of(tmp_path)] == [("w0-000001.orj", place)]


def test_what_is_left_of_a_damaged_call_is_masked_as_rejected(tmp_path):
    scribe = Scribe(tmp_path)
    one = scribe.begin("r")
    scribe.answer(one, vllm_answer([1], [2, 3]))
    scribe.answer(one, b"   ")
    scribe.end(one)
    scribe.finish("r")
    flip(scribe, FrameType.CHUNK, 2)
    deriver.derive(tmp_path)
    with Catalog.open(tmp_path) as catalog:
        assert account(catalog.rollout("r"), catalog.calls("r")).masked == {"evidence_rejected": 2}


def test_a_lost_end_is_no_fault_of_the_engine(tmp_path):
    flip(told(tmp_path), FrameType.END)
    deriver.derive(tmp_path)
    calls = {call.call_id: call for call in calls_of(tmp_path)}
    (lost,) = (call for call in calls.values() if "journal_damaged" in call.problems)
    assert (str(lost.outcome), lost.problems, len(calls)) == ("crashed", ["journal_damaged"], 3)


def test_a_damaged_last_frame_is_damage_and_no_torn_end(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2], delivered=False)
    place = flip(scribe, FrameType.END)
    size = scribe.path.stat().st_size
    for _ in range(2):
        deriver.derive(tmp_path)
        assert damages_of(tmp_path) == [JournalDamage(segment="w0-000001.orj", offset=place, bytes=size - place)]
    assert marked(calls_of(tmp_path)) == [True]


async def test_nor_is_it_cut_when_the_server_starts_again(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2], delivered=False)
    place, size = flip(scribe, FrameType.END), scribe.path.stat().st_size
    async with Journal.open(tmp_path):
        assert scribe.path.stat().st_size == size
    deriver.derive(tmp_path)
    assert damages_of(tmp_path)[0].offset == place


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_segment_without_its_header_is_damage_as_a_whole(tmp_path, number):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    early = scribe.begin("r", seq=1)
    scribe.next_segment(2)
    scribe.call("r", [3], [4])
    scribe.answer(early, vllm_answer([5], [6]))
    scribe.next_segment(3)
    scribe.end(early)
    scribe.call("r", [7], [8])
    broken = scribe.path.with_name(f"w0-00000{number}.orj")
    broken.write_bytes(b"X" + broken.read_bytes()[1:])
    deriver.derive(tmp_path)
    lost = JournalDamage(segment=broken.name, offset=0, bytes=broken.stat().st_size)
    assert damages_of(tmp_path) == [lost]
    assert [marked(calls_of(tmp_path))[-1], any(marked(calls_of(tmp_path)))] == {
        1: [False, False],
        2: [False, True],
        3: [True, True],
    }[number]


def test_however_it_is_stopped_the_damages_are_the_same(tmp_path):
    flip(told(tmp_path), FrameType.CHUNK, 1)
    deriver.derive(tmp_path)
    once = contents(tmp_path), damages_of(tmp_path)
    deriver.derive(tmp_path, rebuild=True)
    assert (contents(tmp_path), damages_of(tmp_path)) == once


def test_export_and_validate_say_it(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    place = flip(told(data), FrameType.CHUNK)
    line = f"warning: journal segment w0-000001.orj is damaged in one place: {damages_length(data)} bytes lost, "
    exported = run("export", "--data", data, "--out", out)
    assert exported.exit_code == 0
    assert [said.startswith(line) for said in exported.stderr.splitlines()] == [True]
    assert f"first at offset {place}" in exported.stderr
    kept = json.loads((out / "orchard.json").read_text())["journal_damages"]
    assert [(one["segment"], one["offset"]) for one in kept] == [("w0-000001.orj", place)]
    checked = run("validate", out)
    assert (checked.exit_code, checked.stdout.startswith(line)) == (0, True)
    assert run("derive", "--data", data).stderr.startswith(line)


def damages_length(data_dir: Path) -> int:
    deriver.derive(data_dir)
    return sum(one.bytes for one in damages_of(data_dir))
