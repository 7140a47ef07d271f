"""What a command puts in the way of the files that its grader needs."""

import pytest

from orchard_proxy.schema.sandbox import MIB, SandboxError

DEEP = """import os
os.makedirs('t/g.py'); os.chdir('t/g.py')
for _ in range(3000): os.mkdir('d'); os.chdir('d')"""
TRAPS = {
    "folder": "mkdir -p t/g.py/sub; touch t/g.py/sub/x",
    "closed folder": "mkdir -p t/g.py/sub; touch t/g.py/sub/x; chmod 0 t/g.py/sub t/g.py",
    "file for a parent": "touch t",
    "pipe for a parent": "mkfifo t",
    "pipe": "mkdir t; mkfifo t/g.py",
    "dangling link for a parent": "ln -s /nowhere t",
    "link loop for a parent": "ln -s t t",
    "link to a file for a parent": "ln -s /etc/passwd t",
    "link to a system folder": "ln -s /usr t",
    "link to a folder's closed inside": "mkdir -p /tmp/a/b; ln -s /tmp/a/b t; chmod 0 /tmp/a",
    "link": "mkdir t; ln -s /etc/passwd t/g.py",
    "closed parent": "mkdir t; touch t/g.py; chmod 0 t/g.py t",
    "read-only parent": "mkdir t; chmod 0555 t",
    "closed workdir": "chmod 0 .",
    "read-only workdir": "chmod 0555 .",
    "all closed": "mkdir -p t/g.py; chmod 0 t/g.py t .",
    "deep": f'python3 -c "{DEEP}"',
    "many": "mkdir -p t/g.py/a; cd t/g.py/a; seq 20000 | xargs touch",
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())
async def test_a_file_comes_to_its_place_whatever_stands_there(sb, trap):
    assert (await sb.exec(trap)).ok
    await sb.write("t/g.py", b"grader")
    await sb.write("t/more/h.py", b"h")
    seen = await sb.exec("cat t/g.py t/more/h.py; ls -A . t")
    assert seen.stdout == b"graderh.:\nt\n\nt:\ng.py\nmore\n", seen


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())
async def test_so_does_a_folder(sb, tmp_path, trap):
    (tmp_path / "sub").mkdir()
    (tmp_path / "g.py").write_bytes(b"grader")
    (tmp_path / "sub" / "large").write_bytes(b"z" * 5 * MIB)
    (tmp_path / "link").symlink_to("g.py")
    assert (await sb.exec(trap)).ok
    await sb.upload(str(tmp_path), "t")
    seen = await sb.exec("cat t/link; wc -c < t/sub/large; ls -A t")
    assert seen.stdout == f"grader{5 * MIB}\ng.py\nlink\nsub\n".encode(), seen


async def test_a_large_file_is_no_other_matter(sb):
    await sb.exec("mkdir -p t/g.py/sub; chmod 0 t")
    await sb.write("t/g.py", b"z" * 9 * MIB)
    assert len(await sb.read("t/g.py")) == 9 * MIB


async def test_what_the_sandbox_needs_is_not_removed(sb):
    await sb.write("/tmp/kept", b"kept")
    await sb.write("kept", b"kept")
    for path in ("/workspace", "/tmp", "/home/agent", "/home", "/usr", "/usr/bin", "/", "/bin", "/run/orchard", "/etc"):
        with pytest.raises(SandboxError) as caught:
            await sb.write(path, b"")
        assert caught.value.failure.code in {"is_a_directory", "not_permitted", "read_only"}, path
    assert (await sb.exec("cat kept /tmp/kept")).stdout == b"keptkept"
    assert (await sb.exec("ls -A; ls -A /tmp")).stdout == b"kept\nkept\n"


async def test_what_links_lead_to_is_left_alone(sb):
    await sb.exec(
        "mkdir /tmp/there; echo 1 > /tmp/there/x; mkdir -p t/g.py; ln -s /tmp/there t/g.py/link; ln -s /tmp/there u"
    )
    await sb.write("t/g.py", b"")
    await sb.write("u/y", b"2")
    assert (await sb.exec("cat /tmp/there/x /tmp/there/y")).stdout == b"1\n2"
    await sb.write("u", b"a file now")
    assert (await sb.exec("ls /tmp/there; cat u")).stdout == b"x\ny\na file now"


async def test_what_stands_inside_of_an_uploaded_folder_gives_way(sb, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "large").write_bytes(b"z" * 5 * MIB)
    (tmp_path / "link").symlink_to("sub")
    await sb.exec("mkdir -p t/link/x t/sub/large/y; chmod 0 t/sub t/link; mkdir u; touch u/sub; ln -s /usr u/link")
    for target in ("t", "u"):
        await sb.upload(str(tmp_path), target)
        assert (
            await sb.exec(f"cd {target} && wc -c < link/large && ls -A")
        ).stdout == f"{5 * MIB}\nlink\nsub\n".encode()


async def test_a_command_starts_in_a_workdir_that_was_closed(sb):
    for mode in ("0", "0444"):
        await sb.exec(f"touch x; chmod {mode} .")
        assert (await sb.exec("ls -A; stat -c %A . | cut -c2-4")).stdout == b"x\nrwx\n"
