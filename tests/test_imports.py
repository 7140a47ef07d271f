"""The import contracts hold, and each of them would notice a violation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLANTED = [
    pytest.param("orchard_proxy/wire/sse.py", "from orchard_proxy.engines import base", "The rooms", id="upward"),
    pytest.param(
        "orchard_proxy/schema/packed.py", "import orchard_proxy.errors", "Schema imports nothing", id="schema"
    ),
    pytest.param("orchard_proxy/wire/sse.py", "import asyncio", "Pure rooms", id="asyncio-in-wire"),
    pytest.param("orchard_proxy/assemble/forest.py", "import pathlib", "Pure rooms", id="pathlib-in-assemble"),
    pytest.param("orchard_proxy/engines/vllm.py", "import aiohttp", "Pure rooms", id="aiohttp-in-engines"),
    pytest.param(
        "orchard_proxy/policy/fetch.py", "import orchard_proxy.record.journal", "embedded policy servers", id="policy"
    ),
    pytest.param("env_service/__init__.py", "import orchard_proxy.errors", "Sandboxes and harness", id="sandbox"),
    pytest.param("harness_images/manifest.py", "import pathlib", "Pure rooms", id="pathlib-in-manifest"),
    pytest.param("harness_images/fields.py", "import asyncio", "Pure rooms", id="asyncio-below-manifest"),
    pytest.param("harness_images/install.py", "import orchard_proxy.engines", "Sandboxes and harness", id="harness"),
    pytest.param("trainers/__init__.py", "import orchard_proxy.server.app", "Trainers read", id="trainers"),
    pytest.param("orchard_proxy/server/app.py", "import mitmproxy", "Only mitm", id="mitmproxy"),
    pytest.param("orchard_proxy/attic.py", "'''A room that is on no plan.'''", "The rooms", id="unplanned-room"),
]


def lint(folder: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder)}
    )


@pytest.mark.parametrize(("file", "line", "contract"), PLANTED)
def test_a_planted_violation_is_caught(tmp_path, file, line, contract):
    for package in ("orchard_proxy", "harness_images", "env_service", "trainers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    found = lint(tmp_path)
    assert found.returncode != 0
    broken = [text for text in found.stdout.splitlines() if text.endswith("BROKEN")]
    assert any(contract in text for text in broken), found.stdout


def test_the_tree_as_it_is_holds_every_contract():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout
