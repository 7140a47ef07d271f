"""The parts of the sandbox that do no I/O: framing, capture, argv, launch steps, uid ranges."""

import ast
import sys
from pathlib import Path

import pytest

from env_service import agent
from env_service.agent.capture import Capture
from env_service.agent.frames import Decoder, FrameError, encode
from env_service.backends import bwrap, launcher, slots
from orchard_proxy.schema.sandbox import MIB, Limits, Mount, SandboxSpec

# --- the agent


@pytest.mark.parametrize("path", sorted(Path(agent.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_the_agent_imports_the_standard_library_only(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(f"{node.module}")
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name for name in foreign if not name.startswith("env_service.agent")} == set()


# --- frames


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_messages_come_out_however_the_bytes_arrive(step):
    sent = [({"id": 1, "op": "x"}, b""), ({"id": 2, "ü": "\0"}, b"\0" * 300), ({}, b"z")]
    wire = b"".join(encode(*message) for message in sent)
    decoder = Decoder()
    found = [message for at in range(0, len(wire), step) for message in decoder.feed(wire[at : at + step])]
    assert found == sent


@pytest.mark.parametrize(
    "wire", [b"\xff" * 8, encode({})[:8] + b"[]", b"\0\0\0\2\0\0\0\0{]"], ids=["size", "list", "json"]
)
def test_what_is_no_message_is_an_error(wire):
    with pytest.raises(FrameError):
        list(Decoder().feed(wire))


# --- capture


@pytest.mark.parametrize("chunk", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 50_000])
def test_a_capture_keeps_both_ends_within_its_limit(size, chunk):
    whole = bytes(range(256)) * (size // 256 + 1)
    whole = whole[:size]
    capture = Capture(1000)
    for at in range(0, size, chunk):
        capture.feed(whole[at : at + chunk])
    value = capture.value()
    assert capture.total_bytes == size
    if size <= 1000:
        assert value == whole
        return
    assert len(value) == 1000
    head, tail = value[:500], value[-436:]
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert b"[%d bytes left out]" % (size - 936) in value


def test_a_capture_of_nothing_counts():
    capture = Capture(0)
    capture.feed(b"abc")
    assert (capture.value(), capture.total_bytes) == (b"", 3)


# --- argv


def layout(**wanted) -> bwrap.Layout:
    usual = {"system": [("/usr", ""), ("/bin", "usr/bin")], "etc": ["/etc/localtime"], "binds": [], "root": None}
    rest = {"data": {"/etc/passwd": 9}, "seccomp_fd": 7, "info_fd": 8, "scratch_bytes": {}}
    return bwrap.Layout(**{**usual, **rest, **wanted})


def words(spec: SandboxSpec | None = None, **wanted) -> list[str]:
    return bwrap.argv(spec or SandboxSpec(sandbox_id="x"), layout(**wanted), ["/python", "-c", "x"])


def has(found: list[str], *run: str) -> bool:
    return any(tuple(found[at : at + len(run)]) == run for at in range(len(found)))


@pytest.mark.parametrize(
    "run",
    [
        ("--unshare-all",),
        ("--unshare-user",),
        ("--disable-userns",),
        ("--cap-drop", "ALL"),
        ("--die-with-parent",),
        ("--new-session",),
        ("--clearenv",),
        ("--as-pid-1",),
        ("--seccomp", "7"),
        ("--remount-ro", "/"),
        ("--remount-ro", "/dev"),
        ("--ro-bind", "/usr", "/usr"),
        ("--symlink", "usr/bin", "/bin"),
        ("--ro-bind-data", "9", "/etc/passwd"),
    ],
    ids=" ".join,
)
def test_every_sandbox_has(run):
    found = words()
    assert has(found[: found.index("--")], *run)
    assert found[found.index("--") :] == ["--", "/python", "-c", "x"]


def test_nothing_of_the_host_is_bound_writable():
    assert not {"--bind", "--dev-bind", "--bind-try", "--share-net"} & set(words())


def test_outer_mounts_come_before_inner_ones():
    found = words(
        binds=[Mount(source="/s", target="/a/b/c"), Mount(source="/t", target="/opt")],
        scratch_bytes={"/a/b": 5, "/opt/work": 6, "/a": 7},
    )
    order = [found.index(target) for target in ("/a", "/a/b", "/a/b/c")]
    assert order == sorted(order)
    assert found.index("/opt") < found.index("/opt/work")
    assert has(found, "--size", "6", "--tmpfs", "/opt/work")


@pytest.mark.parametrize(
    ("root", "run"), [(None, ("--overlay-src", "/r", "--tmp-overlay", "/")), ("/s", ("--bind", "/s", "/"))]
)
def test_a_rootfs_takes_the_place_of_the_hosts_folders(root, run):
    found = words(SandboxSpec(sandbox_id="x", rootfs="/r"), root=root)
    assert has(found, *run)
    assert "/usr" not in found


@pytest.mark.parametrize("memory", [None, 64 * MIB, 2048 * MIB])
@pytest.mark.parametrize("more", [[], ["/tests"], ["/tests", "/logs", "/x"]], ids=len)
def test_writable_folders_leave_half_of_the_memory_to_programs(memory, more):
    sizes = bwrap.scratch(SandboxSpec(sandbox_id="x", scratch=more, limits=Limits(memory_bytes=memory)))
    assert sum(sizes.values()) <= (memory or 4096 * MIB) // 2
    assert set(sizes) == {"/workspace", "/home/agent", "/tmp", "/dev/shm", *more}


def test_the_candidates_of_etc_hold_no_secret():
    for path in bwrap.etc_candidates():
        assert not any(
            word in path for word in ("shadow", "private", "ssh", "sudo", "machine-id", "hostname", "passwd")
        )


# --- launcher


def test_the_launcher_gives_up_root_last():
    staging = launcher.Staging()
    staging.join(["/cg/1"])
    places = [staging.bind("/root/python"), staging.bind_at("/root/x.libs", "x.libs")]
    found = staging.argv(4711, ["bwrap", "--version"])
    assert places == ["/run/orchard/stage/0", "/run/orchard/stage/x.libs"]
    assert found[:4] == ["unshare", "--mount", "--propagation", "private"]
    assert has(found, "cgroup", "/cg/1", "bind", "/root/python", places[0], "bind", "/root/x.libs", places[1], "--")
    assert has(found, "setpriv", "--reuid", "4711", "--regid", "4711", "--clear-groups")
    assert found[-2:] == ["bwrap", "--version"]


# --- uids


@pytest.mark.parametrize(
    ("uid_map", "wanted"),
    [
        ("         0          0 4294967295\n", (slots.UID_BASE, slots.COUNT)),
        ("0 100000 65536\n", (32768, 16384)),
        ("0 1000 1\n1 100000 65536\n", (32769, 16384)),
    ],
    ids=["host", "container", "rootless"],
)
def test_uids_are_taken_from_what_there_is(uid_map, wanted):
    assert slots.uid_range(uid_map) == wanted


def test_a_slot_has_one_holder_and_a_crash_is_seen(tmp_path):
    one, two = slots.acquire(tmp_path), slots.acquire(tmp_path)
    assert (one.number, two.number, one.stale) == (0, 1, False)
    assert slots.take(tmp_path, 0) is None
    one.release()
    one.release()
    again = slots.acquire(tmp_path)
    assert (again.number, again.stale) == (0, False)
    assert slots.acquire(tmp_path, slots.COUNT + 5).number == 5
    assert slots.stale(tmp_path) == []
    (tmp_path / "77").touch()  # as a killed run leaves it
    left = slots.stale(tmp_path)
    assert [(slot.number, slot.stale) for slot in left] == [(77, True)]
    left[0].release()
    assert not (tmp_path / "77").exists()
