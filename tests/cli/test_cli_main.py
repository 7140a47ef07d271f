"""The `orchard` command as a whole: light, lazy, and clear about what went wrong."""

import importlib
import json
import subprocess
import sys

import click
import pytest
from cli_kit import cpu_s_of_children, orchard
from click.testing import CliRunner

from orchard_proxy.cli import main
from orchard_proxy.errors import ExportError, OrchardError, UsageError

HEAVY = ("pyarrow", "sqlalchemy", "aiohttp", "numpy", "rich", "prometheus_client", "xllamacpp", "tokenizers", "asyncio")
IMPORTED = "import sys, runpy, json, click\ntry:\n runpy.run_module('orchard_proxy.cli.main', run_name='__main__')\n"
IMPORTED += "finally:\n print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nothing"]], ids=" ".join)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, check=False)
    modules = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in modules if name.split(".")[0] in HEAVY] == []
    assert [name for name in modules if name.startswith("orchard_proxy.cli.")] == []


def test_help_costs_less_than_300_ms_of_cpu() -> None:
    costs = []
    for _ in range(3):
        before = cpu_s_of_children()
        assert orchard("--help").returncode == 0
        costs.append(cpu_s_of_children() - before)
    assert min(costs) < 0.3


def test_help_names_every_verb() -> None:
    said = orchard("--help").stdout
    for verb, (_, line) in main.VERBS.items():
        assert f"{verb} " in said
        assert line in said


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_has_a_command_and_help(verb: str) -> None:
    command = importlib.import_module(main.VERBS[verb][0]).command
    assert isinstance(command, click.Command)
    result = CliRunner().invoke(main.cli, [verb, "--help"])
    assert (result.exit_code, f"{verb}" in result.output) == (0, True)


def test_version() -> None:
    done = orchard("--version")
    assert (done.returncode, done.stdout.split()[0], done.stdout.count(".")) == (0, "orchard", 2)


@pytest.mark.parametrize(("typed", "meant"), [("exprot", "export"), ("rollout", "rollouts"), ("server", "serve")])
def test_an_unknown_verb_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    done = orchard(typed)
    assert done.returncode == 2
    assert meant in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    assert CliRunner().invoke(main.cli, ["--nonsense"]).exit_code == 2


def group_that(error: BaseException) -> click.Group:
    @click.command(cls=main.LazyGroup)
    @click.option("--debug", is_flag=True)
    def group(debug: bool) -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        pytest.param(OrchardError("The disk is full; free some."), 1, "The disk is full; free some.", id="failed"),
        pytest.param(ExportError("No export."), 1, "No export.", id="subclass"),
        pytest.param(UsageError("No such field."), 2, "No such field.", id="usage"),
        pytest.param(PermissionError(13, "Permission denied", "/x"), 1, "Permission denied: '/x'", id="system"),
        pytest.param(ExceptionGroup("tasks", [UsageError("Twice.")]), 2, "Twice.", id="group"),
        pytest.param(
            ExceptionGroup("tasks", [ExceptionGroup("inner", [OrchardError("Deep.")])]), 1, "Deep.", id="nested-group"
        ),
    ],
)
def test_an_error_raised_on_purpose_is_one_sentence(error: BaseException, status: int, sentence: str) -> None:
    result = CliRunner().invoke(group_that(error), ["export"])
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("orchard: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ZeroDivisionError("a bug"), id="bug"),
        pytest.param(ExceptionGroup("tasks", [OrchardError("x"), ZeroDivisionError("a bug")]), id="bug-in-a-group"),
    ],
)
def test_a_bug_keeps_its_traceback(error: BaseException) -> None:
    assert CliRunner().invoke(group_that(error), ["export"]).exception is error


def test_debug_shows_the_traceback() -> None:
    error = OrchardError("x")
    assert CliRunner().invoke(group_that(error), ["--debug", "export"]).exception is error


@pytest.mark.parametrize(("env", "shown"), [({}, False), ({"ORCHARD_DEBUG": "1"}, True)], ids=["quiet", "debug"])
def test_orchard_debug_in_the_environment(env: dict[str, str], shown: bool, tmp_path: object) -> None:
    done = orchard("export", "--data", f"{tmp_path}/gone", "--out", f"{tmp_path}/out", env=env)
    assert ("Traceback" in done.stderr) is shown
    assert done.returncode == (1 if shown else 2)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.VERBS, "needy", ("no_such_package_at_all", "x"))
    result = CliRunner().invoke(main.cli, ["needy"])
    assert result.exit_code == 2
    assert "needs the package no_such_package_at_all" in result.stderr
