import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from derive_kit import Scribe, calls_of, contents, request_body, vllm_answer

from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.assemble.samples import build
from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.record import deriver, lock
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.derivation import Derivation
from orchard_proxy.record.reader import end_of_journal
from orchard_proxy.schema.enums import Blame, Outcome, Phase, RolloutStatus
from orchard_proxy.schema.frames import FrameType
from orchard_proxy.schema.packed import unpack_floats, unpack_ids
from orchard_proxy.schema.records import Failure, Rollout


def rollout_of(data_dir: Path, rollout_id: str = "r") -> Rollout:
    with Catalog.open(data_dir) as catalog:
        found = catalog.rollout(rollout_id)
    assert found is not None
    return found


def deliveries(data_dir: Path) -> list[str]:
    return [str(call.delivery) for call in calls_of(data_dir)]


def test_a_call_is_read_whole(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.rollout("r", group_id="g")
    body = request_body("hello\u2028", tools=[{"type": "function"}], stream=False)
    scribe.call("r", [11, 12], [13, 14], body=body)
    deriver.derive(tmp_path)
    (call,) = calls_of(tmp_path)
    (choice,) = call.choices
    assert (unpack_ids(choice.token_ids), unpack_floats(choice.logprobs)) == ([13, 14], [-0.25, -0.25])
    assert unpack_ids(call.prompt.new_ids) == [11, 12]
    assert (call.model, call.engine, call.http_status, call.outcome) == ("m", "vllm", 200, "complete")
    assert json.loads(bytes(call.messages)) == [{"role": "user", "content": "hello\u2028"}]
    assert json.loads(bytes(call.tools)) == [{"type": "function"}]
    assert json.loads(bytes(call.sampling)) == {"temperature": 0.7}
    assert json.loads(bytes(choice.message))["content"] == "said [13, 14]"
    assert (call.ttft_s, call.duration_s) == (0.002, 0.004)
    assert rollout_of(tmp_path).group_id == "g"


def test_turns_become_one_sample(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.rollout("r")
    scribe.call("r", [1, 2], [3])
    scribe.call("r", [1, 2, 3, 4], [5], [6])
    scribe.finish("r", reward=0.5)
    deriver.derive(tmp_path)
    samples, accounting = build(rollout_of(tmp_path), calls_of(tmp_path))
    assert [(str(sample.branch_reason), unpack_ids(sample.token_ids)) for sample in samples] == [
        ("main", [1, 2, 3, 4, 5]),
        ("choice", [1, 2, 3, 4, 6]),
    ]
    assert accounting.line() == "sampled 3 = trained 3"
    with Catalog.open(tmp_path) as catalog:
        assert catalog.totals("r") == (2, 3)


def test_a_long_chain_is_stored_once(tmp_path):
    scribe, prompt, texts = Scribe(tmp_path), list(range(1, 300)), ["x" * 500]
    for turn in range(100):
        scribe.call("r", prompt, [turn + 1] * 10, body=request_body(*texts))
        prompt = [*prompt, *[turn + 1] * 10, 7, 8]
        texts.append(f"turn {turn} " * 5)
    deriver.derive(tmp_path)
    calls = calls_of(tmp_path)
    assert unpack_ids(PromptResolver(calls).prompt_ids(calls[-1])) == prompt[:-12]
    assert len(json.loads(bytes(calls[-1].messages))) == 100
    assert sum(len(call.prompt.new_ids) // 4 + 10 for call in calls) <= 1.2 * len(prompt)
    with Catalog.open(tmp_path) as catalog, catalog._engine.connect() as connection:
        stored = connection.exec_driver_sql("select sum(length(record)) from calls").scalar()
    assert stored < 100 * 2_000


@pytest.mark.parametrize("spelling", [b"null", b'""'], ids=["null", "empty"])
def test_however_the_history_spells_an_empty_answer_the_turn_is_the_same(tmp_path, spelling):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1, 2], [3])
    history = (
        b'{"messages":[{"role":"user"},{"role":"assistant","content":' + spelling + b',"tool_calls":[{"id":"t"}]}]}'
    )
    scribe.call("r", [1, 2, 3, 4], [5], body=history)
    deriver.derive(tmp_path)
    (sample,), _ = build(rollout_of(tmp_path), calls_of(tmp_path))
    assert unpack_ids(sample.token_ids) == [1, 2, 3, 4, 5]
    assert spelling in bytes(sample.messages)


def test_a_retry_after_a_cut_answer_leaves_one_clean_row(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    scribe.call("r", [1, 2, 3], [4, 5], outcome=Outcome.UPSTREAM_CUT, delivered=False)
    scribe.call("r", [1, 2, 3], [4, 5, 6])
    scribe.finish("r", reward=1.0)
    deriver.derive(tmp_path)
    (sample,), accounting = build(rollout_of(tmp_path), calls_of(tmp_path))
    assert (unpack_ids(sample.token_ids), list(sample.loss_mask)) == ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 1, 1])
    assert accounting.line() == "sampled 6 = trained 4 + 2 upstream_cut"


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        pytest.param(lambda s: s.call("r", [1], [2], delivered=False), ["uncertain"], id="crash-before-delivery"),
        pytest.param(lambda s: s.call("r", [1], [2]), ["confirmed"], id="the-kernel-took-it"),
        pytest.param(
            lambda s: (s.call("r", [1], [2], delivered=False), s.call("r", [1, 2, 3], [4], delivered=False)),
            ["confirmed", "uncertain"],
            id="a-later-call-extends-it",
        ),
        pytest.param(
            lambda s: (s.call("r", [1], [2], delivered=False), s.call("r", [1, 9, 3], [4], delivered=False)),
            ["uncertain", "uncertain"],
            id="a-later-call-does-not-extend-it",
        ),
        pytest.param(
            lambda s: (s.call("r", [1], [2], delivered=False), s.finish("r")), ["confirmed"], id="the-runner-finished"
        ),
        pytest.param(
            lambda s: (s.call("r", [1], [2], delivered=False), s.call("x", [1], [2]), s.finish("x")),
            ["uncertain"],
            id="another-rollout-finished",
        ),
        pytest.param(
            lambda s: (s.finish("r"), s.call("r", [1], [2], delivered=False, late=True)), ["uncertain"], id="late"
        ),
        pytest.param(
            lambda s: (
                s.call("r", [1], [2], delivered=False, outcome=Outcome.CLIENT_GONE),
                s.call("r", [1, 2, 3], [4]),
                s.finish("r"),
            ),
            ["none", "confirmed"],
            id="client-gone-stays-none",
        ),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["in-one-batch", "frame-by-frame"])
def test_delivery_follows_the_evidence(tmp_path, story, expected, one_by_one):
    scribe = WatchedScribe(tmp_path) if one_by_one else Scribe(tmp_path)
    scribe.rollout("r")
    story(scribe)
    deriver.derive(tmp_path)
    assert deliveries(tmp_path) == expected


class WatchedScribe(Scribe):
    """Derives behind every frame, as if the deriver were always caught up."""

    def write(self, kind, call_id, payload):
        super().write(kind, call_id, payload)
        if not hasattr(self, "derivation"):
            self.derivation = Derivation(self.data_dir, Catalog.open(self.data_dir))
        self.derivation.step()


def test_rewards_are_versioned_and_the_last_writer_wins(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.rollout("r", metadata=b'{"a":1,"b":1.50}')
    scribe.finish("r", reward=0.0, rewards={"style": 1.0, "tests": 0.0}, metadata=b'{"a":2}')
    first_us = scribe.now_us
    scribe.finish("r", reward=1.0, rewards={"tests": 1.0}, version=2)
    scribe.finish("r", version=3)
    deriver.derive(tmp_path)
    rollout = rollout_of(tmp_path)
    assert (rollout.reward, rollout.reward_version, rollout.finished_us) == (1.0, 3, first_us)
    assert [(entry.name, entry.value, entry.version) for entry in rollout.rewards] == [
        ("style", 1.0, 1),
        ("tests", 1.0, 2),
    ]
    assert bytes(rollout.metadata) == b'{"a":2,"b":1.50}'


def test_a_failure_reaches_the_rollout_and_masks_its_tokens(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.rollout("r")
    scribe.call("r", [1], [2, 3])
    failure = Failure(code="node_lost", blame=Blame.INFRA, phase=Phase.RUN, retryable=True)
    scribe.finish("r", status=RolloutStatus.FAILED, failure=failure)
    deriver.derive(tmp_path)
    rollout = rollout_of(tmp_path)
    assert (rollout.status, rollout.failure) == ("failed", failure)
    assert build(rollout, calls_of(tmp_path))[1].masked == {"infra": 2}


def test_a_call_without_an_end_is_crashed_once_nobody_can_end_it(tmp_path):
    scribe = Scribe(tmp_path)
    call_id = scribe.begin("r")
    scribe.answer(call_id, vllm_answer([1], [2, 3]))
    deriver.derive(tmp_path)
    (call,) = calls_of(tmp_path)
    assert (call.outcome, call.delivery, unpack_ids(call.choices[0].token_ids)) == ("crashed", "none", [2, 3])
    assert build(rollout_of(tmp_path), [call])[1].masked == {"crashed": 2}


def test_a_call_of_a_server_that_runs_stays_open(tmp_path):
    scribe = Scribe(tmp_path)
    call_id = scribe.begin("r")
    fd = lock.acquire(tmp_path, scribe.session)
    try:
        deriver.derive(tmp_path)
        assert calls_of(tmp_path) == []
        scribe.answer(call_id, vllm_answer([1], [2]))
        scribe.end(call_id)
        deriver.derive(tmp_path)
        assert [str(call.outcome) for call in calls_of(tmp_path)] == ["complete"]
    finally:
        os.close(fd)


def test_a_new_session_closes_the_calls_of_the_one_before(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin("r")
    scribe.next_segment(2, os.urandom(16))
    scribe.call("r", [1], [2])
    fd = lock.acquire(tmp_path, scribe.session)
    try:
        deriver.derive(tmp_path)
    finally:
        os.close(fd)
    assert [(str(call.outcome), call.commit_seq) for call in calls_of(tmp_path)] == [("crashed", 0), ("complete", 1)]


def test_a_call_may_begin_in_one_segment_and_end_in_the_next(tmp_path):
    scribe = Scribe(tmp_path)
    call_id = scribe.begin("r")
    scribe.next_segment(2)
    scribe.answer(call_id, vllm_answer([1], [2]))
    scribe.next_segment(3)
    scribe.end(call_id)
    deriver.derive(tmp_path)
    assert [str(call.outcome) for call in calls_of(tmp_path)] == ["complete"]


def test_a_second_end_means_that_the_first_was_withheld(tmp_path):
    scribe = Scribe(tmp_path)
    call_id = scribe.begin("r")
    scribe.answer(call_id, vllm_answer([1], [2]))
    scribe.end(call_id)
    together = tmp_path / "together"
    later = WatchedScribe(together)
    for one in (scribe, later):
        if one is later:
            call_id = one.begin("r")
            one.answer(call_id, vllm_answer([1], [2]))
            one.end(call_id)
        one.end(call_id, Outcome.CRASHED)
    for data_dir in (tmp_path, together):
        deriver.derive(data_dir)
        (call,) = calls_of(data_dir)
        assert (call.outcome, call.delivery) == ("crashed", "none")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>", id="html"),
        pytest.param(b'{"choices":3}', id="odd-types"),
        pytest.param(b'{"choices":[{"index":0,"token_ids":[0]},{"index":0,"token_ids":[1]}]}', id="same-index"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_garbage_is_kept_as_a_call(tmp_path, answer):
    scribe = Scribe(tmp_path)
    call_id = scribe.begin("r", b"\xff not json")
    scribe.answer(call_id, answer)
    scribe.end(call_id, Outcome.ENGINE_ERROR)
    scribe.call("r", [1], [2])
    deriver.derive(tmp_path)
    assert [str(call.outcome) for call in calls_of(tmp_path)] == ["engine_error", "complete"]
    assert len(build(rollout_of(tmp_path), calls_of(tmp_path))[0]) == 1


def test_an_unknown_dialect_or_engine_is_kept_and_named(tmp_path):
    scribe = Scribe(tmp_path)
    for over in ({"dialect": "smoke"}, {"engine": "none"}):
        call_id = scribe.begin("r", **over)
        scribe.end(call_id, Outcome.ENGINE_ERROR)
    deriver.derive(tmp_path)
    assert [call.problems for call in calls_of(tmp_path)] == [["no_answer", "unknown_dialect"], []]


def test_a_bug_in_a_reader_costs_one_call_its_evidence(tmp_path, monkeypatch, caplog):
    from orchard_proxy.engines import registry  # noqa: PLC0415

    class Broken:
        name = "vllm"

        def evidence(self, exchange):
            if b"boom" in exchange.request:
                raise ZeroDivisionError
            return whole.evidence(exchange)

    whole = registry.ENGINES["vllm"]
    monkeypatch.setitem(registry.ENGINES, "vllm", Broken())
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2], body=request_body("boom"))
    scribe.call("r", [1], [2])
    deriver.derive(tmp_path)
    assert [call.problems for call in calls_of(tmp_path)] == [["derive_failed"], ["model_mismatch"]]
    assert "ZeroDivisionError" in caplog.text


def test_a_damaged_frame_is_passed_over_and_reported(tmp_path, caplog):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    begin = scribe.position.offset
    lost = scribe.begin("r")
    data = bytearray(scribe.path.read_bytes())
    data[begin + 40] ^= 0xFF
    scribe.path.write_bytes(data)
    scribe.answer(lost, vllm_answer([1], [2]))
    scribe.end(lost)
    scribe.call("r", [1, 2, 3], [4])
    with caplog.at_level(logging.WARNING):
        deriver.derive(tmp_path)
    assert [call.parent_call_id is not None for call in calls_of(tmp_path)] == [False, True]
    assert "could not be derived" in caplog.text


def test_a_frame_that_cannot_be_decoded_is_passed_over(tmp_path, caplog):
    scribe = Scribe(tmp_path)
    scribe.write(FrameType.ROLLOUT, bytes(16), b"\xc1")
    scribe.write(FrameType.BEGIN, b"x" * 16, b"\xc1")
    scribe.call("r", [1], [2])
    deriver.derive(tmp_path)
    assert len(calls_of(tmp_path)) == 1
    assert "cannot be decoded" in caplog.text


def test_segments_that_were_removed_are_passed_over(tmp_path, caplog):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    deriver.derive(tmp_path)
    scribe.path.unlink()
    scribe.next_segment(2)
    scribe.call("r", [1, 2, 3], [4])
    deriver.derive(tmp_path)
    assert [call.parent_call_id is not None for call in calls_of(tmp_path)] == [False, True]
    with pytest.raises(OrchardError, match="would lose"):
        deriver.derive(tmp_path, rebuild=True)


def test_rebuilding_gives_the_same(tmp_path):
    tell(Scribe(tmp_path), random.Random(1))
    deriver.derive(tmp_path)
    before = contents(tmp_path)
    deriver.derive(tmp_path, rebuild=True)
    assert contents(tmp_path) == before
    assert len(before["rows of calls"]) > 100


def tell(scribe: Scribe, draw: random.Random, calls: int = 150) -> None:
    """Tell interleaved rollouts with open calls, crashes, new segments and sessions."""
    ends: dict[str, list[list[int]]] = {f"r{n}": [[n + 1, 90, 91]] for n in range(5)}
    for rollout_id in ends:
        scribe.rollout(rollout_id)
    waiting: list[tuple[bytes, list[int], list[int], list[list[int]]]] = []
    for _ in range(calls):
        rollout_id = draw.choice(list(ends))
        base = draw.choice(ends[rollout_id])
        prompt = (
            [*base[: draw.randrange(1, len(base) + 1)], draw.randrange(1, 4)] if draw.random() < 0.3 else list(base)
        )
        sampled = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]
        texts = [str(prompt[:at]) for at in range(0, len(prompt), 3)]
        call_id = scribe.begin(rollout_id, request_body(*texts))
        waiting.append((call_id, prompt, sampled, ends[rollout_id]))
        draw.shuffle(waiting)
        while len(waiting) > draw.randrange(4):
            end_one(scribe, draw, *waiting.pop())
        if draw.random() < 0.1:
            scribe.finish(draw.choice(list(ends)), reward=draw.random())
        if draw.random() < 0.06:
            session = hashlike(draw) if draw.random() < 0.5 else None
            waiting = [] if session else waiting
            scribe.next_segment(scribe.number + 1, session)


def hashlike(draw: random.Random) -> bytes:
    return draw.randbytes(16)


def end_one(scribe, draw, call_id, *told) -> None:
    prompt, sampled, ends = told
    scribe.answer(call_id, vllm_answer(prompt, sampled))
    outcome = Outcome.COMPLETE if draw.random() < 0.8 else draw.choice(list(Outcome))
    scribe.end(call_id, outcome)
    if draw.random() < 0.5:
        scribe.delivered(call_id)
    ends.append([*prompt, *sampled, draw.randrange(1, 4)])


@pytest.mark.parametrize("seed", range(4))
def test_whenever_it_is_stopped_and_however_little_it_remembers_the_catalog_is_the_same(tmp_path, seed):
    draw = random.Random(seed)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    tell(Scribe(whole), random.Random(seed))
    deriver.derive(whole)
    source = sorted((whole / "journal").glob("*.orj"))
    (pieces / "journal").mkdir(parents=True)
    for path in source:
        data, target = path.read_bytes(), pieces / "journal" / path.name
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(6)))
        for cut in [*cuts, len(data)]:
            target.write_bytes(data[:cut])
            with Catalog.open(pieces) as catalog:
                derivation = Derivation(pieces, catalog, state_bytes=draw.choice([0, 10_000, 1 << 20]))
                while derivation.step().more:
                    pass
    deriver.derive(pieces)
    assert contents(pieces) == contents(whole)


def test_nothing_to_derive_is_said_as_a_sentence(tmp_path, caplog):
    assert not deriver.derive(tmp_path)
    assert "is empty: nothing was recorded there yet" in caplog.text
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="has no journal"):
        deriver.derive(tmp_path)


def test_waiting_for_a_position(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    assert not deriver.wait_for(tmp_path, [scribe.position], 0.05)
    deriver.derive(tmp_path)
    assert deriver.wait_for(tmp_path, [scribe.position], 0.05)
    assert deriver.wait_for(tmp_path, [], 0.0)


def start_follower(data_dir: Path, parent_pid: int | None = None) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "orchard_proxy.cli.main", "derive", "--follow", "--data", str(data_dir)]
    if parent_pid is not None:
        words += ["--parent-pid", str(parent_pid)]
    return subprocess.Popen(words, stderr=subprocess.DEVNULL)


def test_a_follower_derives_within_a_tenth_of_a_second_and_ends_with_everything_derived(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    process = start_follower(tmp_path)
    try:
        assert deriver.wait_for(tmp_path, [scribe.position], 20)
        waits = []
        for turn in range(10):
            time.sleep(0.03)
            scribe.call("r", [1, 2, *[9] * turn], [3])
            begun = time.monotonic()
            assert deriver.wait_for(tmp_path, [scribe.position], 5)
            waits.append(time.monotonic() - begun)
        assert sorted(waits)[5] < 0.1
        with pytest.raises(OrchardError, match="another process derives"):
            deriver.derive(tmp_path, rebuild=True)
        scribe.call("r", [1, 2, 9], [3])
        deriver.derive(tmp_path)  # waits for the follower
        scribe.call("r", [1, 2, 9], [3])
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert len(calls_of(tmp_path)) == 13


def test_a_follower_outlives_its_parent_until_everything_is_derived(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin("r")
    for turn in range(300):
        scribe.call("r", [1, *[2] * turn], [3])
    process = start_follower(tmp_path, parent_pid=1 if os.getpid() != 1 else 2)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    outcomes = [str(call.outcome) for call in calls_of(tmp_path)]
    assert (len(outcomes), outcomes[-1]) == (301, "crashed")


def test_a_follower_whose_parent_died_before_it_could_look_ends_too(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.call("r", [1], [2])
    words = f"{sys.executable} -m orchard_proxy.cli.main derive --follow --data {tmp_path}"
    shell = subprocess.run(["sh", "-c", f"{words} >{tmp_path}/log 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = int(shell.stdout)
    assert deriver.wait_for(tmp_path, [scribe.position], 30)
    until = time.monotonic() + 20
    while is_running(orphan) and parent_of(orphan) == 1 and time.monotonic() < until:
        time.sleep(0.05)
    if is_running(orphan):
        parent = parent_of(orphan)
        os.kill(orphan, signal.SIGKILL)
        assert parent != 1, "an orphan of init followed on without a server"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_killed_at_any_moment_it_goes_on_to_the_same_catalog(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for data_dir in (whole, killed):
        tell(Scribe(data_dir), random.Random(77), calls=2500)
    deriver.derive(whole)
    draw, midway = random.Random(3), 0
    for _ in range(10):
        process = start_follower(killed)
        wait_until_it_writes(killed)
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        midway += not deriver.wait_for(killed, end_of_journal(killed).values(), 0)
    assert midway >= 2
    deriver.derive(killed)
    assert contents(killed) == contents(whole)


def wait_until_it_writes(data_dir: Path) -> None:
    with Catalog.open(data_dir) as catalog:
        before, until = catalog.progress(), time.monotonic() + 1.0
        while catalog.progress() == before and time.monotonic() < until:
            time.sleep(0.005)


def test_five_thousand_rollouts_leave_no_states_behind(tmp_path):
    scribe = Scribe(tmp_path)
    for n in range(300):
        scribe.rollout(f"r{n}")
        scribe.call(f"r{n}", [1, 2, 3], [4])
        scribe.finish(f"r{n}", reward=1.0)
    with Catalog.open(tmp_path) as catalog:
        derivation = Derivation(tmp_path, catalog, state_bytes=50_000)
        while derivation.step().more:
            pass
        assert derivation._states._total_bytes <= 50_000
        assert len(list(catalog.iter_rollouts())) == 300
