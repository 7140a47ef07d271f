"""What a program inside can and cannot do. Each refusal has a control beside it: the same act where it is allowed."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from env_kit import needs_root

from orchard_proxy.schema.sandbox import Mount

PYTHON = ["python3", "-c"]


def status(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


@pytest.fixture
async def proxy_socket() -> AsyncIterator[str]:
    """Serve a data plane on a unix socket in a folder that only its owner can enter."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.path} {len(await request.read())}")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/proxy.sock"
        await web.UnixSite(runner, path).start()
        Path(path).chmod(0o666)
        yield path
        await runner.cleanup()


GET = "import urllib.request,sys;print(urllib.request.urlopen(sys.argv[1],timeout=5).read().decode())"


async def get(sb, url: str) -> bytes:
    result = await sb.exec([*PYTHON, GET, url], timeout_s=20)
    return result.stdout if result.ok else result.stderr.splitlines()[-1]


# --- who it is


async def test_seen_from_the_host_it_is_nobody_in_particular(sb):
    found = status(sb.pid)
    uids = found["Uid"].split()
    assert len(set(uids)) == 1
    assert uids[0] == str(os.geteuid()) if os.geteuid() else int(uids[0]) > 65536
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    assert {found[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert found["Groups"].strip() in {"", str(os.getegid())}


async def test_commands_are_as_bound_as_the_supervisor(sb):
    seen = (await sb.exec("cat /proc/self/status")).stdout.decode()
    found = dict(line.split(":\t", 1) for line in seen.splitlines() if ":\t" in line)
    assert (found["NoNewPrivs"], found["Seccomp"], found["CapEff"], found["CapBnd"]) == ("1", "2", "0" * 16, "0" * 16)


@needs_root
async def test_two_sandboxes_have_two_uids(make):
    one, two = await make(), await make()
    assert status(one.pid)["Uid"] != status(two.pid)["Uid"]


async def test_namespaces_are_its_own(sb):
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"):
        assert Path(f"/proc/{sb.pid}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink()


# --- files


@needs_root
async def test_a_host_secret_is_out_of_sight(sb, make, tmp_path):
    folder = tmp_path / "shown"  # pytest's own folder is 0700
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("hunter2")
    assert (await sb.exec(["cat", str(secret)])).exit_code != 0
    assert (await sb.exec("cat /etc/shadow")).exit_code != 0
    assert (await sb.exec("ls /root/.ssh /var /srv /mnt /home/*/.ssh /run/secrets")).stdout == b""
    # The control: where it is mounted and its mode allows, it can be read; with 0600 it cannot even then.
    shown = await make(mounts=[Mount(source=str(folder), target="/shown")])
    assert (await shown.exec("cat /shown/secret")).stdout == b"hunter2"
    secret.chmod(0o600)
    assert b"Permission denied" in (await shown.exec("cat /shown/secret")).stderr


async def test_a_mount_out_of_a_closed_home_is_visible_and_read_only(make):
    with tempfile.TemporaryDirectory() as home:  # 0700
        source = Path(home, "tool")
        source.mkdir()
        (source / "run").write_text("#!/bin/sh\necho tool\n")
        (source / "run").chmod(0o755)
        sb = await make(mounts=[Mount(source=str(source), target="/opt/tool")])
        assert (await sb.exec(["/opt/tool/run"])).stdout == b"tool\n"
        assert b"Read-only" in (await sb.exec("echo > /opt/tool/run")).stderr


WRITABLE = ["/workspace/x", "/home/agent/x", "/tmp/x", "/dev/shm/x"]
NOT_WRITABLE = ["/x", "/usr/x", "/usr/bin/x", "/etc/x", "/etc/passwd", "/dev/x", "/run/x", "/run/orchard/x", "/home/x"]


async def test_it_can_write_its_own_folders(sb):
    for path in WRITABLE:
        assert (await sb.exec(f"echo hi > {path} && cat {path}")).stdout == b"hi\n", path


async def test_further_folders_are_writable_where_asked_for(make):
    sb = await make(scratch=["/tests", "/logs/verifier"])
    assert (await sb.exec("echo hi > /tests/x; cat /tests/x; touch /logs/verifier/x /logs/x")).stdout == b"hi\n"
    assert (await sb.exec("ls /logs")).stdout == b"verifier\n"


async def test_it_can_write_nothing_else(sb):
    for path in (*NOT_WRITABLE, "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", sys.prefix):
        result = await sb.exec(f"echo hi > {path}")
        assert result.exit_code != 0, path
    assert not Path("/usr/x").exists()


GAINS = (
    "mount -t tmpfs none /mnt",
    "unshare -U true",
    "unshare -r true",
    "chroot / true",
    "su -c true",
    "mknod /tmp/sda b 8 0",
    "nsenter -t 1 -m true",
)


async def test_it_gains_no_rights(sb):
    for command in GAINS:
        assert (await sb.exec(command)).exit_code != 0, command


# --- processes


async def test_it_sees_its_own_processes_only(sb):
    inside = (await sb.exec("ls /proc")).stdout.split()
    pids = [int(name) for name in inside if name.isdigit()]
    assert 1 in pids
    assert len(pids) < 8
    assert (await sb.exec(f"kill -0 {os.getpid()}")).exit_code != 0


async def test_the_supervisors_files_and_memory_are_closed_to_commands(sb):
    assert b"Permission denied" in (await sb.exec("ls /proc/1/fd")).stderr
    assert b"Permission denied" in (await sb.exec("cat /proc/1/environ")).stderr
    assert (await sb.exec("ls /proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]  # 3: the folder itself


# --- network


@pytest.mark.case("N06")
async def test_there_is_no_network_but_the_proxy(make, proxy_socket):
    sb = await make(proxy_socket=proxy_socket)
    assert await get(sb, "http://127.0.0.1:8080/v1/models") == b"GET /v1/models 0\n"  # the control
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("0.0.0.0", 0)) as wide:
        targets = [f"http://127.0.0.1:{one.getsockname()[1]}/" for one in (server, wide)]
        own = [f"http://{address}:{wide.getsockname()[1]}/" for address in own_addresses()]
        outside = [
            "http://169.254.169.254/",
            "http://10.96.0.1/",
            "http://10.96.0.1:443/",
            "http://192.0.2.1:10250/",
            "http://1.1.1.1/",
            "http://[2606:4700::1111]/",
            "http://127.0.0.1:9090/",
            "http://localhost:22/",
            "http://example.com/",
        ]
        for url in (*targets, *own, *outside):
            assert b"rror" in await get(sb, url), url


def own_addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return [probe.getsockname()[0]]


@pytest.mark.case("N06")
async def test_another_sandbox_cannot_be_reached(make):
    one, two = await make(), await make()
    await one.exec("echo secret > index.html; (python3 -m http.server 8123 >/dev/null 2>&1 &); sleep 1")
    assert await get(one, "http://127.0.0.1:8123/index.html") == b"secret\n\n"
    assert b"rror" in await get(two, "http://127.0.0.1:8123/index.html")


@pytest.mark.case("N08")
async def test_without_proxy_variables_it_is_the_same_and_with_wrong_ones_too(make, proxy_socket):
    sb = await make(proxy_socket=proxy_socket)
    for proxy in ("", "http_proxy=http://10.0.0.1:3128 ", "no_proxy='*' "):
        result = await sb.exec(f"{proxy}python3 -c '{GET}' http://169.254.169.254/", timeout_s=20)
        assert result.exit_code != 0


@pytest.mark.case("N08")
async def test_unix_sockets_of_the_host_are_out_of_reach(sb, tmp_path):
    code = "import socket,sys;s=socket.socket(socket.AF_UNIX);a=sys.argv[1];s.connect('\\0'+a[1:] if a[0]=='@' else a)"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind("\0orchard-test-abstract")
        named.bind(str(tmp_path / "sock"))
        for server in (abstract, named):
            server.listen()
            server.settimeout(0)
        for address in ("@orchard-test-abstract", str(tmp_path / "sock"), "/run/docker.sock", "/var/run/docker.sock"):
            assert (await sb.exec([*PYTHON, code, address])).exit_code != 0, address
        with pytest.raises(BlockingIOError):
            abstract.accept()
        with socket.socket(socket.AF_UNIX) as client:  # the control
            client.connect("\0orchard-test-abstract")
    inside = (
        "import socket;l=socket.socket(socket.AF_UNIX);l.bind('\\0x');l.listen();"
        "c=socket.socket(socket.AF_UNIX);c.connect('\\0x')"
    )
    assert (await sb.exec([*PYTHON, inside])).ok


async def test_without_a_proxy_socket_there_is_no_network_at_all(sb):
    assert b"rror" in await get(sb, "http://127.0.0.1:8080/")
    assert (await sb.exec("ls /run/orchard")).stdout.split() == [b"lib"]


async def test_the_proxy_takes_large_bodies_and_many_connections(make, proxy_socket):
    sb = await make(proxy_socket=proxy_socket, proxy_port=9000)
    code = (
        "import urllib.request as u,concurrent.futures as f\n"
        "def go(n): return u.urlopen('http://127.0.0.1:9000/x',data=b'y'*n,timeout=30).read().decode()\n"
        "print(go(20_000_000))\n"
        "print(sum(a=='POST /x 1000' for a in f.ThreadPoolExecutor(50).map(go,[1000]*300)))"
    )
    result = await sb.exec([*PYTHON, code], timeout_s=60)
    assert result.stdout.decode().split("\n")[:2] == ["POST /x 20000000", "300"], result.stderr


async def test_a_flood_of_connections_leaves_room_for_commands(make, proxy_socket):
    sb = await make(proxy_socket=proxy_socket)
    code = (
        "import socket,resource,time\n"
        "h=resource.getrlimit(resource.RLIMIT_NOFILE)[1]\nresource.setrlimit(resource.RLIMIT_NOFILE,(h,h))\n"
        "held=[]\n"
        "def one():\n s=socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1',8080)); held.append(s)\n"
        "for _ in range(min(8000,h-50)): one()\n"
        "print(len(held),flush=True); time.sleep(60)"
    )
    flood = asyncio.create_task(sb.exec([*PYTHON, code], timeout_s=3, grace_s=0.2))
    await asyncio.sleep(1.8)
    assert (await sb.exec("echo alive", timeout_s=10)).stdout == b"alive\n"
    assert int((await flood).stdout) > 900
    await asyncio.sleep(0.2)
    assert await get(sb, "http://127.0.0.1:8080/after") == b"GET /after 0\n"


async def test_a_client_that_goes_away_is_seen_at_the_proxy(make, tmp_path):
    path = f"{tmp_path}/proxy.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        Path(path).chmod(0o666)
        server.listen()
        server.settimeout(10)
        sb = await make(proxy_socket=path)
        code = "import socket;s=socket.create_connection(('127.0.0.1',8080));s.sendall(b'half');s.close()"
        assert (await sb.exec([*PYTHON, code])).ok
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            assert connection.recv(100) == b"half"
            assert connection.recv(100) == b""


# --- system calls

CALL = """
import ctypes,os,sys
libc=ctypes.CDLL(None,use_errno=True)
r=libc.syscall(*[int(a,0) for a in sys.argv[1:]])
print(ctypes.get_errno() if r<0 else 0)
"""
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
CALLS = {
    "getpid": ((39,), 0),  # the control
    "ptrace": ((101, 0, 0, 0, 0), EPERM),
    "bpf": ((321, 0, 0, 0), EPERM),
    "perf_event_open": ((298, 0, 0, 0, 0, 0), EPERM),
    "keyctl": ((250, 0, 0), EPERM),
    "add_key": ((248, 0, 0, 0, 0, 0), EPERM),
    "userfaultfd": ((323, 0), EPERM),
    "io_uring_setup": ((425, 1, 0), ENOSYS),
    "kexec_load": ((246, 0, 0, 0, 0), EPERM),
    "init_module": ((175, 0, 0, 0), EPERM),
    "mount": ((165, 0, 0, 0, 0, 0), EPERM),
    "open_tree": ((428, 0, 0, 0), EPERM),
    "setns": ((308, 0, 0), EPERM),
    "unshare user": ((272, 0x10000000), EPERM),
    "unshare files": ((272, 0x400), 0),
    "clone new pid": ((56, 0x20000000 | 17, 0, 0, 0, 0), EPERM),
    "clone3": ((435, 0, 0), ENOSYS),
    "prlimit of another": ((302, 1, 7, 0, 0), EPERM),
    "prlimit own": ((302, 0, 7, 0, 0), 0),
    "unix socket": ((41, 1, 1, 0), 0),
    "inet socket": ((41, 2, 1, 0), 0),
    "inet6 socket": ((41, 10, 0x80801, 0), 0),
    "route netlink": ((41, 16, 3, 0), 0),  # the C library asks it which interfaces there are
    "audit netlink": ((41, 16, 2, 9), EPERM),
    "packet socket": ((41, 17, 3, 0), EAFNOSUPPORT),
    "vsock": ((41, 40, 1, 0), EAFNOSUPPORT),
    "alg socket": ((41, 38, 5, 0), EAFNOSUPPORT),
    "raw socket": ((41, 2, 3, 1), EPERM),
    "raw cloexec": ((41, 2, 0x80003, 1), EPERM),
    "TIOCSTI": ((16, 0, 0x5412, 0), EPERM),
    "TIOCSTI high bits": ((16, 0, 0x100005412, 0), EPERM),
    "x32 getpid": ((0x40000000 | 39,), ENOSYS),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers here are those of x86_64")
async def test_system_calls_are_filtered(sb):
    found = {}
    for name, (words, _) in CALLS.items():
        result = await sb.exec([*PYTHON, CALL, *map(str, words)])
        found[name] = int(result.stdout or -1)
    assert found == {name: wanted for name, (_, wanted) in CALLS.items()}
