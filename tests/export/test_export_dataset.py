"""The dataset reader gives back what was recorded."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from export_kit import chains, export, rewrite, varied

from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.errors import ExportError
from orchard_proxy.export import manifest, rows
from orchard_proxy.export.dataset import Dataset
from orchard_proxy.export.prompts import PromptError
from orchard_proxy.export.writer import write

CALLS_FILE = "calls/part-00000.parquet"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return export(tmp_path / "out")


def repr_of(record: object) -> object:
    """Return a record in a form that compares: NaN equals NaN, and JSON equals by its bytes."""
    if isinstance(record, msgspec.Raw):
        return bytes(record)
    if isinstance(record, msgspec.Struct):
        return {name: repr_of(getattr(record, name)) for name in record.__struct_fields__}
    if isinstance(record, list):
        return [repr_of(item) for item in record]
    return repr(record)


def test_records_come_back_as_they_were(out: Path) -> None:
    dataset = Dataset(out)
    items = varied()
    for item in items:
        calls = [call for call in dataset.calls() if call.rollout_id == item.rollout.rollout_id]
        assert [repr_of(call) | {"commit_seq": 0} for call in calls] == [
            repr_of(call) | {"commit_seq": 0} for call in item.calls
        ]
    samples = [sample for item in items for sample in item.samples]
    assert repr_of(list(dataset.iter_samples())) == repr_of(samples)
    kept = [repr_of(msgspec.structs.replace(r, metadata=msgspec.Raw(b"{}"))) for r in dataset.rollouts()]
    assert kept == [repr_of(msgspec.structs.replace(i.rollout, metadata=msgspec.Raw(b"{}"))) for i in items]


@pytest.mark.parametrize("source", ["varied", "chains"])
def test_prompts_are_those_that_the_record_gives(tmp_path: Path, source: str) -> None:
    items = varied() if source == "varied" else list(chains(2, 60, first=100, turn=3, answer=5))
    write(items, tmp_path / "out")
    dataset = Dataset(tmp_path / "out")
    for item in items:
        resolver = PromptResolver(item.calls)
        for call in item.calls:
            expected = None if call.prompt is None else resolver.prompt_ids(call)
            assert dataset.prompt_ids(call.call_id) == expected


def test_an_unknown_call_is_an_error(out: Path) -> None:
    with pytest.raises(PromptError, match="no call xyz"):
        Dataset(out).prompt_ids("xyz")


def test_a_circle_of_prompts_is_an_error(out: Path) -> None:
    def change(table: list[dict[str, object]]) -> None:
        table[3].update(prompt_base_call_id=table[4]["call_id"])

    rewrite(out, "calls", change)
    with pytest.raises(PromptError, match="builds on itself"):
        Dataset(out).prompt_ids(varied()[0].calls[3].call_id)


def test_a_copy_without_a_manifest_reads(out: Path) -> None:
    (out / manifest.NAME).unlink()
    assert len(list(Dataset(str(out)).iter_samples())) == 8


def test_what_is_no_export_is_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ExportError, match=r"is not an Orchard export: it has no rollouts/\*\.parquet"):
        Dataset(tmp_path / "gone")
    (out / CALLS_FILE).write_bytes(b"PAR1")
    with pytest.raises(ExportError, match="cannot be read"):
        Dataset(out)


def footer(out: Path, version: str | None) -> None:
    table = pq.read_table(out / CALLS_FILE)
    with pq.ParquetWriter(out / CALLS_FILE, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({} if version is None else {"orchard.schema_version": version})


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        pytest.param("2.0", r"has schema 2\.0, this Orchard reads 1\.\d+; upgrade", id="newer-major"),
        pytest.param("x", "was not written by Orchard", id="nonsense"),
        pytest.param(None, "was not written by Orchard", id="absent"),
    ],
)
def test_a_file_that_we_cannot_understand_is_refused(out: Path, version: str | None, sentence: str) -> None:
    footer(out, version)
    with pytest.raises(ExportError, match=sentence):
        Dataset(out)


def test_a_newer_minor_is_read_and_its_columns_ignored(out: Path) -> None:
    table = pq.read_table(out / CALLS_FILE)
    pq.write_table(table.append_column("x", table["seq"]).drop_columns(["ttft_s"]), out / CALLS_FILE)
    footer(out, "1.99")
    calls = list(Dataset(out).calls())
    assert len(calls) == 12
    assert {call.ttft_s for call in calls} == {None}


def test_a_row_and_its_record_are_inverse() -> None:
    call = varied()[0].calls[1]
    assert repr_of(rows.call_of(rows.call_row(call))) == repr_of(call)


def test_reading_needs_nothing_that_records() -> None:
    script = "import sys, orchard_proxy.export.dataset\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    rooms = (
        "orchard_proxy.record",
        "orchard_proxy.assemble",
        "orchard_proxy.engines",
        "orchard_proxy.wire",
        "sqlalchemy",
    )
    assert [name for name in done.stdout.split() if name.startswith(rooms)] == []
