"""`orchard validate`: whether an export keeps every rule that its files alone can show."""

from pathlib import Path

import click
import msgspec

from orchard_proxy.cli.options import counted, json_option
from orchard_proxy.export.report import Report
from orchard_proxy.export.validate import validate

PRINTED_BREACHES = 20


@click.command(name="validate")
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
@json_option
@click.pass_context
def command(ctx: click.Context, *, out: Path, as_json: bool) -> None:
    """Check every invariant of the export OUT.

    Exit status 0 means that all hold. Otherwise each breach is printed with its table, file, row and rule, and the
    exit status is 1.
    """
    report = validate(out)
    click.echo(msgspec.json.encode(report).decode() if as_json else _text(report))
    ctx.exit(0 if report.valid else 1)


def _text(report: Report) -> str:
    lines = [breach.line() for breach in report.breaches[:PRINTED_BREACHES]]
    if report.total_breaches > len(lines):
        lines.append(f"… and {report.total_breaches - len(lines)} more; --json lists them")
    counts = ", ".join(counted(n, table.removesuffix("s")) for table, n in report.counts.items())
    verdict = "valid" if report.valid else f"not valid: {counted(report.total_breaches, 'breach')}"
    return "\n".join([*report.warnings, *lines, f"{verdict}: {counts}", report.invariant])
