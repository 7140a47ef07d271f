"""`orchard export`: what was recorded, as Parquet."""

from functools import partial
from pathlib import Path

import click
import msgspec

from orchard_proxy.cli.options import counted, data_option, json_option
from orchard_proxy.export import source, writer
from orchard_proxy.export.manifest import Manifest, damage_lines


@click.command(name="export")
@data_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; it appears whole.")
@click.option("--overwrite", is_flag=True, help="Replace an older export there, in one step.")
@json_option
def command(*, data_dir: Path, out: Path, overwrite: bool, as_json: bool) -> None:
    """Write rollouts, calls and samples as Parquet.

    Everything that was recorded is derived first. OUT is a dataset folder for Hugging Face `datasets` (configs
    `samples`, `calls`, `rollouts`), and DuckDB, polars and pandas read its files. The invariant is printed:
    sampled = trained + masked, by reason. Damage to the journal is named on stderr and in orchard.json.
    """
    damages = partial(source.damages, data_dir)
    written = writer.write(source.items(data_dir), out, overwrite=overwrite, damages=damages)
    for line in damage_lines(written.journal_damages):
        click.echo(line, err=True)
    click.echo(_json(written, out) if as_json else _text(written, out))


def _text(written: Manifest, out: Path) -> str:
    counts = written.counts
    running = f" ({counts.running_rollouts} still running)" if counts.running_rollouts else ""
    rollouts, calls = counted(counts.rollouts, "rollout"), counted(counts.calls, "call")
    rows = f"{rollouts}{running}, {calls}, {counted(counts.samples, 'sample')}"
    return f"{written.invariant}\n{rows} → {out}"


def _json(written: Manifest, out: Path) -> str:
    return msgspec.json.encode({"out": str(out), **msgspec.structs.asdict(written)}).decode()
