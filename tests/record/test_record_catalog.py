import sqlite3

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from orchard_proxy.errors import BrokenPromptError, OrchardError
from orchard_proxy.record import queries, stored, tables
from orchard_proxy.record.catalog import Batch, Catalog
from orchard_proxy.record.catalog_reader import CatalogReader
from orchard_proxy.record.queries import Filter, Progress
from orchard_proxy.record.segments import Position
from orchard_proxy.record.stored import SharedText
from orchard_proxy.schema.columns import CALLS, ROLLOUTS, Kind
from orchard_proxy.schema.enums import Delivery, IdsGrade, Outcome, RolloutStatus
from orchard_proxy.schema.packed import pack_floats, pack_ids
from orchard_proxy.schema.records import Call, Choice, PromptRef, RewardEntry, Rollout, Usage, VersionSpan


def a_rollout(rollout_id: str = "r", **over) -> Rollout:
    known = {
        "group_id": "g",
        "status": RolloutStatus.COMPLETED,
        "reward": 0.5,
        "rewards": [RewardEntry(name="n", value=0.5, set_us=3, version=1)],
        "started_us": 10,
        "metadata": msgspec.Raw(b'{"seed": 1.0}'),
    }
    return Rollout(rollout_id=rollout_id, **{**known, **over})


def a_call(call_id: str = "c", **over) -> Call:
    known = {
        "rollout_id": "r",
        "seq": 0,
        "commit_seq": 0,
        "dialect": "chat",
        "engine": "vllm",
        "stream": True,
        "model": "m",
        "outcome": Outcome.COMPLETE,
        "delivery": Delivery.UNCERTAIN,
        "late": False,
        "failure": None,
        "begun_us": 1,
        "ended_us": 2,
        "ttft_s": 0.5,
        "duration_s": 1.5,
        "parent_call_id": None,
        "parent_choice": None,
        "prompt": PromptRef(new_ids=pack_ids([1, 2])),
        "prompt_tokens": 2,
        "choices": [
            Choice(
                index=0,
                token_ids=pack_ids([3]),
                logprobs=pack_floats([-0.5]),
                sampled_tokens=1,
                finish_reason="stop",
                message=msgspec.Raw(b'{"role": "assistant", "content": "\\ud83d\\ude00", "x": 1.50}'),
                versions=[VersionSpan(version="7", start=0, end=1)],
                ids_grade=IdsGrade.ENGINE,
            )
        ],
        "usage": Usage(prompt_tokens=2, completion_tokens=1),
        "sampling": msgspec.Raw(b'{"temperature": 0.70}'),
        "messages": msgspec.Raw(b'[{"role":"user"}]'),
        "tools": msgspec.Raw(b"null"),
        "edits": ["a"],
        "problems": ["b"],
        "evidence_rejected": False,
        "http_status": 200,
    }
    return Call(call_id=call_id, **{**known, **over})


def write(catalog: Catalog, *calls: Call, rollouts: tuple[Rollout, ...] = (), **over) -> None:
    rows = [stored.call_row(call, SharedText()) for call in calls]
    told = [stored.rollout_row(one, calls=len(calls), sampled_tokens=1) for one in rollouts]
    catalog.write(Batch(calls=rows, rollouts=told, **over))


@pytest.fixture
def catalog(tmp_path):
    with Catalog.open(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize(("table", "columns"), [(tables.rollouts, ROLLOUTS), (tables.calls, CALLS)], ids=["r", "c"])
def test_tables_have_the_scalar_columns_of_the_list_and_rows_fill_them(table, columns):
    blobs = {Kind.JSON, Kind.STRS, Kind.IDS, Kind.MASK, Kind.LOGPROBS, Kind.STRUCT, Kind.STRUCTS}
    scalars = [column.name for column in columns if column.kind not in blobs]
    assert [column.name for column in table.columns] == [*scalars, "record"]
    row = stored.call_row(a_call(), SharedText()) if table is tables.calls else a_row(a_rollout())
    assert set(row) == {*scalars, "record"}
    nullable = {column.name for column in columns if column.nullable}
    assert {column.name for column in table.columns if column.nullable} == nullable & set(scalars)


def a_row(rollout: Rollout) -> dict[str, object]:
    return stored.rollout_row(rollout, calls=0, sampled_tokens=0)


def test_the_same_tables_compile_for_postgresql():
    for statement in tables.creation():
        text = str(statement.compile(dialect=postgresql.dialect()))
        assert text.lstrip().startswith("CREATE")
    assert "BYTEA" in str(sa.schema.CreateTable(tables.calls).compile(dialect=postgresql.dialect()))


def test_what_is_written_comes_back_byte_for_byte(catalog):
    call, rollout = a_call(), a_rollout()
    write(catalog, call, rollouts=(rollout,))
    assert catalog.calls("r") == [call]
    assert catalog.rollout("r") == rollout
    assert catalog.totals("r") == (1, 1)


def test_what_is_not_there_is_none(catalog):
    assert catalog.rollout("x") is None
    assert catalog.calls("x") == []
    assert catalog.totals("x") == (0, 0)
    assert catalog.progress() == {}


def test_writing_again_replaces(catalog):
    write(catalog, a_call(), rollouts=(a_rollout(),))
    write(catalog, a_call(model="n"), rollouts=(a_rollout(reward=1.0),))
    assert [call.model for call in catalog.calls("r")] == ["n"]
    assert catalog.rollout("r").reward == 1.0


def test_calls_come_in_commit_order(catalog):
    write(catalog, a_call("b", commit_seq=2), a_call("a", commit_seq=10), a_call("c", commit_seq=1))
    assert [call.call_id for call in catalog.calls("r")] == ["c", "b", "a"]


@pytest.mark.parametrize("before", list(Delivery))
@pytest.mark.parametrize("by", ["call", "rollout"])
def test_only_uncertain_calls_are_confirmed(catalog, before, by):
    write(catalog, a_call(delivery=before), a_call("late", delivery=before, late=True, commit_seq=1))
    ids = {"confirmed_calls": {"c"}} if by == "call" else {"confirmed_rollouts": {"r"}}
    write(catalog, **ids)
    after = Delivery.CONFIRMED if before is Delivery.UNCERTAIN else before
    assert [call.delivery for call in catalog.calls("r")] == [after, before]


def test_messages_are_stored_behind_what_an_earlier_call_has(catalog):
    first, second = a_call(), a_call("d", messages=msgspec.Raw(b'[{"role":"user"},{"r":1}]'), commit_seq=1)
    shared = SharedText("c", len(b'[{"role":"user"}'))
    catalog.write(Batch(calls=[stored.call_row(first, SharedText()), stored.call_row(second, shared)]))
    assert catalog.calls("r") == [first, second]


def test_messages_whose_base_is_missing_are_an_error(catalog):
    catalog.write(Batch(calls=[stored.call_row(a_call(), SharedText("gone", 3))]))
    with pytest.raises(BrokenPromptError, match="--rebuild"):
        catalog.calls("r")


def test_rollouts_are_paged_in_the_order_of_their_start(catalog):
    known = [a_rollout(f"r{n}", started_us=n // 2, group_id=f"g{n % 2}") for n in range(7)]
    write(catalog, rollouts=tuple(reversed(known)))
    assert [one.rollout_id for one in catalog.rollouts(limit=3)] == ["r0", "r1", "r2"]
    assert [one.rollout_id for one in catalog.rollouts(limit=3, after="r2")] == ["r3", "r4", "r5"]
    assert catalog.rollouts(after="r6") == []
    assert catalog.rollouts(after="nobody") == []
    assert [one.rollout_id for one in catalog.rollouts(Filter(group_id="g1"), after="r1")] == ["r3", "r5"]
    assert catalog.rollouts(Filter(status=RolloutStatus.RUNNING)) == []


def test_all_rollouts_over_several_pages(catalog):
    write(catalog, rollouts=tuple(a_rollout(f"r{n:04}", started_us=5) for n in range(450)))
    assert [one.rollout_id for one in catalog.iter_rollouts()] == [f"r{n:04}" for n in range(450)]


def progress(offset: int) -> Progress:
    return Progress(done=Position("w0-000002.orj", offset), resume=Position("w0-000001.orj", 7), commits=3)


def test_progress_is_kept(catalog):
    write(catalog, progress={"w0": progress(9)})
    assert catalog.progress() == {"w0": progress(9)}


@pytest.mark.parametrize(
    ("wanted", "reached"),
    [
        pytest.param(Position("w0-000002.orj", 9), True, id="there"),
        pytest.param(Position("w0-000002.orj", 10), False, id="not-there"),
        pytest.param(Position("w0-000001.orj", 999), True, id="older-segment"),
        pytest.param(Position("w0-1000000.orj", 0), False, id="seven-digits"),
        pytest.param(Position("w1-000001.orj", 0), False, id="other-worker"),
    ],
)
def test_whether_a_position_is_reached(wanted, reached):
    assert queries.reached({"w0": progress(9)}, wanted) is reached


def test_a_batch_is_written_whole_or_not_at_all(catalog):
    broken = {**stored.call_row(a_call("d"), SharedText()), "seq": None}
    batch = Batch(calls=[stored.call_row(a_call(), SharedText()), broken], progress={"w0": progress(9)})
    with pytest.raises(sa.exc.IntegrityError):
        catalog.write(batch)
    assert (catalog.calls("r"), catalog.progress()) == ([], {})


def test_clearing_leaves_an_empty_catalog(catalog):
    write(catalog, a_call(), rollouts=(a_rollout(),), progress={"w0": progress(9)})
    catalog.clear()
    assert (catalog.calls("r"), catalog.rollouts(), catalog.progress()) == ([], [], {})


def set_version(tmp_path, version: int) -> None:
    connection = sqlite3.connect(tmp_path / "catalog.db")
    connection.execute("update meta set value = ?", [version])
    connection.commit()
    connection.close()


def test_a_catalog_of_an_older_orchard_is_emptied_and_derived_again(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        write(catalog, rollouts=(a_rollout(),))
    set_version(tmp_path, tables.CATALOG_VERSION - 1)
    with Catalog.open(tmp_path) as catalog:
        assert catalog.rollouts() == []


def test_a_catalog_of_a_newer_orchard_is_refused(tmp_path):
    Catalog.open(tmp_path).close()
    set_version(tmp_path, tables.CATALOG_VERSION + 1)
    with pytest.raises(OrchardError, match="newer"):
        Catalog.open(tmp_path)


async def test_the_server_reads_the_same(tmp_path):
    async with await CatalogReader.open(tmp_path) as reader:
        assert await reader.rollouts() == []
        with Catalog.open(tmp_path) as catalog:
            write(
                catalog, a_call(), rollouts=(a_rollout(), a_rollout("s", started_us=11)), progress={"w0": progress(9)}
            )
        assert await reader.calls("r") == [a_call()]
        assert await reader.rollout("r") == a_rollout()
        assert await reader.rollout("x") is None
        assert [one.rollout_id for one in await reader.rollouts(limit=1, after="r")] == ["s"]
        assert await reader.progress() == {"w0": progress(9)}
        assert await reader.wait_for([progress(9).done], 1.0)
        assert not await reader.wait_for([progress(10).done], 0.05)
