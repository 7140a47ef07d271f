"""Write an export: three tables, a manifest and a card, from an iterable of rollouts.

Knows nothing of where the rollouts come from. Memory is bounded by one rollout and one row group per table.
The invariant `sampled = trained + masked` is summed here and must hold, or nothing is published.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from orchard_proxy.errors import ExportError
from orchard_proxy.export import manifest, rows
from orchard_proxy.export.digest import sha256
from orchard_proxy.export.item import Item
from orchard_proxy.export.manifest import Counts, FileEntry, Manifest
from orchard_proxy.export.parquet import TableWriter
from orchard_proxy.export.publish import staged
from orchard_proxy.schema.columns import TABLES
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.records import Accounting, JournalDamage


def write(
    items: Iterable[Item],
    out: Path,
    *,
    overwrite: bool = False,
    damages: Callable[[], list[JournalDamage]] = list,
) -> Manifest:
    """Write an export to the folder `out` and return its manifest. Raise UsageError when `out` is taken.

    `damages` is asked, once all items are read, for what of the recording was lost; the manifest keeps it.
    """
    with staged(out, overwrite=overwrite) as stage:
        return _write(items, stage, damages)


def _write(items: Iterable[Item], stage: Path, damages: Callable[[], list[JournalDamage]]) -> Manifest:
    total = _Total()
    with ExitStack() as stack:
        tables = {name: stack.enter_context(TableWriter(stage / name, name)) for name in TABLES}
        for item in items:
            _add(item, tables)
            total.add(item)
        accounting = total.accounting()
        producer = manifest.producer()
        parts = {name: table.finish(manifest.footer(name, accounting, producer)) for name, table in tables.items()}
    counts = Counts(**{name: tables[name].rows for name in TABLES}, running_rollouts=total.running)
    (stage / manifest.CARD).write_text(manifest.card(counts, accounting))
    files = [_entry(stage, path, name, n) for name in TABLES for path, n in parts[name]]
    written = Manifest(
        producer=producer,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        counts=counts,
        accounting=accounting,
        invariant=accounting.line(),
        journal_damages=damages(),
        files=[*files, _entry(stage, stage / manifest.CARD)],
    )
    (stage / manifest.NAME).write_bytes(manifest.encode(written))
    return written


class _Total:
    """Sums the accounting of rollouts."""

    def __init__(self) -> None:
        self.running = 0
        self._sampled = 0
        self._trained = 0
        self._masked: Counter[str] = Counter()

    def add(self, item: Item) -> None:
        if not item.accounting.holds:
            raise ExportError(f"rollout {item.rollout.rollout_id}: {item.accounting.line()} does not add up.")
        self.running += item.rollout.status is RolloutStatus.RUNNING
        self._sampled += item.accounting.sampled
        self._trained += item.accounting.trained
        self._masked.update(item.accounting.masked)

    def accounting(self) -> Accounting:
        masked = {str(reason): n for reason, n in sorted(self._masked.items()) if n}
        return Accounting(sampled=self._sampled, trained=self._trained, masked=masked)


def _add(item: Item, tables: dict[str, TableWriter]) -> None:
    tables["rollouts"].add(rows.rollout_row(item.rollout, item.calls))
    for call in item.calls:
        tables["calls"].add(rows.call_row(call))
    for sample in item.samples:
        tables["samples"].add(rows.sample_row(sample, item.rollout))


def _entry(stage: Path, path: Path, table: str | None = None, n_rows: int | None = None) -> FileEntry:
    return FileEntry(
        path=path.relative_to(stage).as_posix(),
        bytes=path.stat().st_size,
        sha256=sha256(path),
        table=table,
        rows=n_rows,
    )
