"""Files in and out of a sandbox."""

import os

import pytest

from orchard_proxy.schema.sandbox import MIB, Limits, SandboxError


async def code_of(awaitable) -> str:
    with pytest.raises(SandboxError) as caught:
        await awaitable
    return caught.value.failure.code


@pytest.mark.case("I01", "I04")
async def test_what_is_written_is_read(sb):
    for size in (0, 1, 200_000, 4 * MIB, 4 * MIB + 1, 41 * MIB):
        data = os.urandom(1) * size
        await sb.write("deep/er/file", data)
        assert await sb.read("/workspace/deep/er/file", limit_bytes=64 * MIB) == data
        assert (await sb.exec("wc -c < deep/er/file; ls -A deep/er")).stdout.split() == [str(size).encode(), b"file"]


async def test_modes_are_as_asked_and_nothing_becomes_setuid(sb):
    for mode in (0o644, 0o600, 0o755, 0o400):
        await sb.write("tool", b"#!/bin/sh\necho ran\n", mode=mode)
        assert (await sb.exec("stat -c %a tool")).stdout == f"{mode:o}\n".encode()
    await sb.write("setuid", b"", mode=0o4755)
    assert (await sb.exec("stat -c %a setuid")).stdout == b"755\n"


@pytest.mark.case("I10")
async def test_any_name_goes_round(sb):
    for name in ("n" * 255, "a b", "'\"", "$(x)", "-rf", "🌳", "line\n", "PATCH_EOF"):
        await sb.write(name, b"there")
        assert await sb.read(name) == b"there", name


@pytest.mark.case("I04", "I06", "I07")
async def test_failures_have_names_and_leave_the_old_file(make):
    sb = await make(limits=Limits(memory_bytes=64 * MIB))
    await sb.write("kept", b"old")
    assert await code_of(sb.write("kept", b"x" * 20 * MIB)) == "disk_full"
    assert await sb.read("kept") == b"old"
    assert (await sb.exec("ls -A")).stdout == b"kept\n"
    assert await code_of(sb.read("none")) == "no_such_file"
    assert await code_of(sb.read("kept/x")) == "no_such_file"
    assert await code_of(sb.read(".")) == "is_a_directory"
    assert await code_of(sb.read("/root/x")) in {"no_such_file", "not_permitted"}
    assert await code_of(sb.read("/dev/zero")) == "not_a_file"
    assert await code_of(sb.write("/usr/x", b"")) in {"not_permitted", "read_only"}
    assert await code_of(sb.write("/etc/passwd", b"")) in {"not_permitted", "read_only"}


@pytest.mark.case("I06")
async def test_large_files_and_pipes_hold_up_nobody(sb):
    await sb.exec("truncate -s 900M sparse; mkfifo pipe")
    assert await code_of(sb.read("sparse")) == "file_too_large"
    assert await code_of(sb.read("pipe")) == "not_a_file"
    assert len(await sb.read("/proc/self/status")) > 100  # a file that tells no size


async def test_a_folder_is_uploaded_as_it_is(sb, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/sh\ncat sub/data\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "sub" / "data").write_bytes(b"\0\xff")
    (tree / "sub" / "link").symlink_to("data")
    (tree / "sub" / "dangling").symlink_to("/nowhere")
    (tree / "dirlink").symlink_to("sub")
    (tree / "large").write_bytes(b"z" * 9 * MIB)
    (tree / "shut").mkdir()
    (tree / "shut" / "in").write_text("x")
    (tree / "shut").chmod(0o555)
    os.mkfifo(tree / "pipe")
    await sb.upload(str(tree), "up")
    await sb.upload(str(tree / "run.sh"), "/tmp/one")
    seen = await sb.exec(
        "cd up && ./run.sh && find . | sort && readlink sub/link sub/dangling dirlink && wc -c < large"
    )
    words = "./dirlink ./large ./run.sh ./shut ./shut/in ./sub ./sub/dangling ./sub/data ./sub/empty ./sub/link"
    rest = [b"data", b"/nowhere", b"sub", str(9 * MIB).encode()]
    assert seen.stdout[2:].split() == [b".", *words.encode().split(), *rest], seen
    assert (await sb.exec("stat -c %a up/shut up/run.sh /tmp/one")).stdout.split() == [b"555", b"755", b"755"]
    assert await code_of(sb.upload(str(tmp_path / "none"), "x")) == "no_such_source"


async def test_files_written_from_outside_belong_to_the_agent(sb):
    await sb.write("a/b/c.txt", b"1")
    assert (await sb.exec("touch a/b/d && rm -r a && id -un")).stdout == b"agent\n"
