"""Whatever JSON comes, it is understood or refused in vLLM's shape: never a crash."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_kit import ask

from orchard_proxy.policy.tiny_fields import Fields, RequestError, parse_object
from orchard_proxy.policy.tiny_messages import chat_messages
from orchard_proxy.policy.tiny_request import chat_request, completion_request, limited
from orchard_proxy.policy.tiny_sampling import SamplingParams
from orchard_proxy.policy.tiny_template import Message, ToolCall, render

NAMES = [
    *("model", "messages", "prompt", "tools", "tool_choice", "stream", "stream_options", "n", "logprobs", "seed"),
    *("top_logprobs", "prompt_logprobs", "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "min_tokens"),
    *("max_completion_tokens", "logit_bias", "stop_token_ids", "include_reasoning", "ignore_eos", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "return_token_ids", "add_generation_prompt"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["tiny", "auto"]),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7"]), v),
    max_leaves=6,
)


def refusal(decode, body):
    try:
        decode(body, model="tiny")
    except RequestError as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
@settings(max_examples=800, deadline=None)
def test_any_json_is_understood_or_refused(body):
    for decode in (chat_request, completion_request):
        error = refusal(decode, body)
        assert error is None or set(error.body["error"]) == {"message", "type", "param", "code"}


@given(st.sampled_from(NAMES), JSON)
@settings(max_examples=1500, deadline=None)
def test_any_field_of_a_good_request(name, value):
    error = refusal(chat_request, {**ask(), name: value})
    assert error is None or error.status in {400, 404}


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        pytest.param({"model": "nope"}, 404, "model", id="model"),
        pytest.param({"max_tokens": -5}, 400, "max_tokens", id="max_tokens"),
        pytest.param({"max_completion_tokens": 0}, 400, "max_tokens", id="max_completion_tokens"),
        pytest.param({"n": 0}, 400, None, id="n"),
        pytest.param({"n": 1000}, 400, None, id="n-many"),
        pytest.param({"temperature": -1}, 400, "temperature", id="temperature"),
        pytest.param({"temperature": float("nan")}, 400, "temperature", id="temperature-nan"),
        pytest.param({"top_p": 0}, 400, "top_p", id="top_p"),
        pytest.param({"top_logprobs": 2}, 400, "top_logprobs", id="top_logprobs-alone"),
        pytest.param({"logprobs": True, "top_logprobs": 21}, 400, "logprobs", id="top_logprobs-many"),
        pytest.param({"logprobs": "abc"}, 400, "body.logprobs", id="logprobs"),
        pytest.param({"stream": "maybe"}, 400, "body.stream", id="stream"),
        pytest.param({"stream_options": {"include_usage": True}}, 400, "stream_options", id="stream_options"),
        pytest.param({"stream": True, "prompt_logprobs": 0}, 400, "prompt_logprobs", id="prompt_logprobs-stream"),
        pytest.param({"logit_bias": {"99999": 1}}, 400, None, id="logit_bias-range"),
        pytest.param({"logit_bias": {"a": 1}}, 400, "logit_bias", id="logit_bias-key"),
        pytest.param({"messages": []}, 400, "messages", id="no-messages"),
        pytest.param({"messages": None}, 400, "body.messages", id="null-messages"),
        pytest.param({"tool_choice": "perhaps"}, 400, "tool_choice", id="tool_choice"),
    ],
)
def test_what_is_refused(more, status, param):
    with pytest.raises(RequestError) as caught:
        chat_request({**ask(), **more}, model="tiny")
    assert (caught.value.status, caught.value.param) == (status, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=repr)
def test_what_is_no_object_is_refused(body):
    with pytest.raises(RequestError):
        parse_object(body)


def test_defaults_and_nulls():
    plain = chat_request(ask(), model="tiny")
    nulls = chat_request({**dict.fromkeys(NAMES), **ask()}, model="tiny")
    assert plain == nulls
    assert (plain.max_tokens, plain.output.n, plain.output.logprobs) == (None, 1, None)


def decoded(*messages):
    return chat_messages(Fields({"messages": list(messages)}))


def test_messages_are_read_in_every_spelling():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert decoded(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"é": 1}}}]},
    ) == [
        Message(role="user", content="a\nb"),
        Message(role="assistant", reasoning="r", tool_calls=(ToolCall(name="f", arguments='{"a": 1}'),)),
        Message(role="assistant", tool_calls=(ToolCall(name="f", arguments="{}"),)),
        Message(role="assistant", tool_calls=(ToolCall(name="f", arguments='{"é": 1}'),)),
    ]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"content": "a"}, id="no-role"),
        pytest.param({"role": "user", "content": 5}, id="content"),
        pytest.param({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, id="image"),
        pytest.param(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}, id="arguments"
        ),
        pytest.param({"role": "assistant", "tool_calls": [{}]}, id="no-function"),
        pytest.param({"role": "assistant", "tool_calls": 3}, id="calls"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message):
    with pytest.raises(RequestError):
        decoded(message)


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "limit"),
    [(10, None, 90), (10, 5, 5), (99, None, 1), (100, None, None), (99, 2, None), (500, 1, None)],
)
def test_the_context_bounds_the_answer(prompt_tokens, asked, limit):
    def resolve():
        return limited(SamplingParams(), asked, prompt_tokens=prompt_tokens, context=100, default=1000).max_tokens

    if limit is not None:
        assert resolve() == limit
        return
    with pytest.raises(RequestError, match="maximum context length is 100 tokens"):
        resolve()


def test_odd_roles_are_rendered():
    assert "<|im_start|>developer\nx<|im_end|>" in render(decoded({"role": "developer", "content": "x"}), None)


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": 1, "top_logprobs": 3}, 3),
        ({"logprobs": True, "top_logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"top_logprobs": None}, None),
    ],
    ids=str,
)
def test_an_explicit_null_yields_no_logprobs(more, shown):
    output = chat_request({**ask(), **more}, model="tiny").output
    assert (output.logprobs, output.instrumented) == (shown, shown is not None)
