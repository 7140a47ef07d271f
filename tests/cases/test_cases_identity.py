"""Cases 71, 72 and 74: who may call, by which carrier, and until when."""

import base64
import itertools
import json

import pytest
from case_kit import ADMIN, ASK, ASK_STREAM, CHAT, told, whole_server
from fakes.speech import Vllm, text

SPEAKER = Vllm(text("he", "llo"))
SECRET = "sk-no-rollout-has-this-key"


def bearer(key):
    return CHAT, {"Authorization": f"Bearer {key}"}


def basic_password(key):
    return CHAT, {"Authorization": "Basic " + base64.b64encode(f"user:{key}".encode()).decode()}


def basic_user(key):
    return CHAT, {"Authorization": "Basic " + base64.b64encode(f"{key}:".encode()).decode()}


CARRIERS = {
    "bearer": bearer,
    "bearer-lower-case": lambda key: (CHAT, {"authorization": f"bearer {key}"}),
    "bearer-spaces": lambda key: (CHAT, {"Authorization": f"Bearer   {key} "}),
    "basic-password": basic_password,
    "basic-user": basic_user,
    "x-api-key": lambda key: (CHAT, {"x-api-key": key}),
    "X-Api-Key": lambda key: (CHAT, {"X-Api-Key": key}),
    "x-goog-api-key": lambda key: (CHAT, {"x-goog-api-key": key}),
    "query": lambda key: (f"{CHAT}?key={key}", {}),
    "query-among-others": lambda key: (f"{CHAT}?alt=sse&key={key}&x=1", {}),
    "path": lambda key: (f"/r/{key}{CHAT}", {}),
}
"""Where a key may be."""


def error(body: bytes) -> dict:
    return json.loads(body)["error"]


# 71


@pytest.mark.case(71)
@pytest.mark.parametrize("status", ["completed", "failed", "aborted"])
async def test_a_call_after_the_finish_is_refused_and_not_recorded(tmp_path, status):
    """Whatever the carrier and however often; a new attempt at the same task works."""
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1", task_id="t", attempt=1)
        assert await server.call(key) == 200
        await server.admin("POST", "/rollouts/r1/finish", {"status": status, "reward": 1.0})
        for carry, ask in itertools.product(CARRIERS.values(), (ASK, ASK_STREAM)):
            path, headers = carry(key)
            got, body = await server.send("POST", path, ask, **headers)
            assert (got, error(body)["code"]) == (410, "rollout_finished")
            assert "POST /rollouts" in error(body)["message"]
        again = await server.create("r1-second", task_id="t", attempt=2)
        assert again != key
        assert await server.call(again) == 200
        assert server.generations == 2
        metrics = (await server.send("GET", "/metrics"))[1].decode()
        assert f'orchard_refused_total{{status="410"}} {2.0 * len(CARRIERS)}' in metrics
    record = told(tmp_path, "r1")
    assert len(record.calls) == 1
    assert record.rollout.status == status
    assert record.trained == [[5, 6, 2]]
    assert told(tmp_path, "r1-second").trained == [[5, 6, 2]]


@pytest.mark.case(71)
async def test_a_finished_rollout_stays_finished_after_a_restart(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1", task_id="t")
        await server.call(key)
        await server.admin("POST", "/rollouts/r1/finish", {"reward": 1.0})
    async with whole_server(SPEAKER, tmp_path) as server:
        assert await server.call(key) == 410
        assert await server.create("r1", task_id="t") == key
        assert await server.call(key) == 410
        status, _ = await server.admin("POST", "/rollouts", {"rollout_id": "r1", "task_id": "t", "attempt": 2})
        assert status == 409
        assert await server.call(await server.create("r1-2", task_id="t", attempt=2)) == 200
    assert len(told(tmp_path, "r1").calls) == 1


@pytest.mark.case(71)
async def test_a_reward_set_again_does_not_open_the_rollout(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1")
        await server.call(key)
        for reward in (0.0, 1.0):
            await server.admin("POST", "/rollouts/r1/finish", {"reward": reward})
            assert await server.call(key) == 410
    assert (told(tmp_path, "r1").rollout.reward, len(told(tmp_path, "r1").calls)) == (1.0, 1)


@pytest.mark.case(71)
async def test_the_models_of_a_finished_rollout_are_refused_too(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1")
        assert (await server.send("GET", "/v1/models", Authorization=f"Bearer {key}"))[0] == 200
        await server.admin("POST", "/rollouts/r1/finish", {})
        assert (await server.send("GET", "/v1/models", Authorization=f"Bearer {key}"))[0] == 410


# 72


NO_KEY = {
    "nothing": (CHAT, {}),
    "empty-bearer": (CHAT, {"Authorization": "Bearer "}),
    "bearer-alone": (CHAT, {"Authorization": "Bearer"}),
    "empty-authorization": (CHAT, {"Authorization": ""}),
    "other-scheme": (CHAT, {"Authorization": f"Digest {SECRET}"}),
    "broken-basic": (CHAT, {"Authorization": "Basic %%%"}),
    "empty-basic": (CHAT, {"Authorization": "Basic Og=="}),
    "empty-x-api-key": (CHAT, {"x-api-key": ""}),
    "empty-query": (f"{CHAT}?key=", {}),
    "empty-path": (f"/r/{CHAT}", {}),
}


@pytest.mark.case(72)
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open"])
async def test_a_call_without_a_key_is_refused_and_recorded_nowhere(tmp_path, opened):
    async with whole_server(SPEAKER, tmp_path, open=opened) as server:
        for (path, headers), ask in itertools.product(NO_KEY.values(), (ASK, ASK_STREAM)):
            status, body = await server.send("POST", path, ask, **headers)
            assert (status, error(body)["code"]) == (401, "missing_api_key"), (path, headers)
            assert error(body)["type"] == "authentication_error"
        assert server.generations == 0
        assert (await server.admin("GET", "/rollouts"))[1]["rollouts"] == []


UNKNOWN = [SECRET, "orch-" + "A" * 43, "r1", "default-key", "none", "EMPTY"]


@pytest.mark.case(72)
async def test_an_unknown_key_is_refused_and_merged_nowhere(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        real = await server.create("r1")
        keys = [*UNKNOWN, real[:-1], real + "x", real.lower(), real.removeprefix("orch-")]
        for (name, carry), key in itertools.product(CARRIERS.items(), keys):
            path, headers = carry(key)
            status, body = await server.send("POST", path, ASK, **headers)
            assert (status, error(body)["code"]) == (401, "invalid_api_key"), (name, key)
            assert "POST /rollouts" in error(body)["message"]
            assert key not in error(body)["message"]
        assert server.generations == 0
        shown = (await server.admin("GET", "/rollouts"))[1]["rollouts"]
    assert [rollout["rollout_id"] for rollout in shown] == ["r1"]
    assert told(tmp_path, "r1").calls == []


@pytest.mark.case(72)
async def test_the_key_of_another_server_is_unknown(tmp_path):
    """The same rollout id does not make the same key: each data folder has its secret."""
    async with whole_server(SPEAKER, tmp_path / "a") as server:
        key = await server.create("r1")
    async with whole_server(SPEAKER, tmp_path / "b") as server:
        await server.create("r1")
        assert await server.call(key) == 401


@pytest.mark.case(72)
async def test_a_key_that_is_no_text_is_refused(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        for value in (
            "Bearer \u00fc\u00fc",
            "Bearer \udcff\udcfe".encode("utf-8", "surrogateescape").decode("latin-1"),
        ):
            status, body = await server.send("POST", CHAT, ASK, Authorization=value)
            assert (status, error(body)["code"]) == (401, "invalid_api_key")
        status, _ = await server.send("POST", f"{CHAT}?key=%ff%fe", ASK)
        assert status == 401
        status, _ = await server.send("POST", f"/r/%ff%fe{CHAT}", ASK)
        assert status == 401
        assert server.generations == 0


@pytest.mark.case(72)
async def test_open_mode_makes_one_rollout_for_each_label(tmp_path):
    """No label is a default: what has none is refused, what has one is kept apart."""
    async with whole_server(SPEAKER, tmp_path, open=True) as server:
        for label in ("a", "b", "a"):
            assert await server.call(label) == 200
        assert await server.call(SECRET) == 200
        _, shown = await server.admin("GET", "/rollouts")
    names = [rollout["rollout_id"] for rollout in shown["rollouts"]]
    assert names[:2] == ["a", "b"]
    assert names[2].startswith("anon-")
    assert [len(told(tmp_path, name).calls) for name in names] == [2, 1, 1]


# 74


@pytest.mark.case(74)
async def test_every_carrier_finds_its_rollout(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        keys = {name: await server.create(name) for name in CARRIERS}
        for (name, carry), ask in itertools.product(CARRIERS.items(), (ASK, ASK_STREAM)):
            path, headers = carry(keys[name])
            assert (await server.send("POST", path, ask, **headers))[0] == 200, name
            assert (await server.send("GET", path.replace(CHAT, "/v1/models"), **headers))[0] == 200, name
        assert all(key not in str(h.headers) + h.path for h in server.engine.heard for key in keys.values())
    for name in keys:
        assert told(tmp_path, name).trained == [[5, 6, 2]] * 2
    for file in tmp_path.rglob("*.orj"):
        assert all(key.encode() not in file.read_bytes() for key in keys.values())


PLACES = {name: CARRIERS[name] for name in ("bearer", "x-api-key", "x-goog-api-key", "query", "path")}


def joined(first, second):
    """Put two carriers into one request."""
    (path_a, headers_a), (path_b, headers_b) = first, second
    return (path_b if path_b != CHAT else path_a), {**headers_a, **headers_b}


@pytest.mark.case(74)
async def test_two_different_keys_conflict_wherever_they_are_and_equal_ones_do_not(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        one, two = await server.create("r1"), await server.create("r2")
        pairs = list(itertools.combinations(PLACES, 2))
        for a, b in pairs:
            if (a, b) == ("query", "path"):
                path, headers = f"/r/{two}{CHAT}?key={one}", {}
            else:
                path, headers = joined(PLACES[a](one), PLACES[b](two))
            status, body = await server.send("POST", path, ASK, **headers)
            assert (status, error(body)["code"]) == (400, "conflicting_keys"), (a, b)
            status, _ = await server.send(
                "POST",
                path.replace(two, one),
                ASK,
                **{name: value.replace(two, one) for name, value in headers.items()},
            )
            assert status == 200, (a, b)
        assert server.generations == len(pairs)
    assert len(told(tmp_path, "r1").calls) == len(pairs)
    assert told(tmp_path, "r2").calls == []


@pytest.mark.case(74)
@pytest.mark.parametrize("other", ["unknown", SECRET, ADMIN], ids=["unknown", "looks-like-openai", "admin"])
async def test_a_conflict_is_one_also_with_a_key_that_is_nobodys(tmp_path, other):
    """A harness that sends its own placeholder beside ours must be told, not guessed at."""
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1")
        for headers in ({"x-api-key": key}, {"x-goog-api-key": key}):
            status, _ = await server.send("POST", CHAT, ASK, Authorization=f"Bearer {other}", **headers)
            assert status == 400
        status, _ = await server.send("POST", f"/r/{key}{CHAT}", ASK, Authorization=f"Bearer {other}")
        assert status == 400
        assert server.generations == 0


@pytest.mark.case(74)
@pytest.mark.parametrize(
    ("name", "spelt"),
    [("Authorization", "Bearer {}"), ("x-api-key", "{}"), ("x-goog-api-key", "{}")],
    ids=["bearer", "x-api-key", "x-goog-api-key"],
)
async def test_one_carrier_sent_twice(tmp_path, name, spelt):
    """Two lines of one header, or two `key=`, are two carriers."""
    async with whole_server(SPEAKER, tmp_path) as server:
        one, two = await server.create("r1"), await server.create("r2")
        for second, wanted in ((two, 400), (one, 200)):
            lines = [(name, spelt.format(one)), (name, spelt.format(second))]
            async with server.session.post(server.url + CHAT, json=ASK, headers=lines) as answer:
                assert answer.status == wanted
        for second, wanted in ((two, 400), (one, 200)):
            assert (await server.send("POST", f"{CHAT}?key={one}&key={second}", ASK))[0] == wanted


@pytest.mark.case(74)
async def test_the_same_rules_hold_on_the_control_plane(tmp_path):
    async with whole_server(SPEAKER, tmp_path) as server:
        key = await server.create("r1")
        for carry in (bearer, basic_password, CARRIERS["x-api-key"]):
            _, headers = carry(ADMIN)
            assert (await server.send("GET", "/rollouts/r1", **headers))[0] == 200
            _, headers = carry(key)
            assert (await server.send("GET", "/rollouts/r1", **headers))[0] == 403
        status, _ = await server.send("GET", "/rollouts/r1", Authorization=f"Bearer {ADMIN}", **{"x-api-key": key})
        assert status == 400
