"""One scripted policy server and one proxy for all tests of the runner that do not kill it."""

import itertools

import pytest
from runner_kit import SCRIPT, Served, a_house_at
from support.children import orchard

_RUNS = itertools.count()


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    (folder / "script.toml").write_text(SCRIPT)
    with orchard("policy", "tiny", "--script", str(folder / "script.toml"), folder=folder) as url:
        yield url


@pytest.fixture(scope="session")
def proxy(tmp_path_factory, policy):
    folder = tmp_path_factory.mktemp("proxy")
    data, socket = folder / "data", folder / "proxy.sock"
    with orchard("serve", "--upstream", policy, "--data", str(data), "--uds", str(socket), folder=folder) as url:
        socket.chmod(0o666)
        yield Served(url, (data / "admin.key").read_text().strip(), socket)


@pytest.fixture
async def house(proxy):
    async with a_house_at(proxy, run_id=f"run-{next(_RUNS)}") as made:
        yield made
