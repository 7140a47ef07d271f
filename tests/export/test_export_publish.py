"""An export appears whole or not at all, and never in the place of something else."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from export_kit import varied

from orchard_proxy.errors import ExportError, UsageError
from orchard_proxy.export import publish
from orchard_proxy.export.publish import staged
from orchard_proxy.export.writer import write


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parents_are_made_and_an_empty_folder_is_taken(tmp_path: Path) -> None:
    write([], tmp_path / "a" / "b" / "out")
    (tmp_path / "empty").mkdir()
    write([], tmp_path / "empty")
    assert (tmp_path / "a" / "b" / "out" / "orchard.json").is_file()
    assert (tmp_path / "empty" / "orchard.json").is_file()


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "two-renames"])
def test_overwrite_replaces_the_whole(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(publish, "_exchanged", lambda *_: False)
    out = tmp_path / "out"
    write(varied(), out)
    (out / "samples" / "part-00007.parquet").write_bytes(b"of an older export")
    write([], out, overwrite=True)
    assert not (out / "samples" / "part-00007.parquet").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_overwrite_an_export_stays(tmp_path: Path) -> None:
    write(varied(), tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with pytest.raises(UsageError, match="--overwrite"):
        write([], tmp_path / "out")
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("name", "why"),
    [("thesis.txt", "it holds thesis.txt"), ("README.md", "it has no orchard.json")],
)
def test_overwrite_leaves_other_folders_alone(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("years of work")
    with pytest.raises(ExportError, match=why):
        write([], tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / name).read_text() == "years of work"


def test_overwrite_leaves_an_export_with_other_files_alone(tmp_path: Path) -> None:
    write([], tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"it holds notes\.txt"):
        write([], tmp_path / "out", overwrite=True)


def test_a_file_in_the_place_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        write([], tmp_path / "out", overwrite=True)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    write([], tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(varied(), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert snapshot(tmp_path / "real") == snapshot(tmp_path / "link")


def test_what_appears_while_we_write_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="exists already"), staged(out, overwrite=False) as stage:
        (stage / "x").write_text("ours")
        out.mkdir()
        (out / "theirs").write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "theirs").read_text() == "theirs"


SLOW = """
import sys, time
from pathlib import Path
from orchard_proxy.export.publish import staged
with staged(Path(sys.argv[1]), overwrite=True) as stage:
    (stage / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_export_leaves_the_old_one_and_the_next_tidies_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(varied(), out)
    before = snapshot(out)
    with subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        write(varied()[:1], tmp_path / "out2")
        with staged(out, overwrite=True):
            alive = [path for path in tmp_path.iterdir() if path.name.startswith(".out.export-")]
            assert len(alive) == 2, "an export at work is not tidied away"
        process.send_signal(signal.SIGKILL)
        process.wait()
    write(varied(), out, overwrite=True)
    assert snapshot(out).keys() == before.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out2"]


def test_readers_never_find_the_place_empty(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write([], out)
    watch = "import os, sys, time\nend = time.time() + 1.0\n"
    watch += "while time.time() < end:\n assert os.path.exists(sys.argv[1] + '/orchard.json')\nprint('always there')"
    with subprocess.Popen([sys.executable, "-c", watch, str(out)], stdout=subprocess.PIPE, text=True) as watcher:
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            write([], out, overwrite=True)
        said, _ = watcher.communicate()
    assert said == "always there\n"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    write([], tmp_path / "warm")
    before = len(list(Path("/proc/self/fd").iterdir()))
    write([], tmp_path / "out")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
