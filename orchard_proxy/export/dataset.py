"""Read an export back as records: what trainers and proofs open.

Needs the Parquet files alone (a copy without `orchard.json` reads too) and imports nothing that writes them, so that a
training environment can use it. A file of a newer major schema version is refused; columns that are newer than this
reader are ignored, columns that an older file lacks read as null. Memory is one batch, and the stored prompt parts once
`prompt_ids` is used.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from orchard_proxy.errors import ExportError
from orchard_proxy.export import arrow, rows
from orchard_proxy.export.manifest import refuse_newer
from orchard_proxy.export.parquet import read_footer, reading
from orchard_proxy.export.prompts import PromptIndex
from orchard_proxy.schema.columns import TABLES
from orchard_proxy.schema.packed import Int32s
from orchard_proxy.schema.records import Call, Rollout, Sample

BATCH_ROWS = 64
_PROMPT_COLUMNS = (
    "call_id",
    "prompt_known",
    "prompt_base_call_id",
    "prompt_base_choice",
    "prompt_shared",
    "prompt_new_ids",
    "choices",
)


class Dataset:
    """An export on disk. Raises ExportError where a path is none, or is newer than this reader."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = {table: sorted((self.path / table).glob("*.parquet")) for table in TABLES}
        missing = [table for table, files in self._files.items() if not files]
        if missing:
            raise ExportError(
                f"{self.path} is not an Orchard export: it has no {missing[0]}/*.parquet. "
                "Make one with `orchard export`."
            )
        for files in self._files.values():
            for file in files:
                _refuse_newer(file)

    def rollouts(self) -> Iterator[Rollout]:
        """Iterate over the rollouts."""
        return map(rows.rollout_of, self._rows("rollouts"))

    def calls(self) -> Iterator[Call]:
        """Iterate over the calls, each rollout's in the order of the file."""
        return map(rows.call_of, self._rows("calls"))

    def iter_samples(self) -> Iterator[Sample]:
        """Iterate over the training rows."""
        return map(rows.sample_of, self._rows("samples"))

    def prompt_ids(self, call_id: str) -> Int32s | None:
        """Return the whole prompt of a call as packed ids; None when they are not known."""
        return self._prompts.prompt_ids(call_id)

    @cached_property
    def _prompts(self) -> PromptIndex:
        index = PromptIndex()
        for row in self._rows("calls", _PROMPT_COLUMNS):
            index.add(row)
        return index

    def _rows(self, table: str, names: tuple[str, ...] | None = None) -> Iterator[dict[str, Any]]:
        for file in self._files[table]:
            yield from read_rows(file, table, names)


def read_rows(file: Path, table: str, names: tuple[str, ...] | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of one file, `names` alone when given. Raise ExportError when it cannot be read."""
    columns = tuple(column for column in TABLES[table] if names is None or column.name in names)
    with reading(file), pq.ParquetFile(file) as parquet:
        present = [column.name for column in columns if column.name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(BATCH_ROWS, columns=present):
            yield from arrow.rows(columns, batch)


def _refuse_newer(file: Path) -> None:
    with reading(file):
        footer = read_footer(pq.read_metadata(file))
    major, _, minor = footer.get("orchard.schema_version", "").partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ExportError(f"{file} was not written by Orchard: its footer has no orchard.schema_version.")
    refuse_newer((int(major), int(minor)), str(file))
