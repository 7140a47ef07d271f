"""What the proxy takes a policy server for, and what it does while it cannot tell."""

import asyncio
import contextlib

import pytest
from fakes.engine import ScriptedEngine, whole

from orchard_proxy.errors import UpstreamError
from orchard_proxy.upstream.client import HttpUpstream
from orchard_proxy.upstream.health import EngineWatch

ENTRY = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
TEXT = {"choices": [CHOICE]}
VLLM = {
    "choices": [{**CHOICE, "logprobs": {"content": [ENTRY]}, "token_ids": [5]}],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}


@contextlib.asynccontextmanager
async def watching(say, wanted="auto"):
    async with ScriptedEngine(say) as engine:
        async with HttpUpstream(engine.url, key=None, connect_s=1, silence_s=5) as upstream:
            async with EngineWatch(upstream, wanted) as watch:
                yield engine, watch


def refuses_fields(heard):
    """Answer as `transformers serve` does: 422 for a field that it does not know."""
    if heard.path != "/v1/chat/completions":
        return whole({"data": []})
    return whole({"detail": "unexpected"}, status=422) if b"return_token_ids" in heard.body else whole(TEXT)


@pytest.mark.parametrize(
    ("say", "name", "mode"),
    [
        pytest.param(lambda heard: whole(VLLM), "vllm", "raw", id="vllm"),
        pytest.param(lambda heard: whole(TEXT), "openai", "none", id="200-without-ids"),
        pytest.param(refuses_fields, "openai", "none", id="422-then-bare"),
    ],
)
async def test_it_looks_at_what_comes_back(say, name, mode):
    async with watching(say) as (_, watch):
        found = await watch.current()
    assert (found.engine.name, found.logprobs_mode) == (name, mode)


async def test_a_probe_generates_two_tokens_at_most_and_names_a_listed_model():
    def say(heard):
        return whole({"data": [{"id": "m-1"}]}) if heard.path == "/v1/models" else whole(VLLM)

    async with watching(say) as (engine, watch):
        await watch.current()
        asked = [heard.json for heard in engine.heard if heard.method == "POST"]
    assert sum(body["max_tokens"] for body in asked) <= 2
    assert {body["model"] for body in asked} == {"m-1"}


async def test_a_server_that_answers_nonsense_is_no_engine():
    async with watching(lambda heard: whole("<html>", content_type="text/html")) as (_, watch):
        with pytest.raises(UpstreamError, match="does not answer as one"):
            await watch.current()


async def test_who_waits_for_a_failing_probe_does_not_probe_again():
    async with watching(lambda heard: whole({}, before_head_s=0.2)) as (engine, watch):
        await asyncio.sleep(0.05)
        results = await asyncio.gather(*(watch.current() for _ in range(20)), return_exceptions=True)
        assert all(isinstance(result, UpstreamError) for result in results)
        assert len(engine.heard) <= 6


async def test_an_engine_that_is_busy_stays_what_it_was():
    answer = {"body": VLLM, "status": 200}

    async with watching(lambda heard: whole(answer["body"], status=answer["status"])) as (_, watch):
        first = await watch.current()
        answer.update(body={"error": "paused"}, status=503)
        watch.suspect("a call failed")
        assert await watch.current() is first


async def test_the_user_may_insist():
    async with watching(lambda heard: whole(TEXT), "vllm") as (_, watch):
        assert (await watch.current()).engine.name == "vllm"
