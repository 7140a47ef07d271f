"""Our answers beside captured ones of vLLM 0.32: the same keys, the same order, null where it prints null."""

import json

import pytest
from fakes import twins
from tiny_kit import serving, shape, vllm_twins

from orchard_proxy.engines.registry import get
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.wire import chat, sse

# What SmolLM2 said, so that ours says it too; the tokens are other ones.
SCRIPT = """
[[rule]]
any = 'Repeat exactly'
text = '''Repeat exactly: 🦊🦊

Repeat'''
end = false
[[rule]]
any = 'the capital of France'
text = 'The capital of France is Paris.'
[[rule]]
any = 'weather in Paris'
text = 'The weather in Paris is described as a warm and sunny day with a high of 28°C and a low of 15°C.'
[[rule]]
any = 'Name a colour'
text = 'The world of colour is a never-ending tapestry of glitter, where every corner of it shines.'
"""
CALLS = """
[[rule]]
tool_calls = [{name = "get_weather", arguments = {city = {type = "string", description = "Paris"}}}]
"""
# How far an answer goes depends on the tokenizer: vLLM's length cut may be our end.
OTHER = {
    "p_response_format": "constrained decoding is not offered",
    "f6_tools_stream_ids_only": "vLLM was cut within the call",
    "f_tools_stream": "vLLM was cut within the call",
    "e_tools": "vLLM gives a cut call as content when it does not stream; ours as the stream does",
    "m2_tools_warm_repeat_plain": "as e_tools",
    "g9_logprobs_emoji_stream": "its best alternative was the sampled half of a character; ours is a whole word",
    "j5_toolong": "ours has more tokens a word, and the limit is the same: compared below",
    "j6_toolong_stream": "as j5",
}
NOT_STRIPPED = twins.NOT_RESTORABLE["vllm"]
TWINS = [pytest.param(twin, id=twin.name) for twin in vllm_twins() if twin.name not in OTHER]


def script_of(request: bytes) -> str:
    return CALLS if json.loads(request).get("tool_choice") == "required" else SCRIPT


async def ours(request: bytes, tmp_path):
    async with serving(tmp_path, script_of(request), model_name="smol", max_model_len=2048) as client:
        return await client.send("/v1/chat/completions", request)


def shapes(body: bytes) -> list[str]:
    """Return the distinct forms of the events or of the body."""
    if not body.startswith(b"data:"):
        return [shape(json.loads(body))]
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return sorted({event.decode() if event == b"[DONE]" else shape(json.loads(event)) for event in events})


def without_stop(forms: list[str]) -> set[str]:
    """How an answer ends (length or stop, with or without a last text) is the model's affair, not the wire's."""
    return {form for form in forms if "finish_reason:str" not in form}


def endings(forms: list[str]) -> int:
    return sum("finish_reason:str" in form for form in forms)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("side", ["plain", "instr"])
async def test_the_form_is_vllms(twin, side, tmp_path):
    request = getattr(twin, f"{side}_request")
    theirs = getattr(twin, f"{side}_body")
    status, kind, body = await ours(request, tmp_path)
    assert status == (twin.status if side == "plain" else twin.instr_status)
    assert kind.split(";")[0] == (twin.content_type if side == "plain" else twin.instr_content_type).split(";")[0]
    if status != 200:
        assert body == theirs
    elif kind.startswith("application/json"):
        assert shapes(body) == shapes(theirs)
    else:
        assert without_stop(shapes(body)) == without_stop(shapes(theirs))
        assert endings(shapes(body)) >= 1


@pytest.mark.parametrize("name", ["j5_toolong", "j6_toolong_stream"])
async def test_a_prompt_that_is_too_long_is_refused_in_vllms_words(name, tmp_path):
    twin = next(twin for twin in vllm_twins() if twin.name == name)
    assert (await ours(twin.plain_request, tmp_path))[2] == twin.plain_body


@pytest.mark.parametrize("twin", [p for p in TWINS if p.values[0].name not in NOT_STRIPPED])
async def test_plain_is_instrumented_stripped(twin, tmp_path):
    """The tiny server is a vLLM to the proxy: its plain answers come out of its instrumented ones, byte for byte."""
    await compare(twin.plain_request, tmp_path)


HIDING = [p for p in TWINS if b'"include_reasoning": false' in p.values[0].plain_request]


@pytest.mark.parametrize("twin", HIDING)
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"logprobs": 1, "return_token_ids": "yes", "include_reasoning": 0},
    ],
    ids=str,
)
async def test_hidden_reasoning_of_a_client_that_asks_for_evidence_itself(twin, asked, tmp_path):
    """The engine hides ids and log-probabilities of the answer then, and so do we; the prompt's ids it shows."""
    assert HIDING
    await compare(json.dumps({**json.loads(twin.plain_request), **asked}).encode(), tmp_path)


@pytest.mark.parametrize("stream", [False, True, 1, "true", "off", 0])
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": True, "top_logprobs": None},
        {"logprobs": "yes"},
        {"logprobs": 0, "return_token_ids": 1},
        {"messages": None},
        {"messages": "hi"},
        {"include_reasoning": "off"},
    ],
    ids=str,
)
async def test_odd_spellings_are_answered_as_without_us(asked, stream, tmp_path):
    tools = next(twin for twin in vllm_twins() if twin.name == "f_tools_stream")
    await compare(json.dumps({**json.loads(tools.plain_request), "stream": stream, **asked}).encode(), tmp_path)


async def compare(request: bytes, tmp_path):
    engine = get("vllm")
    prepared = engine.prepare(chat.decode(request), UpstreamStream.AUTO)
    _, _, plain = await ours(request, tmp_path)
    _, kind, instr = await ours(prepared.body, tmp_path)
    assert prepared.stream == kind.startswith("text/event-stream") or instr.startswith(b'{"error"')
    assert twins.mask(client_copy(engine, instr, prepared)) == twins.mask(plain)


def client_copy(engine, body: bytes, prepared) -> bytes:
    if not body.startswith(b"data:"):
        return engine.strip_body(body, prepared)
    parser, out = sse.SseParser(), []
    for event in [*parser.feed(body), *parser.close()]:
        if event.data is None or sse.is_done(event):
            out.append(event.raw)
        elif (data := engine.strip_event(event.data, prepared)) is not None:
            out.append(event.replaced(data))
    return b"".join(out)
