"""The `orchard` command: one table of verbs, each loaded only when it is called.

This module imports click and our error vocabulary and nothing else, so that `orchard --help` costs no more than
starting Python. A verb is one module with a click command named `command`; its one-line help stands in the table.

Exit status: 0 ok, 1 the work failed, 2 the caller asked for something that cannot be. Results go to stdout, logs and
errors to stderr. An error that Orchard raises on purpose is one sentence; a traceback appears only with `--debug`.
"""

import importlib
import logging
import sys
from typing import NoReturn

import click

from orchard_proxy.errors import OrchardError, UsageError

VERBS: dict[str, tuple[str, str]] = {
    "serve": ("orchard_proxy.cli.serve", "Run the recording proxy in front of a policy server."),
    "run": ("orchard_proxy.cli.run", "Run tasks through a harness in sandboxes, graded."),
    "harness": ("orchard_proxy.cli.harness", "List agent programs, show how one is launched, or try one."),
    "derive": ("orchard_proxy.cli.derive", "Fill the catalog from the journal, or rebuild it."),
    "rollouts": ("orchard_proxy.cli.rollouts", "List recorded rollouts, or show one call by call."),
    "export": ("orchard_proxy.cli.export", "Write rollouts, calls and samples as Parquet."),
    "validate": ("orchard_proxy.cli.validate", "Check every invariant of an export."),
    "prove": ("orchard_proxy.cli.prove", "Score recorded tokens again and compare."),
    "policy": ("orchard_proxy.cli.policy", "Run an embedded policy server: tiny or smollm2."),
}
"""Verb → (module with a click command named `command`, one line of help)."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        """Import the verb's module and return its command."""
        if cmd_name not in VERBS:
            return None
        try:
            command = importlib.import_module(VERBS[cmd_name][0]).command
        except ModuleNotFoundError as error:
            raise UsageError(_missing(cmd_name, error.name or "?")) from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """Write the table; click's own way would import every verb."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or suggest the nearest."""
        if args[0] not in VERBS and args[0][:1] != "-":
            raise click.exceptions.NoSuchCommand(args[0], possibilities=VERBS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; turn an error raised on purpose into one sentence and an exit status."""
        try:
            return super().invoke(ctx)
        except (OrchardError, OSError, BaseExceptionGroup) as error:
            cause = _purposeful(error)
            if cause is None or ctx.params.get("debug"):
                raise
            _fail(ctx, cause)


def _purposeful(error: BaseException) -> Exception | None:
    """Return the error to report in one sentence; None when it deserves a traceback."""
    if isinstance(error, BaseExceptionGroup):
        causes = [_purposeful(inner) for inner in error.exceptions]
        return None if None in causes else causes[0]
    if isinstance(error, BrokenPipeError):
        return None  # click ends quietly when the reader of a pipe has left
    return error if isinstance(error, OrchardError | OSError) else None


def _fail(ctx: click.Context, error: Exception) -> NoReturn:
    click.echo(f"orchard: {error}", err=True)
    ctx.exit(2 if isinstance(error, UsageError) else 1)


def _missing(verb: str, package: str) -> str:
    if package.startswith("orchard_proxy"):
        return f"`orchard {verb}` is not part of this installation ({package} is missing)."
    return (
        f"`orchard {verb}` needs the package {package}, which is not installed; run pip install 'orchard-proxy[all]'."
    )


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version  # noqa: PLC0415 (costs 20 ms that no other verb should pay)

        click.echo(f"orchard {version('orchard-proxy')}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="ORCHARD_DEBUG", help="Show tracebacks and debug logs.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def cli(debug: bool) -> None:
    """Record what a model inside an agent truly saw and said, as tokens, and train on it."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def main() -> None:
    """Run the command line; the entry point of the package."""
    cli(prog_name="orchard")


if __name__ == "__main__":
    main()
