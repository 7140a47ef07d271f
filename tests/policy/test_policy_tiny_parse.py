import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.policy.tiny_parse import OutputParser, held


def fold(texts, *, tools=True):
    """Return (reasoning, content, [[name, arguments], …]) of an answer that comes in these pieces."""
    parser, reasoning, content, calls = OutputParser(tools=tools), "", "", []
    for i, text in enumerate(texts):
        delta = parser.feed(text, last=i == len(texts) - 1)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.index == len(calls):
                calls.append(["", ""])
            assert call.index == len(calls) - 1
            calls[-1][0] += call.name or ""
            calls[-1][1] += call.arguments or ""
    assert parser.calls == len(calls)
    return reasoning, content, calls


def call(name="f", arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = {
    "plain": ("Hello.", ("", "Hello.", [])),
    "empty": ("", ("", "", [])),
    "thought": ("<think>why\n</think>\n\nSo.", ("why\n", "\n\nSo.", [])),
    "thought-unfinished": ("<think>why</thi", ("why</thi", "", [])),
    "thought-later-is-text": ("a <think>b</think>", ("", "a <think>b</think>", [])),
    "call": (call(), ("", "", [["f", "{}"]])),
    "text-and-call": ("Look. " + call(), ("", "Look. ", [["f", "{}"]])),
    "two-calls": (call() + "\n" + call("g", '{"a": [1, "}"]}'), ("", "", [["f", "{}"], ["g", '{"a": [1, "}"]}']])),
    "all": ("<think>t</think>c" + call() + "\n", ("t", "c", [["f", "{}"]])),
    "text-after-call": (call() + "\n\nDone now.", ("", "Done now.", [["f", "{}"]])),
    "compact": ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', ("", "", [["f", '{"a":1}']])),
    "spaces-before-arguments": (
        '<tool_call>{"name": "f", "arguments":\n  {"a": 1}  }</tool_call>',
        ("", "", [["f", '{"a": 1}']]),
    ),
    "marker-in-a-string": (call("f", '{"a": "</tool_call>"}'), ("", "", [["f", '{"a": "</tool_call>"}']])),
    "escaped-quote": (call("f", r'{"a": "\"}"}'), ("", "", [["f", r'{"a": "\"}"}']])),
    "escaped-name": (call(r"a\u00e9"), ("", "", [["aé", "{}"]])),
    "string-arguments": (call("f", '"x}"'), ("", "", [["f", '"x}"']])),
    "number-arguments": (call("f", "12"), ("", "", [["f", "12"]])),
    "malformed-arguments": (call("f", '{"a": }'), ("", "", [["f", '{"a": }']])),
    "unclosed-arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>',
        ("", "", [["f", '{"a": [1']]),
    ),
    "cut-in-arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', ("", "", [["f", '{"a": "b']])),
    "cut-in-name": ('<tool_call>{"name": "f', ("", '<tool_call>{"name": "f', [])),
    "cut-in-marker": ("a <tool_", ("", "a <tool_", [])),
    "other-order": (
        '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>',
        ("", "", [["f", '{"a": "é"}']]),
    ),
    "no-arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", "", [["f", "{}"]])),
    "no-json": ("<tool_call>what</tool_call>!", ("", "<tool_call>what</tool_call>!", [])),
    "no-name": ("<tool_call>[1]</tool_call>", ("", "<tool_call>[1]</tool_call>", [])),
    "less-than": ("1 < 2 <t", ("", "1 < 2 <t", [])),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_an_answer_is_read(text, expected):
    assert fold([text]) == expected


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_pieces_do_not_matter(text, expected):
    assert fold([*text, ""]) == expected
    for cut in range(len(text) + 1):
        assert fold([text[:cut], text[cut:]]) == expected


PART = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}", '"', "\\", " ", "a"]
)


@given(st.lists(PART, max_size=25).map("".join), st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=1000)
def test_pieces_never_matter(text, cuts):
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert fold([*pieces, ""]) == fold([text])


def test_without_tools_a_call_is_text():
    assert fold([call()], tools=False) == ("", call(), [])


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("a<", 1), ("a<t", 2), ("<<", 1), ("<think>", 0), ("x</", 0)], ids=str
)
def test_what_could_begin_a_marker_is_held(text, count):
    assert held(text, "<think>") == count
