"""Check an export: every invariant that its files alone can show.

Trusts nothing that it reads. All rules but one ask nothing of the code that wrote it, except the list of columns; the
one, `check_rebuilt`, builds the samples again. Memory grows with the stored token ids of the calls; samples are checked
one by one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from orchard_proxy.errors import ExportError
from orchard_proxy.export import manifest
from orchard_proxy.export.check_calls import Calls
from orchard_proxy.export.check_files import check_files
from orchard_proxy.export.check_rebuilt import Rebuilt
from orchard_proxy.export.check_rows import Rollouts
from orchard_proxy.export.check_samples import Samples
from orchard_proxy.export.check_totals import Totals
from orchard_proxy.export.dataset import read_rows
from orchard_proxy.export.manifest import Manifest
from orchard_proxy.export.report import Findings, Place, Report, Row, Rule
from orchard_proxy.schema.columns import TABLES

_KEYS = {"rollouts": "rollout_id", "calls": "call_id", "samples": "sample_id"}


def validate(folder: Path) -> Report:
    """Return the verdict over an export. Raise ExportError when the folder is none."""
    stated = manifest.read(folder)
    findings = Findings()
    readable = check_files(folder, stated, findings)
    if sum(map(len, readable.values())) == sum(entry.table in TABLES for entry in stated.files):
        invariant = _check_rows(folder, readable, stated, findings)
    else:
        invariant = "not checked: some rows cannot be read"
    return Report(
        valid=not findings.total,
        total_breaches=findings.total,
        breaches=findings.kept,
        counts={table: getattr(stated.counts, table) for table in TABLES},
        invariant=invariant,
        warnings=manifest.damage_lines(stated.journal_damages),
    )


def _check_rows(folder: Path, files: dict[str, list[Path]], stated: Manifest, findings: Findings) -> str:
    rollouts = Rollouts(findings)
    calls = Calls(rollouts, findings)
    totals = Totals(calls, findings)
    samples = Samples(rollouts, calls, totals, findings)
    read = [_each(folder, files, "rollouts", rollouts.add, findings)]
    rebuilt = Rebuilt(rollouts, _rollouts_of_calls(files["calls"]), findings)

    def add_call(row: Row, place: Place) -> None:
        calls.add(row, place)
        rebuilt.add_call(row)

    def add_sample(row: Row, place: Place) -> None:
        samples.add(row, place)
        rebuilt.add_sample(row, place)

    read.append(_each(folder, files, "calls", add_call, findings))
    rollouts.check_counts()
    calls.check_references()
    read.append(_each(folder, files, "samples", add_sample, findings))
    if all(read):
        rebuilt.check_missing("samples")
    return totals.check(stated).line() if all(read) else "not checked: some rows cannot be read"


def _rollouts_of_calls(files: list[Path]) -> Iterator[str]:
    """Yield the rollout of each call: with how many there are, one knows when a rollout is whole."""
    for file in files:
        try:
            yield from (row["rollout_id"] for row in read_rows(file, "calls", ("rollout_id",)))
        except ExportError:  # reported when the rows are checked
            return


def _each(
    folder: Path, files: dict[str, list[Path]], table: str, check: Callable[[Row, Place], None], findings: Findings
) -> bool:
    """Check each row of a table; False when a file cannot be read to its end."""
    for file in files[table]:
        name = file.relative_to(folder).as_posix()
        try:
            for row in read_rows(file, table):
                check(row, Place(table, name, row[_KEYS[table]]))
        except ExportError as error:
            findings.add(Rule.FILE_UNREADABLE, name, str(error))
            return False
    return True
