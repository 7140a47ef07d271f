"""Installs: real ones, of tiny packages; made once, made whole, made again when damaged."""

import asyncio
import os
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from install_kit import files_manifest, pip_manifest, slow_source, wheel

from harness_images import disk, install
from orchard_proxy.schema.launch import HarnessError

ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and pip with nothing but a local shelf."""
    shelf = tmp_path / "shelf"
    wheel(shelf)
    for name, value in {
        "ORCHARD_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(shelf),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache" / "harness"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "my-agent"
    folder.mkdir()
    (folder / "agent.py").write_text("print('hello')\n")
    return folder


@pytest.fixture
def gate(tmp_path):
    slow_source(tmp_path / "shelf", tmp_path / "gate")
    return tmp_path / "gate"


async def until(condition, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_package_is_installed_once_and_readable_for_all(source, cache):
    old = os.umask(0o077)
    try:
        made = await install.install(pip_manifest(), source)
    finally:
        os.umask(old)
    folder = Path(made.folder)
    assert run(folder / "bin" / "python", "-I", folder / "bin" / "quick-agent") == "quick\n"
    assert closed_paths(cache.parent) == []
    log = folder.with_name(f"{folder.name}.log")
    before = log.stat().st_mtime_ns
    began = time.perf_counter()
    assert await install.install(pip_manifest(), source) == made
    assert time.perf_counter() - began < 0.5
    assert log.stat().st_mtime_ns == before


def add_bytecode(folder: str) -> None:
    """Do what any user's run of the harness outside a sandbox does."""
    run(f"{folder}/bin/python", "-m", "compileall", "-q", folder)
    (Path(folder) / "__pycache__").mkdir(exist_ok=True)
    (Path(folder) / "__pycache__" / "agent.pyc").write_bytes(b"x")


def run(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def closed_paths(folder: Path) -> list[Path]:
    """What another user cannot read; locks and logs are nobody else's business."""
    found = [path for path in [folder, *folder.rglob("*")] if path.suffix not in (".lock", ".log")]
    return [path for path in found if not path.is_symlink() and not is_public(path)]


def is_public(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & stat.S_IROTH) and (not path.is_dir() or bool(mode & stat.S_IXOTH))


async def test_what_a_sandbox_shows_and_that_running_it_is_no_damage(source):
    made = await install.install(pip_manifest(), source)
    assert made.python_prefix == sys.base_prefix
    shown = [mount.source for mount in made.mounts()]
    assert made.folder in shown
    assert sys.base_prefix in shown or sys.base_prefix == "/usr"
    assert all(mount.source == mount.target for mount in made.mounts())
    add_bytecode(made.folder)
    assert await install.find(pip_manifest(), source) == made


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: (folder / "agent.py").unlink(), id="file-gone"),
        pytest.param(lambda folder: (folder / "agent.py").write_text(""), id="file-cut"),
        pytest.param(lambda folder: (folder / disk.MARKER).write_text("{"), id="marker-cut"),
        pytest.param(lambda folder: (folder / disk.MARKER).unlink(), id="marker-gone"),
        pytest.param(lambda folder: (folder / disk.MARKER).write_text('{"files":"1"}'), id="marker-of-another-shape"),
        pytest.param(lambda folder: (folder / "agent.py.part").touch(), id="file-too-many"),
    ],
)
async def test_a_damaged_install_is_made_again(source, damage):
    described = files_manifest("agent.py")
    made = await install.install(described, source)
    damage(Path(made.folder))
    assert await install.find(described, source) is None
    assert await install.install(described, source) == made
    assert (Path(made.folder) / "agent.py").read_text() == "print('hello')\n"
    assert not (Path(made.folder) / "agent.py.part").exists()


async def test_an_install_whose_python_is_gone_is_made_again(source):
    made = await install.install(pip_manifest(), source)
    python = Path(made.folder) / "bin" / "python"
    target = python.readlink()
    python.unlink()
    python.symlink_to("x" * len(str(target)))
    assert await install.find(pip_manifest(), source) is None
    await install.install(pip_manifest(), source)
    assert python.exists()


async def test_other_content_is_another_install(source):
    first = await install.install(files_manifest("agent.py"), source)
    (source / "agent.py").write_text("print('hallo')\n")
    second = await install.install(files_manifest("agent.py"), source)
    assert first.folder != second.folder
    assert await install.install(files_manifest("agent.py"), source) == second


async def test_nothing_to_install(tmp_path):
    made = await install.install(files_manifest(), tmp_path)
    assert (made.folder, made.mounts()) == ("", [])


async def test_two_at_once_build_once(source, gate):
    described = pip_manifest("slow-agent")
    first = asyncio.create_task(install.install(described, source))
    await until(gate.with_suffix(".started").exists)
    second = asyncio.create_task(install.install(described, source))
    await asyncio.sleep(0.5)
    assert not second.done()
    gate.with_suffix(".started").unlink()
    gate.touch()
    assert await first == await second
    assert not gate.with_suffix(".started").exists()  # nobody built a second time


async def test_a_cancelled_install_leaves_no_process_and_no_install(source, gate):
    described = pip_manifest("slow-agent")
    task = asyncio.create_task(install.install(described, source))
    await until(gate.with_suffix(".started").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not processes_with("slow-agent"), 10)
    assert await install.find(described, source) is None


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from harness_images import install
from install_kit import pip_manifest
asyncio.run(install.install(pip_manifest("slow-agent"), Path({source!r})))
"""


async def test_after_kill_9_the_next_one_waits_for_the_orphan_and_begins_afresh(source, gate):
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), source=str(source))
    process = start(code)
    await until(gate.with_suffix(".started").exists)
    process.kill()
    process.wait()
    described = pip_manifest("slow-agent")
    assert await install.find(described, source) is None
    task = asyncio.create_task(install.install(described, source))
    await asyncio.sleep(1.0)
    assert processes_with("slow-agent")  # the orphaned pip, still building, holds the lock
    assert not task.done()
    gate.touch()
    made = await task
    assert run(f"{made.folder}/bin/python", "-Ic", "import slow_agent; print(slow_agent.VERSION)") == "1.0\n"


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word in part for part in words) and "pip" in words:
            found.append(path.parent.name)
    return found


async def test_without_an_index_it_says_so(source, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(HarnessError) as raised:
        await install.install(pip_manifest(), source)
    assert raised.value.failure.code == "offline"
    assert raised.value.failure.retryable
    for part in ("No package index can be reached", "PIP_INDEX_URL", "quick-agent==1.0", str(disk.cache_dir()), ".log"):
        assert part in str(raised.value)


async def test_a_package_that_is_not_there(source):
    with pytest.raises(HarnessError, match=r"No matching distribution found for no-agent==1\.0") as raised:
        await install.install(pip_manifest("no-agent"), source)
    assert raised.value.failure.code == "install_failed"
    assert await install.find(pip_manifest("no-agent"), source) is None


async def test_a_file_that_is_not_there(source):
    with pytest.raises(HarnessError, match=r"names 'b\.py', but .*my-agent/b\.py is not a file"):
        await install.install(files_manifest("b.py"), source)


async def test_a_cache_that_cannot_be_used(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORCHARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(HarnessError, match="set ORCHARD_CACHE to another folder") as raised:
        await install.install(files_manifest("agent.py"), source)
    assert raised.value.failure.code == "cache_unusable"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({"ORCHARD_CACHE": "/c"}, "/c/harness", id="named"),
        pytest.param(
            {"XDG_CACHE_HOME": "/x"},
            "/var/cache/orchard/harness" if os.geteuid() == 0 else "/x/orchard/harness",
            id="by-user",
        ),
    ],
)
def test_where_the_cache_is(env, expected, monkeypatch):
    monkeypatch.delenv("ORCHARD_CACHE")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert str(disk.cache_dir()) == expected
