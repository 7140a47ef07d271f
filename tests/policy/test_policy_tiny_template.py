import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.policy.tiny_fields import Fields
from orchard_proxy.policy.tiny_messages import chat_messages
from orchard_proxy.policy.tiny_parse import OutputParser
from orchard_proxy.policy.tiny_template import Message, ToolCall, assistant_text, render
from orchard_proxy.policy.tiny_tokenizer import END_ID, TinyTokenizer
from orchard_proxy.policy.tiny_wire import CallIds
from orchard_proxy.policy.tiny_wire import message as wire_message

TOKENIZER = TinyTokenizer()
TOOLS = [{"type": "function", "function": {"name": "get_é", "parameters": {"type": "object"}}}]
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Paris?"}]
# Text as a model may say it: anything but the markers themselves.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
VALUE = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda v: st.dictionaries(TEXT, v), max_leaves=4)
CALL = st.builds(ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, VALUE).map(json.dumps))
TURN = st.tuples(TEXT, TEXT, st.lists(CALL, min_size=1, max_size=3).map(tuple), TEXT)


def prompt(messages):
    return TOKENIZER.encode(render(chat_messages(Fields({"messages": messages})), TOOLS))


def answered(text):
    """Return the message that a client of our wire gets for this text."""
    parser = OutputParser(tools=True)
    deltas = [parser.feed(char) for char in text] + [parser.feed("", last=True)]
    return wire_message(deltas, CallIds(), forced_call=False, show_reasoning=True)


@given(st.lists(TURN, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_within_a_tool_loop_each_prompt_extends_the_last_prompt_and_answer(turns):
    messages, so_far = list(START), None
    for reasoning, content, calls, result in turns:
        ids = prompt(messages)
        assert so_far is None or ids[: len(so_far)] == so_far
        text = assistant_text(reasoning=reasoning, content=content, tool_calls=calls)
        so_far = ids + TOKENIZER.encode(text) + [END_ID]
        echoed = answered(text)
        messages.append(echoed)
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in echoed["tool_calls"]]
    assert prompt(messages)[: len(so_far)] == so_far


def test_reasoning_is_dropped_once_the_user_speaks_again():
    thought = {"role": "assistant", "content": "Sunny.", "reasoning": "Hm."}
    assert "Hm." in render(chat_messages(Fields({"messages": [*START, thought]})), None)
    later = [*START, thought, {"role": "user", "content": "And now?"}]
    assert "Hm." not in render(chat_messages(Fields({"messages": later})), None)


def test_the_whole_text():
    messages = [
        Message(role="system", content="S"),
        Message(role="user", content="U"),
        Message(role="assistant", reasoning="R", content="C", tool_calls=(ToolCall(name="f", arguments='{"a":1}'),)),
        Message(role="tool", content="T"),
    ]
    assert render(messages, None) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>R</think>C"
        '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_stand_in_the_system_message():
    text = render([Message(role="user", content="U")], TOOLS, add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert text.endswith("<|im_start|>user\nU<|im_end|>\n")


@pytest.mark.parametrize("content", ["{{ 7*7 }}", "{% for x in y %}", "a & b < c"], ids=str)
def test_content_is_never_read_as_template(content):
    assert content in render([Message(role="user", content=content)], None)
