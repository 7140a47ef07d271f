"""The proxy as a child: started, killed, started again, stopped; with real processes."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.runner.control import ControlClient
from orchard_proxy.runner.proxy import ProxyChild

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "say hello"}]}


async def ask(proxy, key):
    connector = aiohttp.UnixConnector(str(proxy.socket))
    async with aiohttp.ClientSession("http://h", connector=connector) as session:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post("/v1/chat/completions", json=HELLO, headers=headers) as answer:
            return answer.status, (await answer.json())["choices"][0]["message"]["content"]


async def test_the_folder_of_a_killed_runner_is_removed(tmp_path, policy):
    old = Path(tempfile.mkdtemp(prefix="orchard-"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spare").write_text(str(old))
    async with ProxyChild(tmp_path, ["--upstream", policy]):
        assert not old.exists()  # noqa: ASYNC240 (nothing else runs here)
        assert Path((tmp_path / "run" / "spare").read_text()).is_dir()  # noqa: ASYNC240
    assert not (tmp_path / "run" / "spare").exists()


async def test_a_killed_proxy_comes_back_on_the_same_socket(tmp_path, policy):
    async with ProxyChild(tmp_path, ["--upstream", policy]) as proxy:
        inode = proxy.socket.stat().st_ino
        async with ControlClient(lambda: proxy.url, proxy.admin_key) as control:
            key = (await control.create("r")).api_key
            assert await ask(proxy, key) == (200, "hello")
            for generation in (1, 2):
                os.kill(proxy.pid, signal.SIGKILL)
                asked = asyncio.create_task(ask(proxy, key))  # While nobody is there it waits.
                assert (await control.create("r")).api_key == key
                assert await asked == (200, "hello")
                assert proxy.generation == generation
            assert len(await control.calls("r")) == 3
        assert proxy.socket.stat().st_ino == inode
    assert not proxy.socket.exists()
    assert proxy.failed.cancelled()


async def test_the_agents_key_is_no_label_whatever_the_environment_says(tmp_path, policy, monkeypatch):
    monkeypatch.setenv("ORCHARD_SERVE__OPEN", "true")
    async with ProxyChild(tmp_path, ["--upstream", policy]) as proxy:
        connector = aiohttp.UnixConnector(str(proxy.socket))
        async with aiohttp.ClientSession("http://h", connector=connector) as session:
            async with session.post("/v1/chat/completions", json=HELLO, headers={"x-api-key": "any"}) as answer:
                assert answer.status == 401
            async with session.get("/rollouts", headers={"x-api-key": proxy.admin_key}) as answer:
                assert answer.status == 404, "the socket has no control plane, not even for the admin"


async def test_a_proxy_that_is_killed_while_it_starts_is_started_again(tmp_path, policy):
    entering = asyncio.create_task((child := ProxyChild(tmp_path, ["--upstream", policy])).__aenter__())
    while child.pid is None:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    proxy = await entering
    try:
        async with ControlClient(lambda: proxy.url, proxy.admin_key) as control:
            assert await ask(proxy, (await control.create("r")).api_key) == (200, "hello")
    finally:
        await proxy.__aexit__(None, None, None)


async def test_what_the_server_says_when_it_cannot_start(tmp_path):
    with pytest.raises(UsageError, match="--upstream is a URL"):
        async with ProxyChild(tmp_path, ["--upstream", "nonsense"]):
            pass
    assert not (tmp_path / "run" / "proxy.sock").exists()


async def test_two_runs_do_not_share_a_folder(tmp_path, policy):
    async with ProxyChild(tmp_path, ["--upstream", policy]) as proxy:
        with pytest.raises(UsageError, match="another `orchard run`"):
            async with ProxyChild(tmp_path, ["--upstream", policy]):
                pass
        assert proxy.socket.exists()


async def test_a_proxy_that_cannot_be_kept_alive_is_given_up(tmp_path, policy):
    async with ProxyChild(tmp_path, ["--upstream", policy], most_deaths=1) as proxy:
        proxy._flags[:] = ["--upstream", "nonsense"]
        os.kill(proxy.pid, signal.SIGKILL)
        with pytest.raises(OrchardError, match="cannot be kept alive"):
            async with asyncio.timeout(30):
                await proxy.failed


RUNNER = """
import asyncio, sys
from pathlib import Path
from orchard_proxy.runner.proxy import ProxyChild
async def main():
    async with ProxyChild(Path(sys.argv[1]), ["--upstream", sys.argv[2]]) as proxy:
        print(proxy.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_it_dies_with_a_runner_that_is_killed(tmp_path, policy):
    command = [sys.executable, "-c", RUNNER, str(tmp_path), policy]
    runner = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    pid = int(await runner.stdout.readline())
    assert psutil.pid_exists(pid)
    runner.kill()
    await runner.communicate()
    began = time.monotonic()
    async with ProxyChild(tmp_path, ["--upstream", policy]) as proxy:  # Waits for the old one to let go.
        assert proxy.pid != pid
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - began < 20


async def test_a_deep_folder_gets_a_socket_elsewhere(tmp_path, policy):
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    async with ProxyChild(deep, ["--upstream", policy]) as proxy:
        async with ControlClient(lambda: proxy.url, proxy.admin_key) as control:
            assert await ask(proxy, (await control.create("r")).api_key) == (200, "hello")
    assert not proxy.socket.parent.exists()
