"""Tables on stdout: drawn by rich on a terminal, aligned plain text in a pipe, so that awk and diff can read them."""

import sys
from collections.abc import Sequence

import click

WIDEST = 40
"""Characters of a column that are kept whole on a terminal."""


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headers; None shows as `-`."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, cells)
        return
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for row in [list(headers), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich import box  # noqa: PLC0415 (only a terminal pays for it)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    used = [n for n in range(len(headers)) if not cells or any(row[n] != "-" for row in cells)]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for n in used:
        # Where the terminal is narrow the last column gives way, so that the others can be read and copied.
        widest = max(map(len, [headers[n], *(row[n] for row in cells)]))
        table.add_column(headers[n], no_wrap=True, min_width=None if n == used[-1] else min(widest, WIDEST))
    for row in cells:
        table.add_row(*(Text(row[n], style="dim" if row[n] == "-" else "") for n in used))
    Console().print(table)
