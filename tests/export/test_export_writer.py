"""The writer: what stands in the files, how, and that memory and row groups stay bounded."""

import json
import tracemalloc
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from export_kit import Recording, chains, varied

from orchard_proxy.errors import ExportError
from orchard_proxy.export import arrow, manifest, parquet, rows
from orchard_proxy.export.item import Item
from orchard_proxy.export.parquet import TableWriter
from orchard_proxy.export.writer import write
from orchard_proxy.schema.columns import TABLES
from orchard_proxy.schema.records import Accounting, Usage


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer") / "out"
    write(varied(), folder)
    return folder


def part(out: Path, table: str) -> Path:
    return out / table / "part-00000.parquet"


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_in_the_file_is_the_declared_one(out: Path, table: str) -> None:
    assert pq.read_schema(part(out, table)).equals(arrow.schema(table))


@pytest.mark.parametrize("table", TABLES)
def test_every_column_has_its_encoding(out: Path, table: str) -> None:
    group = pq.read_metadata(part(out, table)).row_group(0)
    leaves = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    for path, column in leaves.items():
        assert column.compression == "ZSTD"
        assert column.has_offset_index
        last = path.removesuffix(".list.element").split(".")[-1]
        if last in ("token_ids", "prompt_new_ids", "loss_mask", "messages", "metadata"):
            assert "PLAIN" in column.encodings
            assert not column.has_dictionary_page
        if last in ("logprobs", "advantages"):
            assert "BYTE_STREAM_SPLIT" in column.encodings
            assert not column.has_dictionary_page
        if last in ("rollout_id", "outcome", "ids_grade", "masked_reason"):
            assert column.has_dictionary_page


def test_the_footer_says_what_it_is(out: Path) -> None:
    for table in TABLES:
        keys = parquet.read_footer(pq.read_metadata(part(out, table)))
        assert keys["orchard.schema_version"] == "1.0"
        assert keys["orchard.producer"].startswith("orchard-proxy ")
        assert keys["orchard.table"] == table
        accounting = json.loads(keys["orchard.accounting"])
        assert accounting["sampled"] == accounting["trained"] + sum(accounting["masked"].values())


def test_the_manifest_lists_every_file(out: Path) -> None:
    stated = manifest.read(out)
    listed = {entry.path for entry in stated.files} | {manifest.NAME}
    assert listed == {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert stated.counts == manifest.Counts(rollouts=3, calls=12, samples=8, running_rollouts=1)
    assert stated.invariant == stated.accounting.line()


def test_the_same_record_gives_the_same_files(tmp_path: Path) -> None:
    items = varied()
    first, second = write(items, tmp_path / "a"), write(items, tmp_path / "b")
    assert first.files == second.files


def test_json_that_no_parser_takes_is_written_valid(tmp_path: Path) -> None:
    odd = Recording("odd", metadata=msgspec.Raw(b'{"a": NaN}'), model="half \ud800")
    odd.call([1], [2], messages=msgspec.Raw(b'["\\ud800", Infinity]'), tools=msgspec.Raw(b"[{]"))
    write([odd.item()], tmp_path / "out")
    (call,) = pq.read_table(tmp_path / "out" / "calls").to_pylist()
    assert json.loads(call["messages"]) == ["\\ud800", "Infinity"]
    assert json.loads(call["tools"]) == {"_invalid": "[{]"}
    (rollout,) = pq.read_table(tmp_path / "out" / "rollouts").to_pylist()
    assert (json.loads(rollout["metadata"]), rollout["model"]) == ({"a": "NaN"}, "half \\ud800")
    (sample,) = pq.read_table(tmp_path / "out" / "samples").to_pylist()
    assert json.loads(sample["messages"])[:2] == ["\\ud800", "Infinity"]


def test_a_count_that_no_int32_holds_does_not_stop_the_export(tmp_path: Path) -> None:
    odd = Recording("odd")
    odd.call([1], [2], usage=Usage(prompt_tokens=10**12, completion_tokens=-(10**12)))
    write([odd.item()], tmp_path / "out")
    (call,) = pq.read_table(tmp_path / "out" / "calls").to_pylist()
    assert (call["usage_prompt_tokens"], call["usage_completion_tokens"]) == (None, None)


def test_an_accounting_that_does_not_hold_is_not_published(tmp_path: Path) -> None:
    item = varied()[0]
    wrong = item._replace(accounting=Accounting(sampled=5, trained=1, masked={}))
    with pytest.raises(ExportError, match="rollout main: sampled 5 = trained 1 does not add up"):
        write([wrong], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_row_groups_and_files_are_cut_by_size(tmp_path: Path) -> None:
    items = list(chains(3, 10, first=200, turn=10, answer=20))
    calls = [rows.call_row(call) for item in items for call in item.calls]
    with TableWriter(tmp_path / "calls", "calls", row_group_bytes=10_000, file_bytes=25_000) as writer:
        for row in calls:
            writer.add(row)
        files = writer.finish({"orchard.table": "calls"})
    assert len(files) > 1
    assert sum(n_rows for _, n_rows in files) == len(calls)
    groups = [
        pq.read_metadata(path).row_group(n) for path, _ in files for n in range(pq.read_metadata(path).num_row_groups)
    ]
    assert len(groups) > len(files)
    assert all(group.total_byte_size <= 10_000 for group in groups)
    assert pq.read_table(tmp_path / "calls").num_rows == len(calls)
    assert all(parquet.read_footer(pq.read_metadata(path)) == {"orchard.table": "calls"} for path, _ in files)


def test_a_row_larger_than_a_row_group_is_one_by_itself(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "calls", "calls", row_group_bytes=10) as writer:
        for call in varied()[0].calls[:3]:
            writer.add(rows.call_row(call))
        ((path, n_rows),) = writer.finish({})
    assert (n_rows, pq.read_metadata(path).num_row_groups) == (3, 3)


def test_memory_does_not_grow_with_the_number_of_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet.TableWriter.__init__, "__kwdefaults__", {"row_group_bytes": 2**18, "file_bytes": 2**30})
    (item,) = chains(1, 10, first=2000, turn=10, answer=20)
    peaks = []
    for count in (20, 200):
        tracemalloc.start()
        write((item for _ in range(count)), tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_a_failing_source_leaves_nothing(tmp_path: Path) -> None:
    def source() -> Item:
        yield varied()[0]
        raise RuntimeError("the disk went away")

    with pytest.raises(RuntimeError):
        write(source(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
