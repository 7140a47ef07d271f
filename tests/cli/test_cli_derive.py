import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))

from derive_kit import Scribe, calls_of

from orchard_proxy.cli.main import cli


def test_derive_fills_the_catalog_and_says_nothing(tmp_path):
    Scribe(tmp_path).call("r", [1], [2])
    result = CliRunner().invoke(cli, ["derive", "--data", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "")
    assert len(calls_of(tmp_path)) == 1


def test_rebuild_does_it_again(tmp_path):
    Scribe(tmp_path).call("r", [1], [2])
    for _ in range(2):
        assert CliRunner().invoke(cli, ["derive", "--rebuild", "--data", str(tmp_path)]).exit_code == 0
    assert len(calls_of(tmp_path)) == 1


def test_a_folder_without_a_journal_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(cli, ["derive", "--data", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "has no journal" in result.output


def test_follow_and_rebuild_exclude_each_other(tmp_path):
    result = CliRunner().invoke(cli, ["derive", "--follow", "--rebuild", "--data", str(tmp_path)])
    assert result.exit_code == 2
