"""Finding a Python: the running one, one on PATH, or a sentence."""

import sys

import pytest

from harness_images import interpreters
from orchard_proxy.schema.launch import HarnessError

RUNNING = f"=={sys.version_info[0]}.{sys.version_info[1]}"


def shim(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


async def test_the_running_one_when_it_fits():
    found = await interpreters.find(RUNNING)
    assert (found.executable, found.prefix) == (sys.executable, sys.base_prefix)


async def test_else_the_newest_on_path_that_runs(tmp_path, monkeypatch):
    shim(tmp_path, "python3.19", "echo no version is set >&2; exit 127")  # as pyenv's shims do
    shim(tmp_path, "python3.18", 'echo "3 18 /opt/my python"')
    shim(tmp_path, "python3.17", 'echo "3 17 /opt/old"')
    monkeypatch.setenv("PATH", str(tmp_path))
    found = await interpreters.find(">=3.17")
    assert (found.executable, found.version, found.prefix) == (str(tmp_path / "python3.18"), (3, 18), "/opt/my python")


async def test_a_name_that_lies_is_not_taken(tmp_path, monkeypatch):
    shim(tmp_path, "python3.18", 'echo "3 7 /opt/old"')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match=r"needs Python >=3\.17; the running one is 3\.") as raised:
        await interpreters.find(">=3.17")
    assert raised.value.failure.code == "no_python"
    assert "put it on PATH" in str(raised.value)
