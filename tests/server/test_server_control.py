"""The control plane, the probes and the whole server, in this process with its real deriver as a child."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fakes.engine import ScriptedEngine, whole

from orchard_proxy.errors import JournalError, ListenError, UsageError
from orchard_proxy.server.serve import running
from orchard_proxy.settings import ServeSettings

ADMIN = "an-admin-key"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def answer_of(ids, prompt=(1, 2)):
    entries = [
        {"token": "x", "logprob": -0.25, "bytes": None, "top_logprobs": [{"token": "x", "logprob": -0.25}]} for _ in ids
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hello"},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": list(ids),
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return whole({"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": list(prompt)})


def say(heard):
    if heard.path == "/v1/models":
        return whole({"object": "list", "data": [{"id": "m"}]})
    return answer_of([5, 6, 7])


class Client:
    """Speaks to a server as the runner does."""

    def __init__(self, session, url):
        self.session, self.url = session, url

    async def ask(self, method, path, body=None, key=ADMIN):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, headers=headers) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text


@asynccontextmanager
async def server(data, say=say, **settings):
    async with ScriptedEngine(say) as engine, aiohttp.ClientSession() as session:
        made = ServeSettings(upstream=engine.url, data=str(data), port=0, admin_key=ADMIN, drain_s=0.5, **settings)
        async with running(made) as served:
            yield Client(session, served.url)


async def test_a_rollout_from_creation_to_samples(tmp_path):
    async with server(tmp_path) as client:
        status, made = await client.ask("POST", "/rollouts", {"rollout_id": "r1", "group_id": "g", "task_id": "t"})
        assert status == 201
        assert made["base_urls"] == {"openai": f"{client.url}/v1", "path": f"{client.url}/r/{made['api_key']}/v1"}
        assert (await client.ask("POST", "/v1/chat/completions", ASK, key=made["api_key"]))[0] == 200
        finish = {"status": "completed", "reward": 1.0, "rewards": {"correct": 1.0}, "metadata": {"note": "x"}}
        assert (await client.ask("POST", "/rollouts/r1/finish", finish))[1]["reward_version"] == 1
        status, found = await client.ask("GET", "/rollouts/r1/samples?wait_s=20")
        assert status == 200, found
        (sample,) = found["samples"]
        assert sample["token_ids"] == [1, 2, 5, 6, 7]
        assert sample["loss_mask"] == [0, 0, 1, 1, 1]
        assert sample["logprobs"] == [None, None, -0.25, -0.25, -0.25]
        assert sample["reward"] == 1.0
        assert found["accounting"] == {"sampled": 3, "trained": 3, "masked": {}}
        shown = (await client.ask("GET", "/rollouts/r1"))[1]
        assert (shown["status"], shown["reward"], shown["metadata"]) == ("completed", 1.0, {"note": "x"})
        assert [call["outcome"] for call in shown["calls"]] == ["complete"]
        assert [r["rollout_id"] for r in (await client.ask("GET", "/rollouts?group_id=g"))[1]["rollouts"]] == ["r1"]


async def test_creation_is_idempotent_by_id_and_survives_a_restart(tmp_path):
    body = {"rollout_id": "r1", "task_id": "t", "metadata": {"a": 1, "b": 2}}
    same = {"metadata": {"b": 2, "a": 1}, "task_id": "t", "rollout_id": "r1"}
    async with server(tmp_path) as client:
        first = await client.ask("POST", "/rollouts", body)
        again = await client.ask("POST", "/rollouts", same)
        assert (first[0], again[0]) == (201, 200)
        assert first[1]["api_key"] == again[1]["api_key"]
        assert (await client.ask("POST", "/rollouts", {**body, "attempt": 2}))[0] == 409
        await client.ask("POST", "/v1/chat/completions", ASK, key=first[1]["api_key"])
    async with server(tmp_path) as client:
        after = await client.ask("POST", "/rollouts", body)
        assert after[0] == 200
        assert after[1]["api_key"] == first[1]["api_key"]
        assert (await client.ask("POST", "/v1/chat/completions", ASK, key=after[1]["api_key"]))[0] == 200
        shown = (await client.ask("GET", "/rollouts/r1?wait_s=20"))[1]
    assert [call["seq"] for call in shown["calls"]] == [0, 1]


async def test_a_finished_rollout_takes_rewards_but_no_calls(tmp_path):
    async with server(tmp_path) as client:
        key = (await client.ask("POST", "/rollouts", {"rollout_id": "r1", "task_id": "t"}))[1]["api_key"]
        await client.ask("POST", "/rollouts/r1/finish", {"reward": 0.0, "rewards": {"a": 0.0, "b": 2.0}})
        status, refused = await client.ask("POST", "/v1/chat/completions", ASK, key=key)
        assert status == 410
        assert "POST /rollouts" in refused["error"]["message"]
        again = await client.ask("POST", "/rollouts/r1/finish", {"reward": 1.0, "rewards": {"a": 1.0}})
        assert again[1]["reward_version"] == 2
        shown = (await client.ask("GET", "/rollouts/r1?wait_s=20"))[1]
        assert (shown["reward"], shown["reward_version"], shown["calls"]) == (1.0, 2, [])
        assert {r["name"]: (r["value"], r["version"]) for r in shown["rewards"]} == {"a": (1.0, 2), "b": (2.0, 1)}
        another = await client.ask("POST", "/rollouts", {"rollout_id": "r1-2", "task_id": "t", "attempt": 2})
        assert (await client.ask("POST", "/v1/chat/completions", ASK, key=another[1]["api_key"]))[0] == 200
        assert b'orchard_refused_total{status="410"} 1.0' in (await client.ask("GET", "/metrics"))[1]


async def test_a_call_in_flight_at_finish_is_late(tmp_path):
    def slow(heard):
        said = say(heard)
        said.before_head_s = 0.5 if b'"hi"' in heard.body else 0
        return said

    async with server(tmp_path, slow) as client:
        key = (await client.ask("POST", "/rollouts", {"rollout_id": "r1"}))[1]["api_key"]
        call = asyncio.create_task(client.ask("POST", "/v1/chat/completions", ASK, key=key))
        await asyncio.sleep(0.25)
        await client.ask("POST", "/rollouts/r1/finish", {"reward": 1.0})
        assert (await call)[0] == 200
        found = (await client.ask("GET", "/rollouts/r1/samples?wait_s=20"))[1]
    assert found["accounting"] == {"sampled": 3, "trained": 0, "masked": {"late": 3}}


@pytest.mark.parametrize(
    ("key", "status"),
    [(None, 401), ("wrong", 401), ("ROLLOUT", 403)],
    ids=["none", "wrong", "a-rollouts"],
)
async def test_the_control_plane_is_the_admins(tmp_path, key, status):
    async with server(tmp_path, open=True) as client:
        made = (await client.ask("POST", "/rollouts", {"rollout_id": "r1"}))[1]
        used = made["api_key"] if key == "ROLLOUT" else key
        for method, path, body in [
            ("POST", "/rollouts", {}),
            ("GET", "/rollouts", None),
            ("GET", "/rollouts/r1", None),
            ("POST", "/rollouts/r1/finish", {"reward": 1.0}),
            ("GET", "/rollouts/r1/samples", None),
        ]:
            got, refused = await client.ask(method, path, body, key=used)
            assert got == status, (method, path)
            assert refused["error"]["message"].endswith(".")
        assert (await client.ask("GET", "/rollouts/r1"))[1]["status"] == "running"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/rollouts", b"{", 400),
        ("POST", "/rollouts", {"task": "misspelt"}, 400),
        ("POST", "/rollouts", {"rollout_id": "a b"}, 400),
        ("POST", "/rollouts", {"rollout_id": ""}, 400),
        ("POST", "/rollouts", {"attempt": 0}, 400),
        ("POST", "/rollouts", {"attempt": 2**31}, 400),
        ("POST", "/rollouts", b'{"metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", 400),
        ("POST", "/rollouts", {"rollout_id": ".."}, 400),
        ("POST", "/rollouts", {"rollout_id": "--help"}, 400),
        ("GET", "/rollouts?status=zz", None, 400),
        ("GET", "/rollouts?foo=1", None, 400),
        ("POST", "/rollouts", {"metadata": []}, 400),
        ("GET", "/rollouts?limit=0", None, 400),
        ("GET", "/rollouts?limit=x", None, 400),
        ("GET", "/rollouts/none", None, 404),
        ("GET", "/rollouts/none/samples", None, 404),
        ("POST", "/rollouts/none/finish", {}, 404),
        ("POST", "/rollouts/r1/finish", {"status": "great"}, 400),
        ("POST", "/rollouts/r1/finish", {"status": "running"}, 400),
        ("POST", "/rollouts/r1/finish", {"reward": "1"}, 400),
        ("POST", "/rollouts/r1/finish", b'{"reward": NaN}', 400),
        ("GET", "/rollouts/r1/samples?wait_s=soon", None, 400),
        ("GET", "/nothing", None, 404),
    ],
)
async def test_bad_requests_get_a_sentence(tmp_path, method, path, body, status):
    async with server(tmp_path) as client:
        await client.ask("POST", "/rollouts", {"rollout_id": "r1"})
        got, refused = await client.ask(method, path, body)
        assert got == status
        assert len(refused["error"]["message"]) > 10


async def test_a_second_finish_changes_only_what_it_says(tmp_path):
    async with server(tmp_path) as client:
        await client.ask("POST", "/rollouts", {"rollout_id": "r1"})
        failure = {"code": "c", "blame": "agent", "phase": "run"}
        await client.ask("POST", "/rollouts/r1/finish", {"status": "failed", "reward": 1.0, "failure": failure})
        await client.ask("POST", "/rollouts/r1/finish", {"metadata": {"a": 1}})
        shown = (await client.ask("GET", "/rollouts/r1?wait_s=20"))[1]
        assert (shown["status"], shown["reward"], shown["failure"]["code"]) == ("failed", 1.0, "c")
        await client.ask("POST", "/rollouts/r1/finish", {"status": "completed"})
        shown = (await client.ask("GET", "/rollouts/r1?wait_s=20"))[1]
        assert (shown["status"], shown["reward"], shown["failure"]) == ("completed", 1.0, None)


async def test_samples_right_after_an_answer_know_that_it_was_delivered(tmp_path):
    async with server(tmp_path) as client:
        key = (await client.ask("POST", "/rollouts", {"rollout_id": "r1"}))[1]["api_key"]
        await client.ask("POST", "/v1/chat/completions", ASK, key=key)
        found = (await client.ask("GET", "/rollouts/r1/samples?wait_s=20"))[1]
    assert found["accounting"] == {"sampled": 3, "trained": 3, "masked": {}}


async def test_a_label_that_goes_on_after_its_finish_is_late(tmp_path):
    """The reward was given before these tokens were sampled, so it is not theirs."""
    async with server(tmp_path, open=True) as client:
        await client.ask("POST", "/v1/chat/completions", ASK, key="lab")
        await client.ask("POST", "/rollouts/lab/finish", {"reward": 1.0})
        assert (await client.ask("POST", "/v1/chat/completions", ASK, key="lab"))[0] == 200
        found = (await client.ask("GET", "/rollouts/lab/samples?wait_s=20"))[1]
        assert (await client.ask("POST", "/rollouts", {"rollout_id": "lab"}))[0] == 409
    assert found["accounting"] == {"sampled": 6, "trained": 3, "masked": {"late": 3}}


@pytest.mark.parametrize("carrier", ["Authorization: Bearer \xff\xfe", "x-api-key: \xff", "x-goog-api-key: \xfe"])
@pytest.mark.parametrize("path", ["/rollouts", "/v1/chat/completions"])
async def test_a_key_that_is_no_text_is_a_wrong_key(tmp_path, carrier, path):
    async with server(tmp_path) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{carrier}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        writer.write(head.encode("latin-1"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()


async def test_an_address_that_cannot_be_had_is_named(tmp_path):
    async with server(tmp_path / "one") as client:
        port = int(client.url.rsplit(":", 1)[1])
        with pytest.raises(ListenError, match=str(port)):
            async with running(ServeSettings(data=str(tmp_path / "two"), port=port)):
                pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"admin_key": ""}, "--admin-key"),
        ({"uds": "/tmp/" + "x" * 120}, "--uds"),
        ({"upstream": "127.0.0.1:8001"}, "--upstream"),
        ({"upstream": "http://127.0.0.1:8001/v1"}, "--upstream"),
        ({"data": __file__}, "--data"),
    ],
)
async def test_settings_that_cannot_be_are_refused(tmp_path, settings, said):
    with pytest.raises(UsageError, match=said):
        async with running(ServeSettings(**{"data": str(tmp_path), "port": 0, **settings})):
            pass


async def test_probes(tmp_path):
    async with server(tmp_path) as client:
        assert (await client.ask("GET", "/healthz", key=None))[0] == 200
        async with asyncio.timeout(5):
            while (await client.ask("GET", "/readyz", key=None))[0] != 200:  # noqa: ASYNC110 -- HTTP has no event
                await asyncio.sleep(0.05)
        ready = (await client.ask("GET", "/readyz", key=None))[1]
        assert (ready["engine"], ready["logprobs_mode"]) == ("vllm", "raw")
        assert b"orchard_calls_in_flight" in (await client.ask("GET", "/metrics", key=None))[1]


async def test_it_starts_without_an_engine_and_finds_it_later(tmp_path):
    async with aiohttp.ClientSession() as session:
        probe = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = probe.sockets[0].getsockname()[1]
        probe.close()
        await probe.wait_closed()
        settings = ServeSettings(upstream=f"http://127.0.0.1:{port}", data=str(tmp_path), port=0, open=True)
        async with running(settings) as served:
            client = Client(session, served.url)
            status, why = await client.ask("GET", "/readyz", key=None)
            assert status == 503
            assert (await client.ask("POST", "/v1/chat/completions", ASK, key="lab"))[0] == 502
            why = (await client.ask("GET", "/readyz", key=None))[1]
            assert "--upstream" in why["reason"]
            async with ScriptedEngine(say, port=port):
                assert (await client.ask("POST", "/v1/chat/completions", ASK, key="lab"))[0] == 200
                assert (await client.ask("GET", "/readyz", key=None))[0] == 200


async def test_a_second_server_on_the_same_data_is_refused(tmp_path):
    async with server(tmp_path) as _:
        with pytest.raises(JournalError, match=str(tmp_path)):
            async with running(ServeSettings(data=str(tmp_path), port=0)):
                pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
async def test_open_mode_stays_on_loopback(tmp_path, host):
    with pytest.raises(UsageError, match="--open"):
        async with running(ServeSettings(data=str(tmp_path), host=host, open=True, port=0)):
            pass


async def test_the_unix_socket_serves_the_data_plane_only(tmp_path):
    path = tmp_path / "run" / "proxy.sock"
    async with server(tmp_path, open=True, uds=str(path)) as client:
        await client.ask("POST", "/rollouts", {"rollout_id": "r1"})
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            inside = Client(session, "http://sandbox")
            assert (await inside.ask("POST", "/v1/chat/completions", ASK, key="lab"))[0] == 200
            for target in ["/rollouts", "/rollouts/r1", "/metrics", "/readyz"]:
                assert (await inside.ask("GET", target))[0] == 404
            assert (await inside.ask("POST", "/rollouts/r1/finish", {"reward": 1.0}))[0] == 404


async def test_a_socket_left_by_a_killed_server_is_replaced(tmp_path):
    path = tmp_path / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with server(tmp_path / "data", uds=str(path)) as client:
        assert (await client.ask("GET", "/healthz", key=None))[0] == 200
