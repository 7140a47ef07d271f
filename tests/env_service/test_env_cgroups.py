"""Cgroup files, on a folder that looks like a hierarchy. (Real ones: test_env_limits_held.)"""

import pytest

from env_service import limits
from orchard_proxy.schema.sandbox import MIB, Limits


def version_1(root):
    for name in ("memory", "pids"):
        (root / name).mkdir()
        (root / name / "cgroup.procs").touch()


def version_2(root):
    (root / "cgroup.controllers").write_text("cpu memory pids")
    (root / "cgroup.subtree_control").touch()
    (root / "orchard").mkdir()
    (root / "orchard" / "cgroup.subtree_control").touch()


def test_version_1_is_two_hierarchies(tmp_path):
    version_1(tmp_path)
    found = limits.find(tmp_path)
    assert (found.version, found.memory, found.pids) == (1, tmp_path / "memory/orchard", tmp_path / "pids/orchard")
    folders = limits.make(found, "7", Limits(memory_bytes=64 * MIB, processes=10))
    assert folders == [tmp_path / "memory/orchard/7", tmp_path / "pids/orchard/7"]
    assert (folders[0] / "memory.limit_in_bytes").read_text() == str(64 * MIB)
    assert (folders[1] / "pids.max").read_text() == "74"
    (folders[0] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert limits.oom_kills(found, "7") == 3


def test_version_2_is_one(tmp_path):
    version_2(tmp_path)
    found = limits.find(tmp_path)  # it writes what it wants, and reads what it got
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert found.version == 0  # a plain file keeps the signs; a kernel would have said "memory pids"
    found = limits.Cgroups(version=2, memory=tmp_path / "orchard", pids=tmp_path / "orchard")
    (folder,) = limits.make(found, "7", Limits(memory_bytes=None, processes=10))
    assert not (folder / "memory.max").exists()
    (folder,) = limits.make(found, "7", Limits(memory_bytes=64 * MIB))
    assert (folder / "memory.max").read_text() == str(64 * MIB)
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert limits.oom_kills(found, "7") == 2


@pytest.mark.parametrize("prepare", [lambda _: None, lambda root: (root / "memory").mkdir()], ids=["none", "empty"])
def test_where_there_are_none_there_are_none(tmp_path, prepare):
    prepare(tmp_path)
    found = limits.find(tmp_path)
    assert found == limits.Cgroups(version=0)
    assert limits.make(found, "7", Limits()) == []
    assert limits.oom_kills(found, "7") == 0
