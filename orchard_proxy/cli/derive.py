"""`orchard derive`: fill the catalog from the journal. `serve` keeps one of these running with --follow."""

import os
import signal
import threading
from pathlib import Path

import click

from orchard_proxy.cli.options import data_option
from orchard_proxy.errors import UsageError
from orchard_proxy.export import source
from orchard_proxy.export.manifest import damage_lines
from orchard_proxy.record import deriver


@click.command(name="derive")
@data_option
@click.option("--follow", is_flag=True, help="Go on until the process that started this one ends.")
@click.option("--rebuild", is_flag=True, help="Empty the catalog first and derive all of the journal again.")
@click.option("--parent-pid", type=int, hidden=True, help="The process whose end --follow waits for.")
def command(*, data_dir: Path, follow: bool, rebuild: bool, parent_pid: int | None) -> None:
    """Fill the catalog from the journal.

    Everything in the catalog can be derived again; the journal is never changed. With --follow the process goes on
    as the journal grows, and on SIGTERM derives what is left and ends.
    """
    if follow and rebuild:
        raise UsageError("--follow goes on for ever and --rebuild begins again: run --rebuild first, by itself.")
    if not follow:
        if deriver.derive(data_dir, rebuild=rebuild):
            for line in damage_lines(source.damages(data_dir)):
                click.echo(line, err=True)
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    deriver.follow(data_dir, parent_pid or os.getppid(), stop.is_set)
