"""Fifty kill -9 of server and deriver at random moments under load: nothing that a client saw end is lost."""

import asyncio
import contextlib
import json
import random

import aiohttp
import pytest
from support.children import Child, kill_deriver, orchard, run

from orchard_proxy.record.catalog import Catalog

KILLS = 50
ADMIN = "kill-test"
ENDED = ("complete", "length")


class Load:
    """Clients that never stop asking, and what they saw end."""

    def __init__(self) -> None:
        self.url = ""
        self.ended: dict[str, str] = {}
        self.rewarded: dict[str, float] = {}
        self.stop = False

    async def run(self, clients: int) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(session, number))

    async def _client(self, session, number: int) -> None:
        for turn in range(100_000):
            if self.stop:
                return
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError):
                await self._rollout(session, f"r-{number}-{turn}", stream=(number + turn) % 2 == 0)
            await asyncio.sleep(0.01)

    async def _rollout(self, session, rollout_id: str, *, stream: bool) -> None:
        admin = {"Authorization": f"Bearer {ADMIN}"}
        body = {"rollout_id": rollout_id, "task_id": "t"}
        async with session.post(self.url + "/rollouts", json=body, headers=admin) as answer:
            key = (await answer.json())["api_key"]
        for step in range(2):
            marker = f"{rollout_id}/{step}"
            ask = {
                "model": "tiny",
                "messages": [{"role": "user", "content": marker}],
                "max_tokens": 12,
                "stream": stream,
            }
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(self.url + "/v1/chat/completions", json=ask, headers=headers) as answer:
                text = await answer.text()
                if answer.status == 200 and (not stream or text.endswith("data: [DONE]\n\n")):
                    self.ended[marker] = said(text, stream=stream)
        async with session.post(
            f"{self.url}/rollouts/{rollout_id}/finish", json={"reward": 0.5}, headers=admin
        ) as answer:
            if answer.status == 200:
                self.rewarded[rollout_id] = 0.5


def said(text: str, *, stream: bool) -> str:
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


async def torment(load: Load, data_dir, folder, upstream: str) -> int:
    """Start the server, let it live a moment, kill it; again and again. Return how many derivers were killed."""
    chance = random.Random(20)
    derivers = 0
    for _ in range(KILLS):
        flags = ["--upstream", upstream, "--data", str(data_dir), "--port", "0", "--admin-key", ADMIN]
        server = Child(["serve", *flags], folder / "serve.port", folder / "serve.log")
        load.url = f"http://127.0.0.1:{await asyncio.to_thread(server.wait_for_port)}"
        await asyncio.sleep(chance.uniform(0.05, 0.8))
        if chance.random() < 0.6:
            derivers += kill_deriver(data_dir)
            await asyncio.sleep(chance.uniform(0.0, 0.3))
        server.kill()
    load.stop = True
    return derivers


@pytest.mark.case(79)
@pytest.mark.timeout(600)
async def test_nothing_that_a_client_saw_end_is_lost(tmp_path):
    data_dir = tmp_path / "data"
    load = Load()
    with orchard("policy", "tiny", "--delay-s", "0.002", folder=tmp_path) as upstream:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(clients=8))
            derivers = await torment(load, data_dir, tmp_path, upstream)
        assert run("derive", "--data", str(data_dir)).returncode == 0
    assert len(load.ended) > KILLS
    assert derivers > 5
    by_marker, rewards = {}, {}
    with Catalog.open(data_dir) as catalog:
        for rollout in catalog.iter_rollouts():
            rewards[rollout.rollout_id] = rollout.reward
            for call in catalog.calls(rollout.rollout_id):
                marker = json.loads(bytes(call.messages))[0]["content"]
                by_marker.setdefault(marker, []).append(call)
    for marker, text in load.ended.items():
        texts = [
            json.loads(bytes(call.choices[0].message))["content"] for call in by_marker[marker] if call.outcome in ENDED
        ]
        assert text in texts, [(c.call_id, c.outcome, c.delivery, c.failure) for c in by_marker[marker]]
    assert {name: rewards[name] for name in load.rewarded} == load.rewarded
    assert all(len(calls) == 1 for calls in by_marker.values()), "no call was recorded twice"
    out = tmp_path / "export"
    assert run("export", "--data", str(data_dir), "--out", str(out)).returncode == 0
    checked = run("validate", str(out))
    assert checked.returncode == 0, checked.stdout + checked.stderr
