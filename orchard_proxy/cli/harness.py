"""`orchard harness ls|show|check`: which harnesses there are, how one is launched, whether it works here."""

import asyncio
from typing import Any

import click
import msgspec

from harness_images import registry
from harness_images.harness import ManifestHarness
from orchard_proxy.cli.options import json_option
from orchard_proxy.cli.table import print_table
from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.schema.launch import HarnessError

_USAGE = frozenset({"unknown_harness", "unknown_argument", "bad_manifest"})

harness_args = click.option(
    "--harness-arg", "words", multiple=True, metavar="NAME=VALUE", help="An argument of the harness; may be repeated."
)


@click.group(name="harness")
def command() -> None:
    """List agent programs, show how one is launched, or try one."""


@command.command("ls")
@json_option
def list_harnesses(*, as_json: bool) -> None:
    """List the bundled harnesses. One of your own is given as the path of its folder."""
    rows = asyncio.run(_rows())
    if as_json:
        click.echo(msgspec.json.encode(rows))
        return
    cells = [[_cell(value) for value in row.values()] for row in rows]
    print_table(list(rows[0]), cells)


@command.command("show")
@click.argument("name")
@harness_args
@json_option
def show(*, name: str, words: tuple[str, ...], as_json: bool) -> None:
    """Show the manifest of NAME, and the launch plan that follows from it."""
    harness = _find(name, words)
    shown = _described(harness) | {"manifest": harness.manifest, "plan": harness.outline()}
    if as_json:
        click.echo(msgspec.json.encode(shown))
        return
    click.echo(f"# {shown['folder']}/{registry.MANIFEST}")
    click.echo((harness.folder / registry.MANIFEST).read_text())
    click.echo(f"# installed: {shown['installed'] or 'no'}\n\n# launch plan")
    click.echo(msgspec.json.format(msgspec.json.encode(shown["plan"]), indent=2))


@command.command("check")
@click.argument("name")
@harness_args
@click.option(
    "--timeout",
    "timeout_s",
    default=300.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds for the harness.",
)
@json_option
def check(*, name: str, words: tuple[str, ...], timeout_s: float, as_json: bool) -> None:
    """Install NAME and run it once, in a sandbox, through the proxy, with a scripted model.

    Exit status 1: it does not work here; the step that failed says why.
    """
    from orchard_proxy.cli import harness_check  # noqa: PLC0415 (sandboxes and runner; ls and show need neither)

    def told(step: harness_check.Step) -> None:
        mark = "ok    " if step.ok else "FAILED"
        click.echo(f"{step.name:8} {mark} {step.seconds:6.1f} s  {step.detail}", err=as_json)

    checked = asyncio.run(harness_check.check(_find(name, words), timeout_s=timeout_s, told=told))
    if as_json:
        click.echo(msgspec.json.encode(checked))
    if not checked.ok:
        raise OrchardError(f"{checked.harness} {checked.version} does not work here; the record is in {checked.data}")
    click.echo(f"{checked.harness} {checked.version} works", err=as_json)


def _find(name: str, words: tuple[str, ...]) -> ManifestHarness:
    for word in words:
        if "=" not in word[1:]:
            raise UsageError(f"--harness-arg takes NAME=VALUE, not {word!r}")
    try:
        return registry.find(name, dict(word.split("=", 1) for word in words))
    except HarnessError as error:
        kind = UsageError if error.failure.code in _USAGE else OrchardError
        raise kind(str(error)) from error


async def _rows() -> list[dict[str, Any]]:
    found = [registry.find(name) for name in registry.names()]
    return [
        {
            "name": harness.name,
            "version": harness.version,
            "dialects": harness.manifest.dialects,
            "installed": await _installed(harness) is not None,
            "licence": harness.manifest.licence,
            "description": harness.manifest.description,
        }
        for harness in found
    ]


def _described(harness: ManifestHarness) -> dict[str, Any]:
    return {"folder": str(harness.folder), "installed": asyncio.run(_installed(harness))}


async def _installed(harness: ManifestHarness) -> str | None:
    try:
        return await harness.installed()
    except HarnessError:
        return None  # there can be none here; `check` says why


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) if isinstance(value, list) else value
