"""Options that several verbs share, so that they are spelled and explained once."""

from pathlib import Path

import click

data_option = click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("orchard-data"),
    envvar="ORCHARD_DATA",
    show_default=True,
    help="Directory of the journal and the catalog.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s or, after a sibilant, es."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
