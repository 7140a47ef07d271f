import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))

from derive_kit import Scribe, calls_of

from orchard_proxy.cli.main import cli
from orchard_proxy.record import deriver


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
    assert "orchard serve" in result.output


def test_an_empty_folder_is_no_error_as_for_export(tmp_path, caplog):
    assert CliRunner().invoke(cli, ["derive", "--data", str(tmp_path)]).exit_code == 0
    assert "nothing was recorded there yet" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("garbage", [b"this is no database" * 400, b"SQLite format 3\0" + bytes(range(256)) * 64])
def test_a_catalog_of_garbage_is_one_sentence_and_rebuild_helps(tmp_path, garbage):
    Scribe(tmp_path).call("r", [1], [2])
    (tmp_path / "catalog.db").write_bytes(garbage)
    for verb in (["derive"], ["rollouts", "ls"], ["export", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(cli, [*verb, "--data", str(tmp_path)])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
        assert f"orchard derive --rebuild --data {tmp_path}" in result.stderr
    assert CliRunner().invoke(cli, ["derive", "--rebuild", "--data", str(tmp_path)]).exit_code == 0
    assert len(calls_of(tmp_path)) == 1


def test_pages_of_garbage_inside_a_catalog_are_one_sentence_too(tmp_path):
    scribe = Scribe(tmp_path)
    for number in range(50):
        scribe.call(f"r{number}", [1], [2])
    deriver.derive(tmp_path)
    whole = (tmp_path / "catalog.db").read_bytes()
    (tmp_path / "catalog.db").write_bytes(whole[:8192] + b"\xa5" * (len(whole) - 8192))
    result = CliRunner().invoke(cli, ["rollouts", "ls", "--data", str(tmp_path)])
    assert (result.exit_code, "--rebuild" in result.stderr) == (1, True)
    assert CliRunner().invoke(cli, ["derive", "--rebuild", "--data", str(tmp_path)]).exit_code == 0
    assert len(calls_of(tmp_path, "r49")) == 1


def read_only(data_dir, *arguments):
    """Run a verb where the folder is mounted read-only, in a mount namespace of its own."""
    script = f'mount --bind "{data_dir}" "{data_dir}" && mount -o remount,bind,ro "{data_dir}" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "orchard_proxy.cli.main", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def recorded(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    Scribe(tmp_path / "data").call("r", [1], [2])
    return tmp_path / "data"


def test_a_whole_catalog_is_read_where_nothing_can_be_written(recorded, tmp_path):
    deriver.derive(recorded)
    listed = read_only(recorded, "rollouts", "ls", "--data", recorded, "--json")
    assert [row["calls"] for row in json.loads(listed.stdout)] == [1], listed.stderr
    done = read_only(recorded, "export", "--data", recorded, "--out", tmp_path / "out")
    assert (done.returncode, "1 calls" in done.stdout or "1 call," in done.stdout) == (0, True), done.stderr


def test_one_that_is_not_whole_is_refused_with_a_sentence(recorded, tmp_path):
    refused = read_only(recorded, "export", "--data", recorded, "--out", tmp_path / "out")
    assert (refused.returncode, "Copy the folder" in refused.stderr) == (1, True)
    deriver.derive(recorded)
    Scribe(recorded, 2).call("r", [1, 2, 3], [4])
    refused = read_only(recorded, "rollouts", "ls", "--data", recorded)
    assert (refused.returncode, "bytes behind its journal" in refused.stderr) == (1, True)


def test_follow_and_rebuild_exclude_each_other(tmp_path):
    result = CliRunner().invoke(cli, ["derive", "--follow", "--rebuild", "--data", str(tmp_path)])
    assert result.exit_code == 2
