"""`orchard rollouts ls|show`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import INVARIANT, record
from click.testing import CliRunner, Result

from orchard_proxy.cli import table
from orchard_proxy.cli.main import cli
from orchard_proxy.record.catalog import Batch, Catalog
from orchard_proxy.record.segments import journal_dir
from orchard_proxy.record.stored import rollout_row
from orchard_proxy.schema.records import Rollout


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "data")


def test_ls_is_plain_columns_in_a_pipe(data_dir: Path) -> None:
    lines = run("rollouts", "ls", "--data", data_dir).stdout.splitlines()
    assert lines[0].split()[:4] == ["rollout_id", "status", "reward", "group_id"]
    assert lines[1].split()[:9] == ["one", "completed", "0.5", "g", "t", "1", "m", "3", "4"]
    assert lines[2].split()[:5] == ["two", "running", "-", "h", "-"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        pytest.param([], ["one", "two"], id="all"),
        pytest.param(["--status", "running"], ["two"], id="status"),
        pytest.param(["--group", "g"], ["one"], id="group"),
        pytest.param(["--group", "none"], [], id="no-such-group"),
        pytest.param(["--limit", "1"], ["two"], id="limit"),
    ],
)
def test_ls_as_json(data_dir: Path, options: list[str], listed: list[str]) -> None:
    result = run("rollouts", "ls", "--data", data_dir, "--json", *options)
    assert [row["rollout_id"] for row in json.loads(result.stdout)] == listed
    assert ("--limit" in result.stderr) is ("--limit" in options)


def test_ls_json_holds_the_record(data_dir: Path) -> None:
    row = json.loads(run("rollouts", "ls", "--data", data_dir, "--json").stdout)[0]
    assert (row["reward"], row["calls"], row["sampled_tokens"]) == (0.5, 3, 4)
    assert row["metadata"] == {"note": "first"}
    assert row["started_at"] == "2026-09-21T14:13:20.000Z"
    assert row["rewards"][0]["name"] == "tests"


def test_show_tells_each_call(data_dir: Path) -> None:
    result = run("rollouts", "show", "one", "--data", data_dir)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "rollout_id: one"
    assert "sampled 4 = trained 3 + 1 upstream_cut" in lines
    head = next(line for line in lines if line.startswith("seq ")).split()
    calls = [dict(zip(head, line.split(), strict=False)) for line in lines[-3:]]
    assert [(one["parent"], one["outcome"], one["sampled"], one["branches"], one["masked"]) for one in calls] == [
        ("-", "complete", "2", "0", "-"),
        ("0", "complete", "1", "0", "-"),
        ("0", "upstream_cut", "1", "-", "upstream_cut"),
    ]


def test_show_as_json(data_dir: Path) -> None:
    said = json.loads(run("rollouts", "show", "one", "--data", data_dir, "--json").stdout)
    assert said["invariant"] == "sampled 4 = trained 3 + 1 upstream_cut"
    assert [choice["masked"] for choice in said["choices"]] == [None, None, "upstream_cut"]
    assert said["samples"][0]["branch_reason"] == "main"
    assert INVARIANT.startswith("sampled 6")


def test_an_unknown_rollout_is_one_sentence_and_exit_1(data_dir: Path) -> None:
    result = run("rollouts", "show", "three", "--data", data_dir)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"orchard: {data_dir} has no rollout 'three'")


def test_an_empty_folder_lists_nothing(tmp_path: Path) -> None:
    assert json.loads(run("rollouts", "ls", "--data", tmp_path, "--json").stdout) == []
    assert run("rollouts", "show", "x", "--data", tmp_path).exit_code == 1


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    table.print_table(["name", "n", "empty"], [["[bold]x", 1, None], ["y" * 40, 2, None]])
    said = capsys.readouterr().out
    assert "y" * 40 in said
    assert "empty" not in said
    assert "─" in said
    assert "[bold]x" in said


def test_listing_does_not_load_arrow(data_dir: Path) -> None:
    script = "import sys\nfrom orchard_proxy.cli.main import cli\n"
    script += "cli(sys.argv[1:], standalone_mode=False)\nassert 'pyarrow' not in sys.modules"
    command = [sys.executable, "-c", script, "rollouts", "ls", "--data", str(data_dir)]
    subprocess.run(command, check=True, capture_output=True)


def test_the_newest_are_listed_oldest_first(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        made = [Rollout(rollout_id=f"r{n}", started_us=n) for n in range(5)]
        rows = [rollout_row(rollout, calls=0, sampled_tokens=0) for rollout in made]
        catalog.write(Batch(rollouts=rows))
    journal_dir(tmp_path).mkdir()
    listed = run("rollouts", "ls", "--data", tmp_path, "--limit", "3", "--json")
    assert [row["rollout_id"] for row in json.loads(listed.stdout)] == ["r2", "r3", "r4"]
    assert listed.stderr == "orchard: only the newest 3 are listed; more with --limit\n"
