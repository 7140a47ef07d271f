"""Tiny packages on a local shelf, so that installs are real and need no index."""

import textwrap
import zipfile
from pathlib import Path

from manifest_kit import manifest_with

from harness_images import manifest

BACKEND = """
import pathlib, time, zipfile
GATE = pathlib.Path({gate!r})

def build_wheel(folder, config_settings=None, metadata_directory=None):
    GATE.with_suffix(".started").touch()
    while not GATE.exists():
        time.sleep(0.05)
    name = "slow_agent-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("slow_agent.py", "VERSION = '1.0'")
        for file, text in {files!r}.items():
            wheel.writestr("slow_agent-1.0.dist-info/" + file, text)
    return name
"""


def dist_info(name: str) -> dict[str, str]:
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }


def wheel(shelf: Path) -> None:
    """Put the package `quick-agent` on a shelf: a module and a script."""
    shelf.mkdir(exist_ok=True)
    with zipfile.ZipFile(shelf / "quick_agent-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("quick_agent.py", "def main():\n    print('quick')\n")
        for file, text in dist_info("quick-agent").items():
            archive.writestr(f"quick_agent-1.0.dist-info/{file}", text)
        archive.writestr(
            "quick_agent-1.0.dist-info/entry_points.txt", "[console_scripts]\nquick-agent = quick_agent:main\n"
        )


def slow_source(shelf: Path, gate: Path) -> None:
    """Put `slow-agent` on a shelf: its build says that it has begun, then waits for the gate."""
    shelf.mkdir(exist_ok=True)
    backend = textwrap.dedent(BACKEND).format(gate=str(gate), files=dist_info("slow-agent"))
    toml = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    toml += '[project]\nname = "slow-agent"\nversion = "1.0"\n'
    with zipfile.ZipFile(shelf / "slow_agent-1.0.zip", "w") as archive:
        archive.writestr("slow_agent-1.0/pyproject.toml", toml)
        archive.writestr("slow_agent-1.0/backend.py", backend)
        archive.writestr("slow_agent-1.0/PKG-INFO", dist_info("slow-agent")["METADATA"])


def pip_manifest(package: str = "quick-agent") -> manifest.Manifest:
    return manifest.parse(manifest_with(f'[install]\nkind = "pip"\npackages = ["{package}==1.0"]'))


def files_manifest(*names: str) -> manifest.Manifest:
    return manifest.parse(manifest_with(f"[install]\nfiles = {list(names)}"))
