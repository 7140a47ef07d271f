"""The unmodified openai SDK reads our streams: synthesised ones and error events, over a real socket."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import web
from fakes import twins

from orchard_proxy.wire import chat

TWINS = {(engine, twin.name): twin for engine in ("vllm", "llamacpp") for twin in twins.load(engine)}
HI: Any = [{"role": "user", "content": "hi"}]


class Canned:
    """An HTTP server that answers every POST with the events it is given."""

    def __init__(self) -> None:
        self.events: list[bytes] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in self.events:
            await reply.write(event)
        return reply


@pytest.fixture
async def canned() -> Canned:
    return Canned()


@pytest.fixture
async def client(canned: Canned) -> AsyncIterator[openai.AsyncOpenAI]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", canned.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as made:
        yield made
    await runner.cleanup()


@pytest.mark.parametrize("with_source", [False, True], ids=["one piece", "token pieces"])
@pytest.mark.parametrize(
    "key",
    [
        ("llamacpp", "a_chat"),
        ("llamacpp", "d2_n2"),
        ("llamacpp", "e5_real_tool_call"),
        ("llamacpp", "g_logprobs"),
        ("llamacpp", "k2_emoji"),
        ("vllm", "a_chat"),
        ("vllm", "d2_n2"),
        ("vllm", "g_logprobs"),
        ("vllm", "k2_emoji"),
    ],
    ids="-".join,
)
async def test_the_sdk_accumulates_the_whole_answer(
    client: openai.AsyncOpenAI, canned: Canned, key: tuple[str, str], with_source: bool
) -> None:
    twin = TWINS[key]
    request = chat.decode(b'{"stream":true,"stream_options":{"include_usage":true}}')
    canned.events = chat.synthesise(twin.plain_body, request, source=twin.instr_body if with_source else None)
    async with client.chat.completions.stream(model="m", messages=HI) as stream:
        kinds = [event.type async for event in stream]
        final = stream.current_completion_snapshot  # get_final_completion raises on finish_reason "length"
    whole = json.loads(twin.plain_body)
    assert "chunk" in kinds
    assert final.usage is not None
    assert final.usage.completion_tokens == whole["usage"]["completion_tokens"]
    assert len(final.choices) == len(whole["choices"])
    for choice, expected in zip(final.choices, whole["choices"], strict=True):
        assert choice.message.role == "assistant"
        assert (choice.message.content or "") == expected["message"]["content"]
        assert choice.finish_reason == expected["finish_reason"]
        got = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        asked = expected["message"].get("tool_calls") or []
        assert got == [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in asked]
        if expected.get("logprobs"):
            assert choice.logprobs is not None
            entries = [e["token"] for e in expected["logprobs"]["content"] if e["bytes"]]
            assert [e.token for e in choice.logprobs.content or []] == entries


async def test_parallel_tool_calls(client: openai.AsyncOpenAI, canned: Canned) -> None:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": json.dumps({"i": i})}}
        for i in range(3)
    ]
    message = {"role": "assistant", "content": None, "reasoning": "because", "tool_calls": calls}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    canned.events = chat.synthesise(json.dumps(body).encode(), chat.decode(b"{}"))
    async with client.chat.completions.stream(model="m", messages=HI) as stream:
        final = await stream.get_final_completion()
    got = final.choices[0].message.tool_calls
    assert got is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in got] == [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    assert final.choices[0].message.model_extra == {"reasoning": "because"}


async def test_an_error_event_raises_in_the_client(client: openai.AsyncOpenAI, canned: Canned) -> None:
    canned.events = [chat.error_event("The engine is gone.", type="upstream_error", code="upstream_cut")]
    with pytest.raises(openai.APIError, match="The engine is gone"):
        async for _ in await client.chat.completions.create(model="m", messages=HI, stream=True):
            pass
