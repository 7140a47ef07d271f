"""`orchard export` and `orchard validate`, from the journal to files and back."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_kit import INVARIANT, orchard, record
from click.testing import CliRunner, Result

from orchard_proxy.cli import validate as validate_verb
from orchard_proxy.cli.main import cli
from orchard_proxy.schema.columns import TABLES


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "data")


@pytest.fixture
def out(data_dir: Path, tmp_path: Path) -> Path:
    assert run("export", "--data", data_dir, "--out", tmp_path / "out").exit_code == 0
    return tmp_path / "out"


def test_export_prints_the_invariant_and_what_still_runs(data_dir: Path, tmp_path: Path) -> None:
    result = run("export", "--data", data_dir, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        INVARIANT,
        f"2 rollouts (1 still running), 4 calls, 2 samples → {tmp_path / 'out'}",
    ]


def test_export_as_json(data_dir: Path, tmp_path: Path) -> None:
    said = json.loads(run("export", "--data", data_dir, "--out", tmp_path / "out", "--json").stdout)
    assert (said["invariant"], said["counts"]["samples"]) == (INVARIANT, 2)
    assert said["files"][0]["path"] == "rollouts/part-00000.parquet"


def test_what_was_recorded_is_what_is_exported(out: Path) -> None:
    rows = pq.read_table(out / "samples").to_pylist()
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
    assert [row["loss_mask"] for row in rows] == [[0, 0, 1, 1, 0, 1], [0, 1, 1]]
    assert [row["reward"] for row in rows] == [0.5, None]
    rollouts = pq.read_table(out / "rollouts").to_pylist()
    assert [row["status"] for row in rollouts] == ["completed", "running"]
    assert json.loads(rollouts[0]["metadata"]) == {"note": "first"}


def test_a_taken_folder_is_left_alone_without_overwrite(data_dir: Path, out: Path) -> None:
    before = (out / "orchard.json").read_bytes()
    result = run("export", "--data", data_dir, "--out", out)
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
    assert (out / "orchard.json").read_bytes() == before
    assert run("export", "--data", data_dir, "--out", out, "--overwrite").exit_code == 0


def test_an_empty_data_folder_gives_a_valid_empty_export(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    result = run("export", "--data", tmp_path / "data", "--out", tmp_path / "out")
    assert result.stdout.splitlines()[0] == "sampled 0 = trained 0"
    assert run("validate", tmp_path / "out").exit_code == 0
    for table in TABLES:
        assert pq.read_table(tmp_path / "out" / table).num_rows == 0
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("name", ["gone", "elsewhere"])
def test_a_folder_without_a_journal_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("mine")
    result = run("export", "--data", tmp_path / name, "--out", tmp_path / "out")
    assert (result.exit_code, "orchard serve" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_validate_says_valid(out: Path) -> None:
    result = run("validate", out)
    assert (result.exit_code, result.stdout) == (0, f"valid: 2 rollouts, 4 calls, 2 samples\n{INVARIANT}\n")


def test_validate_names_a_breach_and_exits_1(out: Path) -> None:
    table = pq.read_table(out / "samples")
    rewards = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(rewards, "reward", [[1.0, None]]), out / "samples/part-00000.parquet")
    done = orchard("validate", out)
    assert done.returncode == 1
    assert "samples samples/part-00000.parquet one-0: rollout_copy: reward is 1.0, its rollout's is 0.5" in done.stdout
    assert "not valid: " in done.stdout


def test_validate_prints_twenty_and_counts_all(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_verb, "PRINTED_BREACHES", 1)
    (out / "x").write_text("")
    (out / "y").write_text("")
    lines = run("validate", out).stdout.splitlines()
    assert lines[:2] == ["x: file_unlisted: not listed in the manifest", "… and 1 more; --json lists them"]
    assert lines[2].startswith("not valid: 2 breaches: ")


def test_validate_as_json(out: Path) -> None:
    (out / "x").write_text("")
    result = run("validate", out, "--json")
    said = json.loads(result.stdout)
    assert (result.exit_code, said["valid"], said["total_breaches"]) == (1, False, 1)
    assert said["breaches"][0]["rule"] == "file_unlisted"


def test_validate_refuses_what_is_no_export(tmp_path: Path) -> None:
    result = run("validate", tmp_path)
    assert (result.exit_code, "is not an Orchard export" in result.stderr) == (1, True)
    assert run("validate", tmp_path / "gone").exit_code == 2
