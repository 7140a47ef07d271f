"""Each rule of `orchard validate`, shown by an export that is valid but for one planted breach."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_kit import INFRA, Recording, Row, chains, choice, export, restate, rewrite, varied

from orchard_proxy.errors import ExportError
from orchard_proxy.export import check_calls, manifest, report
from orchard_proxy.export.report import Rule
from orchard_proxy.export.validate import validate
from orchard_proxy.export.writer import write
from orchard_proxy.schema.enums import Delivery
from orchard_proxy.schema.packed import pack_floats, pack_ids
from orchard_proxy.schema.records import Accounting, Usage, VersionSpan

NAN = float("nan")
Change = Callable[[list[Row]], Any]


def first(**over: Any) -> Change:
    return at(0, **over)


def at(index: int, **over: Any) -> Change:
    return lambda rows: rows[index].update(over)


def put(index: int, name: str, position: int, value: Any) -> Change:
    """Set one element of a packed column."""

    def change(rows: list[Row]) -> None:
        kind = {"token_ids": np.int32, "loss_mask": np.int8, "logprobs": np.float32}[name]
        values = np.frombuffer(rows[index][name], kind).copy()
        values[position] = value
        rows[index][name] = values.tobytes()

    return change


def turn(index: int, position: int, **over: Any) -> Change:
    return lambda rows: rows[index]["turns"][position].update(over)


def of_choice(index: int, **over: Any) -> Change:
    return lambda rows: rows[index]["choices"][0].update(over)


def both(*changes: Change) -> Change:
    return lambda rows: [change(rows) for change in changes]


def call_ref(index: int, name: str, target: int) -> Change:
    return lambda rows: rows[index].update({name: rows[target]["call_id"]})


def repeat(index: int) -> Change:
    return lambda rows: rows.append(dict(rows[index]))


def untrain(rows: list[Row]) -> None:
    """Take away the training of a choice and leave no reason."""
    rows[3]["turns"][0].update(trained=False)
    rows[3]["loss_mask"] = bytes(5)
    rows[3]["logprobs"] = pack_floats([NAN] * 5)


def train_again(rows: list[Row]) -> None:
    """Train the first turn in the second sample too."""
    rows[1]["turns"][0].update(trained=True)
    rows[1]["loss_mask"] = bytes([0, 0, 0, 1, 1, *rows[1]["loss_mask"][5:]])
    rows[1]["logprobs"] = rows[1]["logprobs"][:12] + rows[0]["logprobs"][12:20] + rows[1]["logprobs"][20:]


def train_late(rows: list[Row]) -> None:
    """Train the first turn in the second sample instead of in the first."""
    train_again(rows)
    rows[0]["turns"][0].update(trained=False)
    rows[0]["loss_mask"] = bytes([0, 0, 0, 0, 0, *rows[0]["loss_mask"][5:]])
    rows[0]["logprobs"] = pack_floats([NAN] * 5) + rows[0]["logprobs"][20:]


def train_uncertain(rows: list[Row]) -> None:
    rows[2]["turns"][2].update(trained=True, masked_reason=None)
    rows[2]["loss_mask"] = rows[2]["loss_mask"][:8] + b"\x01"
    rows[2]["logprobs"] = rows[2]["logprobs"][:32] + pack_floats([-0.1])


def cycle(rows: list[Row]) -> None:
    rows[3].update(prompt_base_call_id=rows[4]["call_id"], prompt_base_choice=None)


# calls: 0 ← 1 (two choices) ← 2; 0 ← 3 ← 4 (uncertain), 5 (cut); 6 with a hole; 7 without ids; 8 rejected; ...
# samples: main-0 (calls 0, 1), main-1 (0, 1, 2), main-2 (0, 3, 4), main-3 (6), main-4 (7), main-5 (8), main-6, lost-0
PLANTED: dict[str, tuple[Rule, str, Change, str]] = {
    "rollout twice": (Rule.UNIQUE_ID, "rollouts", repeat(2), "still-running"),
    "call twice": (Rule.UNIQUE_ID, "calls", repeat(3), "@3"),
    "commit_seq twice": (
        Rule.UNIQUE_ID,
        "calls",
        lambda rows: rows[4].update(commit_seq=rows[3]["commit_seq"]),
        "@4",
    ),
    "sample twice": (Rule.UNIQUE_ID, "samples", repeat(3), "main-3"),
    "reward name twice": (
        Rule.UNIQUE_ID,
        "rollouts",
        lambda rows: rows[0].update(rewards=rows[0]["rewards"] * 2),
        "main",
    ),
    "call of no rollout": (Rule.FOREIGN_KEY, "calls", at(11, rollout_id="gone"), "@11"),
    "sample of no rollout": (Rule.FOREIGN_KEY, "samples", at(7, rollout_id="gone"), "lost-0"),
    "turn of no call": (Rule.FOREIGN_KEY, "samples", turn(0, 0, call_id="gone"), "main-0"),
    "turn of no choice": (Rule.FOREIGN_KEY, "samples", turn(0, 0, choice=5), "main-0"),
    "turn of another rollout": (
        Rule.FOREIGN_KEY,
        "samples",
        lambda rows: rows[0]["turns"][0].update(call_id=rows[7]["turns"][0]["call_id"]),
        "main-0",
    ),
    "parent is no call": (Rule.FOREIGN_KEY, "calls", at(2, parent_call_id="gone"), "@2"),
    "base is no call": (Rule.FOREIGN_KEY, "calls", at(2, prompt_base_call_id="gone"), "@2"),
    "unknown status": (Rule.ENUM, "rollouts", first(status="paused"), "main"),
    "unknown outcome": (Rule.ENUM, "calls", at(7, outcome="fine"), "@7"),
    "unknown delivery": (Rule.ENUM, "calls", at(7, delivery="perhaps"), "@7"),
    "unknown ids grade": (Rule.ENUM, "calls", of_choice(7, ids_grade="good"), "@7"),
    "unknown logprobs grade of a sample": (Rule.ENUM, "samples", at(3, logprobs_grade="good"), "main-3"),
    "unknown branch reason": (Rule.ENUM, "samples", first(branch_reason="side"), "main-0"),
    "unknown masked reason": (Rule.ENUM, "samples", turn(2, 2, masked_reason="tired"), "main-2"),
    "unknown blame": (
        Rule.ENUM,
        "rollouts",
        lambda rows: rows[1]["failure"].update(blame="luck"),
        "lost",
    ),
    "bad JSON in a rollout": (Rule.JSON, "rollouts", first(metadata="{"), "main"),
    "NaN in a message": (Rule.JSON, "calls", of_choice(0, message="NaN"), "@0"),
    "half a pair in a sample": (Rule.JSON, "samples", first(messages='["\\ud800"]'), "main-0"),
    "span beyond the choice": (
        Rule.SPANS,
        "calls",
        of_choice(0, versions=[{"version": "7", "start": 0, "end": 3}]),
        "@0",
    ),
    "span before the sample": (
        Rule.SPANS,
        "samples",
        first(policy_versions=[{"version": "7", "start": -1, "end": 3}]),
        "main-0",
    ),
    "spans that overlap": (
        Rule.SPANS,
        "samples",
        first(policy_versions=[{"version": str(start), "start": start, "end": 3} for start in (0, 1)]),
        "main-0",
    ),
    "calls miscounted": (Rule.ROLLOUT_COUNTS, "rollouts", first(calls=3), "main"),
    "sampled tokens miscounted": (Rule.ROLLOUT_COUNTS, "rollouts", first(sampled_tokens=3), "main"),
    "two choices of one index": (
        Rule.CHOICE_INDEX,
        "calls",
        lambda rows: rows[1]["choices"][1].update(index=0),
        "@1",
    ),
    "a logprob too few": (Rule.CHOICE_LENGTHS, "calls", of_choice(0, logprobs=pack_floats([-1.0])), "@0"),
    "more tokens than ids": (Rule.CHOICE_COUNT, "calls", of_choice(0, sampled_tokens=3), "@0"),
    "a negative sampled id": (Rule.CALL_IDS, "calls", of_choice(0, token_ids=pack_ids([10, -1])), "@0"),
    "a negative prompt id": (Rule.CALL_IDS, "calls", at(10, prompt_tokens=1, prompt_new_ids=pack_ids([-6])), "@10"),
    "prompt counted otherwise": (Rule.USAGE, "calls", first(usage_prompt_tokens=4), "@0"),
    "answer counted otherwise": (Rule.USAGE, "calls", first(usage_completion_tokens=4), "@0"),
    "prompt longer than its ids": (Rule.PROMPT_LENGTH, "calls", first(prompt_tokens=4), "@0"),
    "unknown prompt with ids": (Rule.PROMPT_LENGTH, "calls", at(7, prompt_new_ids=pack_ids([1])), "@7"),
    "shares more than the base has": (
        Rule.PROMPT_BASE,
        "calls",
        at(2, prompt_shared=9, prompt_tokens=10),
        "@2",
    ),
    "shares with nothing": (Rule.PROMPT_BASE, "calls", first(prompt_shared=2, prompt_tokens=5), "@0"),
    "shares through no choice": (Rule.PROMPT_BASE, "calls", at(2, prompt_base_choice=None), "@2"),
    "base of later": (Rule.PROMPT_BASE, "calls", call_ref(3, "prompt_base_call_id", 4), "@3"),
    "base of another rollout": (Rule.PROMPT_BASE, "calls", call_ref(11, "prompt_base_call_id", 0), "@11"),
    "base without ids": (Rule.PROMPT_BASE, "calls", call_ref(8, "prompt_base_call_id", 7), "@8"),
    "circle of bases": (Rule.PROMPT_CYCLE, "calls", cycle, "@3"),
    "parent of later": (Rule.PARENT, "calls", call_ref(1, "parent_call_id", 2), "@1"),
    "parent of another rollout": (Rule.PARENT, "calls", call_ref(2, "parent_call_id", 11), "@2"),
    "parent without ids": (Rule.PARENT, "calls", call_ref(8, "parent_call_id", 7), "@8"),
    "parent without the choice": (Rule.PARENT, "calls", at(2, parent_choice=4), "@2"),
    "parent that is no prefix": (Rule.PARENT_PREFIX, "calls", at(2, parent_choice=1), "@2"),
    "prompt ids changed": (Rule.PARENT_PREFIX, "calls", at(2, prompt_shared=6, prompt_new_ids=pack_ids([99, 5])), "@2"),
    "a longer parent exists": (
        Rule.PARENT_LONGEST,
        "calls",
        both(call_ref(2, "parent_call_id", 0), at(2, parent_choice=0)),
        "@2",
    ),
    "a parent is forgotten": (
        Rule.PARENT_LONGEST,
        "calls",
        at(2, parent_call_id=None, parent_choice=None),
        "@2",
    ),
    "sample misnamed": (Rule.SAMPLE_ID, "samples", first(sample_id="x"), "x"),
    "branch left out": (Rule.SAMPLE_ID, "samples", at(6, branch=9, sample_id="main-9"), "main-9"),
    "another group": (Rule.ROLLOUT_COPY, "samples", first(group_id="h"), "main-0"),
    "another task": (Rule.ROLLOUT_COPY, "samples", first(task_id=None), "main-0"),
    "another reward": (Rule.ROLLOUT_COPY, "samples", first(reward=1.0), "main-0"),
    "failure forgotten": (Rule.ROLLOUT_COPY, "samples", at(7, failure=None), "lost-0"),
    "mask too short": (Rule.LENGTHS, "samples", first(loss_mask=b"\x00"), "main-0"),
    "logprobs too long": (Rule.LENGTHS, "samples", at(6, logprobs=pack_floats([NAN] * 4)), "main-6"),
    "advantages too short": (Rule.LENGTHS, "samples", first(advantages=pack_floats([1.0])), "main-0"),
    "negative id in a sample": (Rule.SAMPLE_IDS, "samples", put(0, "token_ids", 0, -1), "main-0"),
    "mask of 2": (Rule.MASK_VALUES, "samples", put(0, "loss_mask", 3, 2), "main-0"),
    "mask of -1": (Rule.MASK_VALUES, "samples", put(0, "loss_mask", 0, -1), "main-0"),
    "NaN at a target": (Rule.LOGPROB_TARGET, "samples", put(0, "logprobs", 3, NAN), "main-0"),
    "-inf at a target": (Rule.LOGPROB_TARGET, "samples", put(0, "logprobs", 3, -math.inf), "main-0"),
    "positive at a target": (Rule.LOGPROB_TARGET, "samples", put(0, "logprobs", 3, 0.01), "main-0"),
    "a logprob where masked": (Rule.LOGPROB_MASKED, "samples", put(0, "logprobs", 0, -1.0), "main-0"),
    "turn beyond the end": (Rule.TURN_RANGE, "samples", turn(0, 1, end=9), "main-0"),
    "turn before the start": (Rule.TURN_RANGE, "samples", turn(0, 0, start=-1), "main-0"),
    "turn backwards": (Rule.TURN_RANGE, "samples", turn(0, 0, start=5, end=3), "main-0"),
    "turns that overlap": (Rule.TURN_ORDER, "samples", turn(0, 0, end=7), "main-0"),
    "turns in disorder": (Rule.TURN_ORDER, "samples", lambda rows: rows[0]["turns"].reverse(), "main-0"),
    "a turn left out": (Rule.TURN_PATH, "samples", lambda rows: rows[1]["turns"].pop(0), "main-1"),
    "no turns": (Rule.TURN_PATH, "samples", at(4, turns=[]), "main-4"),
    "turn shifted": (Rule.TURN_IDS, "samples", turn(1, 1, start=5, end=6), "main-1"),
    "sampled id changed": (Rule.TURN_IDS, "samples", put(0, "token_ids", 3, 99), "main-0"),
    "template id changed": (Rule.PATH_IDS, "samples", put(0, "token_ids", 5, 99), "main-0"),
    "no_ids with ids": (Rule.BRANCH_REASON, "samples", first(branch_reason="no_ids"), "main-0"),
    "ids without ids": (Rule.BRANCH_REASON, "samples", at(4, branch_reason="root"), "main-4"),
    "grade too good": (Rule.GRADES, "samples", first(logprobs_grade="processed"), "main-0"),
    "target outside of turns": (Rule.MASK_TURNS, "samples", put(0, "loss_mask", 0, 1), "main-0"),
    "hole in a trained turn": (
        Rule.MASK_TURNS,
        "samples",
        both(put(0, "loss_mask", 3, 0), put(0, "logprobs", 3, NAN)),
        "main-0",
    ),
    "target in a context turn": (
        Rule.MASK_TURNS,
        "samples",
        both(put(1, "loss_mask", 3, 1), put(1, "logprobs", 3, -0.1)),
        "main-1",
    ),
    "logprob off by one bit": (
        Rule.LOGPROB_COPY,
        "samples",
        put(0, "logprobs", 3, np.nextafter(np.float32(-0.1), np.float32(0))),
        "main-0",
    ),
    "uncertain trained": (Rule.TRAINED_ALLOWED, "samples", train_uncertain, "main-2"),
    "trained with a reason": (Rule.TRAINED_ALLOWED, "samples", turn(0, 0, masked_reason="late"), "main-0"),
    "another masked reason": (Rule.MASKED_REASON, "samples", turn(2, 2, masked_reason="late"), "main-2"),
    "masked reason without cause": (Rule.MASKED_REASON, "samples", turn(1, 0, masked_reason="late"), "main-1"),
    "trained twice": (Rule.TRAINED_ONCE, "samples", train_again, "main-1"),
    "trained in a later sample": (Rule.TRAINED_FIRST, "samples", train_late, "main-1"),
    "trained nowhere": (Rule.ACCOUNTED, "samples", untrain, "@6"),
    "a sample dropped": (Rule.ACCOUNTED, "samples", lambda rows: rows.pop(7), "@11"),
    "no end": (Rule.FINISHED, "rollouts", first(finished_at=None), "main"),
    "an end too early": (Rule.FINISHED, "rollouts", at(2, finished_at=1), "still-running"),
    "a longer call": (Rule.TIMES, "calls", at(3, duration_s=0.6), "@3"),
    "half a parent": (Rule.PARENT, "calls", at(3, parent_choice=None), "@3"),
    "a sample that nobody made": (Rule.REBUILT, "samples", at(3, sample_id="x"), "x"),
    "a sample that is not there": (Rule.REBUILT, "samples", lambda rows: rows.pop(7), "lost-0"),
    "accounting changed by the rows": (Rule.ACCOUNTING, "samples", untrain, manifest.NAME),
}


def found(out: Path) -> list[tuple[str, str | None]]:
    """Return rule and key of each breach."""
    return [(breach.rule, breach.row or breach.file) for breach in validate(out).breaches]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return export(tmp_path / "out")


def test_a_fresh_export_is_valid(out: Path) -> None:
    report = validate(out)
    assert (report.breaches, report.valid, report.total_breaches) == ([], True, 0)
    assert report.counts == {"rollouts": 3, "calls": 12, "samples": 8}
    assert report.invariant.startswith("sampled 24 = trained 11 + ")


def test_long_chains_and_an_empty_export_are_valid(tmp_path: Path) -> None:
    write(chains(2, 30, first=50, turn=5, answer=20), tmp_path / "chains")
    write([], tmp_path / "empty")
    assert validate(tmp_path / "chains").valid
    assert validate(tmp_path / "empty").valid


@pytest.mark.parametrize(("rule", "table", "change", "key"), PLANTED.values(), ids=PLANTED)
def test_a_planted_breach_is_named(out: Path, rule: Rule, table: str, change: Change, key: str) -> None:
    calls = [call.call_id for item in varied() for call in item.calls]
    rewrite(out, table, change)
    named = calls[int(key[1:])] if key.startswith("@") else key
    assert (rule.name.lower(), named) in found(out)


def test_every_breach_names_table_file_and_row(out: Path) -> None:
    rewrite(out, "samples", put(0, "token_ids", 5, 99))
    breach, _ = validate(out).breaches
    assert (breach.table, breach.file, breach.row) == ("samples", "samples/part-00000.parquet", "main-0")
    assert breach.line().startswith("samples samples/part-00000.parquet main-0: path_ids: ")


def damage(change: Callable[[Path], Any], *, restated: bool = False) -> Callable[[Path], None]:
    def apply(out: Path) -> None:
        change(out)
        if restated:
            restate(out)

    return apply


CALLS_FILE = "calls/part-00000.parquet"


def retype(out: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(out / CALLS_FILE)
    with pq.ParquetWriter(out / CALLS_FILE, change(table).schema) as writer:
        writer.write_table(change(table))
        writer.add_key_value_metadata(manifest.read(out).footer("calls"))


def as_float(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("seq")
    return table.set_column(index, "seq", table["seq"].cast(pa.float64()))


def as_nullable(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("seq")
    return table.set_column(index, pa.field("seq", pa.int32(), nullable=True), table["seq"])


def footer_of(out: Path, **over: str) -> None:
    table = pq.read_table(out / CALLS_FILE)
    keys = manifest.read(out).footer("calls")
    with pq.ParquetWriter(out / CALLS_FILE, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: value for key, value in (keys | over).items() if value})


def flip_middle(out: Path) -> None:
    data = bytearray((out / CALLS_FILE).read_bytes())
    data[len(data) // 4] ^= 1
    (out / CALLS_FILE).write_bytes(data)


def wreck_pages(out: Path) -> None:
    data = bytearray((out / CALLS_FILE).read_bytes())
    data[4:64] = bytes(60)
    (out / CALLS_FILE).write_bytes(data)


OF_FILES = {
    "file missing": (Rule.FILE_MISSING, damage(lambda out: (out / CALLS_FILE).unlink()), CALLS_FILE),
    "card missing": (Rule.FILE_MISSING, damage(lambda out: (out / "README.md").unlink()), "README.md"),
    "file unlisted": (
        Rule.FILE_UNLISTED,
        damage(lambda out: (out / "samples/x.parquet").write_bytes(b"")),
        "samples/x.parquet",
    ),
    "one bit": (Rule.FILE_HASH, damage(flip_middle), CALLS_FILE),
    "one byte more": (
        Rule.FILE_HASH,
        damage(lambda out: (out / "README.md").open("a").write("x")),
        "README.md",
    ),
    "no Parquet": (Rule.FILE_UNREADABLE, damage(lambda out: (out / CALLS_FILE).write_bytes(b"x")), CALLS_FILE),
    "broken pages": (Rule.FILE_UNREADABLE, damage(wreck_pages, restated=True), CALLS_FILE),
    "column missing": (
        Rule.SCHEMA,
        damage(lambda out: retype(out, lambda t: t.drop_columns(["seq"])), restated=True),
        CALLS_FILE,
    ),
    "column retyped": (Rule.SCHEMA, damage(lambda out: retype(out, as_float), restated=True), CALLS_FILE),
    "column nullable": (Rule.SCHEMA, damage(lambda out: retype(out, as_nullable), restated=True), CALLS_FILE),
    "column unknown": (
        Rule.SCHEMA,
        damage(lambda out: retype(out, lambda t: t.append_column("x", t["seq"])), restated=True),
        CALLS_FILE,
    ),
    "footer of another table": (
        Rule.FOOTER,
        damage(lambda out: footer_of(out, **{"orchard.table": "samples"}), restated=True),
        CALLS_FILE,
    ),
    "footer without version": (
        Rule.FOOTER,
        damage(lambda out: footer_of(out, **{"orchard.schema_version": ""}), restated=True),
        CALLS_FILE,
    ),
    "footer with other sums": (
        Rule.FOOTER,
        damage(lambda out: footer_of(out, **{"orchard.accounting": "{}"}), restated=True),
        CALLS_FILE,
    ),
}


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize(("rule", "apply", "file"), OF_FILES.values(), ids=OF_FILES)
def test_a_damaged_file_is_named(out: Path, rule: Rule, apply: Callable[[Path], None], file: str) -> None:
    apply(out)
    assert (rule.name.lower(), file) in found(out)


@pytest.mark.parametrize("table", ["rollouts", "calls", "samples"])
def test_damage_anywhere_is_reported_and_never_crashes(out: Path, table: str) -> None:
    path = out / table / "part-00000.parquet"
    whole = path.read_bytes()
    rng = random.Random(table)
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert ("file_hash", f"{table}/part-00000.parquet") in found(out)


def rewritten(out: Path, table: str, change: Callable[[list[Row]], Any]) -> None:
    """Rewrite a table as a person would: by pandas, without schema, footer or manifest."""
    path = out / table / "part-00000.parquet"
    frame = pd.read_parquet(path)
    rows = frame.to_dict("records")
    change(rows)
    pd.DataFrame(rows, columns=frame.columns).to_parquet(path)


def test_a_file_rewritten_by_pandas_still_has_its_rows_checked(out: Path) -> None:
    rewritten(out, "samples", lambda rows: rows[0].update(branch_reason="side"))
    assert ("enum", "main-0") in found(out)
    assert ("schema", "samples/part-00000.parquet") in found(out)


def test_a_null_where_none_may_be_is_named_with_its_row(out: Path) -> None:
    rewritten(out, "calls", lambda rows: rows[4].update(outcome=None))
    assert ("null", varied()[0].calls[4].call_id) in found(out)


def test_rows_that_the_manifest_miscounts_are_named(out: Path) -> None:
    stated = manifest.read(out)
    files = [msgspec.structs.replace(entry, rows=99) if entry.table == "calls" else entry for entry in stated.files]
    counts = msgspec.structs.replace(stated.counts, samples=99)
    wrong = msgspec.structs.replace(stated, files=files, counts=counts)
    (out / manifest.NAME).write_bytes(manifest.encode(wrong))
    assert found(out) == [("file_rows", CALLS_FILE), ("file_rows", manifest.NAME)]


@pytest.mark.parametrize(
    "accounting",
    [
        pytest.param(Accounting(sampled=24, trained=12, masked={"no_ids": 12}), id="other-sums"),
        pytest.param(Accounting(sampled=25, trained=11, masked={"no_ids": 4}), id="does-not-hold"),
    ],
)
def test_an_accounting_that_the_rows_do_not_give_is_named(out: Path, accounting: Accounting) -> None:
    restate(out, accounting=accounting, invariant=accounting.line())
    assert ("accounting", manifest.NAME) in found(out)


@pytest.mark.parametrize(
    ("table", "change", "named"),
    [
        pytest.param("samples", first(messages="[]"), "main-0: rebuilt: messages", id="messages"),
        pytest.param("samples", first(tools="[]"), "main-0: rebuilt: tools", id="tools"),
        pytest.param(
            "samples", at(1, branch_reason="root"), "main-1: rebuilt: branch_reason is 'root'", id="branch-reason"
        ),
        pytest.param("samples", first(ids_grade="pinned"), "main-0: rebuilt: ids_grade is 'pinned'", id="ids-grade"),
        pytest.param("samples", first(logprobs_grade="none"), "main-0: rebuilt: logprobs_grade", id="logprobs-grade"),
        pytest.param("samples", first(problems=["x"]), "main-0: rebuilt: problems", id="problems"),
        pytest.param("samples", first(policy_versions=[]), "main-0: rebuilt: policy_versions", id="versions"),
        pytest.param("samples", turn(0, 0, finish_reason="x"), "main-0: rebuilt: turns", id="turn-finish-reason"),
        pytest.param("samples", first(reward=1.0), "main-0: rebuilt: reward is 1.0", id="reward"),
        pytest.param("rollouts", first(group_id="h"), "main-0: rebuilt: group_id is 'g'", id="group-of-rollout"),
        pytest.param("calls", at(1, messages="[]"), "main-0: rebuilt: messages", id="messages-of-call"),
        pytest.param("calls", at(1, tools="[]"), "main-0: rebuilt: tools", id="tools-of-call"),
        pytest.param("calls", of_choice(2, message="{}"), "main-1: rebuilt: messages", id="message-of-choice"),
        pytest.param("calls", of_choice(0, finish_reason="x"), "main-0: rebuilt: turns", id="finish-reason-of-call"),
        pytest.param("calls", first(problems=["x"]), "main-0: rebuilt: problems", id="problems-of-call"),
    ],
)
def test_a_column_that_is_not_what_the_calls_make_is_named(out: Path, table: str, change: Change, named: str) -> None:
    rewrite(out, table, change)
    lines = [breach.line() for breach in validate(out).breaches]
    assert [line for line in lines if named in line], lines


@pytest.mark.parametrize("table", ["calls", "samples"])
def test_rows_in_another_order_are_the_same_export(out: Path, table: str) -> None:
    rewrite(out, table, lambda rows: random.Random(5).shuffle(rows))
    assert validate(out).breaches == []


def test_advantages_are_the_trainers_to_fill(out: Path) -> None:
    rewrite(
        out,
        "samples",
        lambda rows: [row.update(advantages=pack_floats([0.5] * len(row["loss_mask"]))) for row in rows],
    )
    assert validate(out).breaches == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "samples/../../secret", "..", "", "a\0b", "x" * 5000])
def test_the_manifest_names_no_file_outside_of_the_export(out: Path, name: str) -> None:
    (out.parent / "secret").write_text("mine")
    stated = manifest.read(out)
    entry = manifest.FileEntry(path=name, bytes=4, sha256="0" * 64)
    (out / manifest.NAME).write_bytes(manifest.encode(msgspec.structs.replace(stated, files=[*stated.files, entry])))
    (breach,) = validate(out).breaches
    assert breach.rule == ("file_missing" if name == "x" * 5000 else "file_outside")
    assert "sha256" not in breach.detail


def test_every_rule_has_a_planted_breach() -> None:
    planted = (
        {rule for rule, *_ in PLANTED.values()}
        | {rule for rule, *_ in OF_FILES.values()}
        | {Rule.FILE_ROWS, Rule.NULL, Rule.FILE_OUTSIDE}
    )
    assert planted == set(Rule)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(None, "is not an Orchard export", id="no-manifest"),
        pytest.param(b"{", "cannot be read", id="garbage"),
        pytest.param(b'{"format":"other"}', "cannot be read", id="another-thing"),
    ],
)
def test_what_is_no_export_is_refused(out: Path, content: bytes | None, sentence: str) -> None:
    (out / manifest.NAME).unlink()
    if content is not None:
        (out / manifest.NAME).write_bytes(content)
    with pytest.raises(ExportError, match=sentence):
        validate(out)


def test_a_newer_major_version_is_refused(out: Path) -> None:
    restate(out, schema_version=(2, 0))
    with pytest.raises(ExportError, match=r"has schema 2\.0, this Orchard reads 1\.\d+; upgrade"):
        validate(out)


def test_beyond_the_cap_breaches_are_counted_and_not_kept(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "KEPT_BREACHES", 2)
    rewrite(out, "samples", lambda rows: [row.update(reward=7.0) for row in rows])
    verdict = validate(out)
    assert (verdict.total_breaches, len(verdict.breaches)) == (16, 2)


def test_a_legitimate_oddity_is_not_a_breach(tmp_path: Path) -> None:
    odd = Recording("odd", reward=None)
    odd.call([1], choice(0, [], sampled_tokens=0, finish_reason=None), outcome="length")
    odd.call([1], choice(5, [2]), choice(7, [3]))
    odd.call([1, 3], choice(0, [4], versions=[]), usage=Usage(prompt_tokens=2, completion_tokens=1))
    odd.call([1, 3, 4], [5], late=True)
    odd.call([1, 3, 4], [5], delivery=Delivery.NONE, outcome="client_gone")
    odd.call([1, 3, 4, 5], choice(0, [6, 7], versions=[VersionSpan(version="1", start=0, end=1)] * 1))
    odd.call([9], choice(0, [8], logprobs=pack_floats([0.0])), failure=INFRA)
    odd.call([9], [8])
    odd.call([9], choice(0, [8]), choice(0, [7]), rejected=True, problems=["duplicate_choice_index"])
    write([odd.item()], tmp_path / "out")
    assert validate(tmp_path / "out").breaches == []


def test_the_kept_memory_of_a_call_is_its_tokens_not_its_messages() -> None:
    assert {"messages", "tools", "sampling"} == set(check_calls._DROPPED)
