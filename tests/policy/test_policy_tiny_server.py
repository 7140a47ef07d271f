"""The tiny server as clients see it: over sockets, and with the unmodified openai SDK."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time

import aiohttp
import numpy as np
import openai
import pytest
from tiny_kit import INSTRUMENTED, TOOLS, ask, serving

from orchard_proxy.errors import UsageError
from orchard_proxy.policy.tiny_server import TinyOptions, running

WEATHER = """
[[rule]]
turn = 1
last = 'weather in (\\w+)'
reasoning = "They ask for {1}."
text = "Let me look."
tool_calls = [{name = "get_weather", arguments = {city = "{1}"}}, {name = "get_weather", arguments = {city = "Rome"}}]

[[rule]]
last_role = "tool"
last = '\\d+'
text = "It is {0} degrees in é 🦊."
"""


@pytest.fixture
async def tiny():
    async with serving() as client:
        yield client


@pytest.fixture
async def scripted(tmp_path):
    async with serving(tmp_path, WEATHER) as client:
        yield client


@pytest.fixture
async def sdk(scripted):
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="x", max_retries=0) as client:
        yield client


# --- the openai SDK -------------------------------------------------------------------------------------------------


async def test_a_tool_loop_with_the_sdk_keeps_exact_prefixes(sdk):
    messages, so_far = [{"role": "user", "content": "weather in Paris?"}], []
    for _ in range(2):
        answer = await sdk.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
        )
        assert answer.prompt_token_ids[: len(so_far)] == so_far
        so_far = answer.prompt_token_ids + answer.choices[0].token_ids
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "21 C"} for c in message.tool_calls or []]
    assert message.content == "It is 21 degrees in é 🦊."
    assert answer.choices[0].finish_reason == "stop"


async def test_the_sdk_streams_a_tool_call(sdk):
    stream = await sdk.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "weather in Oslo"}], tools=TOOLS, stream=True
    )
    calls, content, finish = {}, "", None
    async for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert content == "Let me look."
    assert calls == {0: ("get_weather", '{"city": "Oslo"}'), 1: ("get_weather", '{"city": "Rome"}')}
    assert finish == "tool_calls"


async def test_two_choices_with_the_sdk(sdk):
    async def texts(seed):
        answer = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, seed=seed, max_tokens=30
        )
        assert answer.usage.completion_tokens == answer.usage.total_tokens - answer.usage.prompt_tokens
        return [choice.message.content for choice in answer.choices]

    first, again, other = await texts(1), await texts(1), await texts(2)
    assert first == again != other
    assert first[0] != first[1]


async def test_the_sdk_reads_errors_and_models(sdk):
    with pytest.raises(openai.NotFoundError, match="`nope` does not exist"):
        await sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=-1)
    assert [(model.id, model.max_model_len) async for model in sdk.models.list()] == [("tiny", 131072)]


async def test_completions_with_the_sdk(sdk):
    answer = await sdk.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=4, n=2, logprobs=2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) <= 4 for choice in answer.choices)


# --- tokens and log-probabilities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"seed": 1, "max_tokens": 120}, id="sampled"),
        pytest.param({"temperature": 0.3, "top_p": 0.9, "top_k": 40, "seed": 2, "max_tokens": 80}, id="truncated"),
        pytest.param({"messages": [{"role": "user", "content": "weather in Paris"}], "tools": TOOLS}, id="scripted"),
        pytest.param({"messages": [{"role": "user", "content": "x " * 3000}], "max_tokens": 50}, id="long-prompt"),
    ],
)
async def test_recorded_ids_fed_again_get_the_recorded_logprobs(scripted, more):
    answer = await scripted.chat(**{**INSTRUMENTED, **more})
    said = answer["choices"][0]["token_ids"]
    recorded = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert len(said) == len(recorded) == answer["usage"]["completion_tokens"]
    ids = answer["prompt_token_ids"] + said
    again = await scripted.json(
        "/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    )
    rows = again["choices"][0]["prompt_logprobs"]
    assert len(rows) == len(ids)
    fed = [rows[i][str(ids[i])]["logprob"] for i in range(len(answer["prompt_token_ids"]), len(ids))]
    np.testing.assert_allclose(recorded, fed, atol=1e-5)


async def test_one_changed_id_is_seen(scripted):
    """The control of the re-feed proof: it can fail."""
    answer = await scripted.chat(**INSTRUMENTED, seed=1, max_tokens=40)
    said = answer["choices"][0]["token_ids"]
    ids = [*answer["prompt_token_ids"], said[0] ^ 1, *said[1:]]
    again = await scripted.json(
        "/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    )
    rows = again["choices"][0]["prompt_logprobs"][-len(said) + 1 :]
    fed = [row[str(token)]["logprob"] for row, token in zip(rows, said[1:], strict=True)]
    recorded = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"][1:]]
    assert np.abs(np.array(fed) - recorded).max() > 1e-3


async def test_a_stream_has_the_same_ids_text_and_logprobs_as_the_whole(scripted):
    body = ask("weather in Paris", **INSTRUMENTED, tools=TOOLS)
    whole = await scripted.json("/v1/chat/completions", body)
    chunks = await scripted.chunks({**body, "stream_options": {"include_usage": True}})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for c in choices for i in c.get("token_ids") or []] == whole["choices"][0]["token_ids"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert "".join(c["delta"].get("reasoning") or "" for c in choices) == "They ask for Paris."
    assert chunks[-1]["usage"]["completion_tokens"] == len(entries)


async def test_logprobs_modes_differ_as_named():
    async def first(mode, temperature):
        async with serving(logprobs_mode=mode) as client:
            answer = await client.chat(**INSTRUMENTED, seed=1, temperature=temperature, max_tokens=1)
            return answer["choices"][0]["logprobs"]["content"][0]["logprob"]

    assert await first("raw_logprobs", 1) == await first("processed_logprobs", 1)
    assert await first("raw_logprobs", 0.5) != await first("processed_logprobs", 0.5)


async def test_tokens_as_ids(tiny):
    answer = await tiny.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = answer["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_tokenize_gives_the_prompts_ids_and_detokenize_its_text(tiny):
    answer = await tiny.chat(return_token_ids=True, return_prompt_text=True, max_tokens=1)
    body = {"model": "tiny", "messages": ask()["messages"], "add_generation_prompt": True, "return_token_strs": True}
    found = await tiny.json("/tokenize", body)
    assert list(found) == ["count", "max_model_len", "tokens", "token_strs"]
    assert found["tokens"] == answer["prompt_token_ids"]
    assert (found["count"], found["token_strs"][2]) == (len(found["tokens"]), "Ċ")
    text = (await tiny.json("/detokenize", {"tokens": found["tokens"]}))["prompt"]
    assert text == answer["prompt_text"]
    assert (await tiny.json("/tokenize", {"prompt": text}))["tokens"] == found["tokens"]


async def test_fifty_thousand_tokens_are_answered(tiny):
    """Wall time with room for a busy machine; test_policy_tiny_model holds the CPU bound."""
    start = time.monotonic()
    answer = await tiny.chat(messages=[{"role": "user", "content": "one " * 50_000}], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] > 50_000
    assert time.monotonic() - start < 5


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/v1/chat/completions", b"{", 400, id="json"),
        pytest.param(
            "/v1/chat/completions", b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, id="surrogate"
        ),
        pytest.param("/v1/chat/completions", b'{"model":"\\ud800","messages":[]}', 400, id="surrogate-model"),
        pytest.param("/v1/completions", {"model": "tiny", "prompt": [5000]}, 400, id="vocabulary"),
        pytest.param("/v1/completions", {"model": "tiny", "prompt": ""}, 400, id="empty"),
        pytest.param("/v1/completions", {"model": "tiny", "prompt": "a", "echo": True}, 400, id="echo"),
        pytest.param("/tokenize", {"model": "nope", "prompt": "a"}, 404, id="tokenize-model"),
        pytest.param("/detokenize", {"tokens": [-1]}, 400, id="detokenize"),
        pytest.param("/update_weight_version", {}, 400, id="version"),
        pytest.param("/weights", b"no npz", 400, id="weights"),
    ],
)
async def test_refusals_have_vllms_form(tiny, path, body, status):
    got, kind, answer = await tiny.send(path, body)
    assert (got, kind) == (status, "application/json")
    assert list(json.loads(answer)["error"]) == ["message", "type", "param", "code"]


async def test_an_unknown_route_is_404(tiny):
    assert (await tiny.send("/nope"))[::2] == (404, b'{"detail":"Not Found"}')


# --- weights --------------------------------------------------------------------------------------------------------


def npz(arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


async def test_weights_are_read_changed_and_versioned(tiny):
    before = await tiny.chat(**INSTRUMENTED, temperature=0, max_tokens=5)
    assert await tiny.json("/weight_info") == {"weight_version": "default"}
    _, _, data = await tiny.send("/weights")
    arrays = dict(np.load(io.BytesIO(data)))
    arrays["unembed_bias"][7] += 100
    assert await tiny.json("/weights", npz(arrays)) == {"success": True, "new_version": "1"}
    changed = await tiny.chat(**INSTRUMENTED, temperature=0, max_tokens=5)
    assert changed["choices"][0]["token_ids"] == [7] * 5
    assert await tiny.json("/weights?version=step-9", data) == {"success": True, "new_version": "step-9"}
    assert await tiny.json("/weight_info") == {"weight_version": "step-9"}
    again = await tiny.chat(**INSTRUMENTED, temperature=0, max_tokens=5)
    assert again["choices"] == before["choices"]
    answer = await tiny.json("/update_weight_version", {"new_version": "step-7"})
    assert answer == {"success": True, "new_version": "step-7"}
    assert await tiny.json("/weight_info") == {"weight_version": "step-7"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param(lambda a: a.pop("wq"), "wq", id="missing"),
        pytest.param(lambda a: a.update(extra=np.zeros(1)), "extra", id="extra"),
        pytest.param(lambda a: a.update(wq=np.zeros((2, 2))), "shape", id="shape"),
        pytest.param(lambda a: a.update(wq=np.full((64, 64), np.nan)), "NaN", id="nan"),
        pytest.param(lambda a: a.update(wq=np.zeros((64, 64), int)), "floats", id="int"),
    ],
)
async def test_wrong_weights_change_nothing(tiny, change, word):
    arrays = dict(np.load(io.BytesIO((await tiny.send("/weights"))[2])))
    change(arrays)
    status, _, answer = await tiny.send("/weights", npz(arrays))
    assert status == 400
    assert word in json.loads(answer)["error"]["message"]
    assert await tiny.json("/weight_info") == {"weight_version": "default"}


# --- life -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_ends_its_generation(stream):
    async with serving(delay_s=0.01) as client:
        body = ask(stream=stream, max_tokens=5000, ignore_eos=True)
        async with aiohttp.ClientSession() as other:
            call = asyncio.create_task(other.post(f"{client.url}/v1/chat/completions", json=body))
            await _until(client, running=1)
            if stream:
                answer = await call
                await answer.content.readline()
                answer.close()
            call.cancel()
        await _until(client, running=0)


async def _until(client, *, running):
    async with asyncio.timeout(5):
        while (await client.json("/load"))["server_load"] != running:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.01)


async def test_health_and_other_streams_live_beside_long_work(tiny):
    long = ask("one " * 40_000, max_tokens=1, prompt_logprobs=0)
    busy = asyncio.create_task(tiny.json("/v1/chat/completions", long))
    slowest = 0.0
    while not busy.done():
        start = time.monotonic()
        assert (await tiny.send("/health"))[0] == 200
        slowest = max(slowest, time.monotonic() - start)
        await asyncio.sleep(0.01)
    assert len((await busy)["prompt_logprobs"]) > 40_000
    assert slowest < 1.0


async def test_many_streams_at_once_are_each_as_alone(tiny):
    bodies = [ask(f"hello {i}", seed=i, max_tokens=30, **INSTRUMENTED) for i in range(20)]

    async def ids(body):
        return [i for chunk in await tiny.chunks(body) for c in chunk["choices"] for i in c.get("token_ids") or []]

    together = await asyncio.gather(*(ids(body) for body in bodies))
    assert together == [await ids(body) for body in bodies]


async def test_a_bad_script_stops_the_start(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text("[[rule]]\ntxt = 'a'\n", encoding="utf-8")
    with pytest.raises(UsageError, match="rule 1"):
        async with running(TinyOptions(script=path)):
            pass


def test_the_command_starts_announces_and_ends_on_sigterm(tmp_path):
    port_file = tmp_path / "port"
    command = [sys.executable, "-c", "from orchard_proxy.cli.policy import command; command()", "tiny"]
    with subprocess.Popen(
        [*command, "--port", "0", "--port-file", str(port_file)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = port_file.read_text().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert f"http://127.0.0.1:{port}/v1" in line
