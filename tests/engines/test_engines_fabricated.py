import json

import pytest
from engine_answers import REQUEST, body, choice, entry, exchange

from orchard_proxy.engines.vllm import Vllm


def problems(given, usage=None, **more):
    found = Vllm().evidence(exchange(body(given, usage=usage), **more))
    return found.choices[0].problems, found.rejected


@pytest.mark.parametrize("text", ["", None])
@pytest.mark.parametrize(
    ("ids", "lps", "usage"),
    [
        ([0], None, (3, 0)),
        ([0], None, (3, 1)),
        ([0], None, None),
        ([0], [entry(0.0)], (3, 1)),
        ([0], [entry(0.0)], None),
        ([0], [entry(-0.5)], (3, 0)),
        ([0, 0], [entry(0.0), entry(0.0)], (3, 2)),
        ([7], None, None),
        ([7], None, (3, 0)),
        ([7, 8], [entry(token="Hello"), entry(token="<eos>")], (3, 2)),
    ],
    ids=str,
)
def test_ids_of_an_empty_assistant_are_rejected(text, ids, lps, usage):
    found, rejected = problems(choice(ids, lps, text=text), usage)
    assert "fabricated_ids" in found
    assert rejected


def test_ids_that_the_engine_counts_as_none_are_rejected():
    found, rejected = problems(choice([5], text="hello"), (3, 0))
    assert "fabricated_ids" in found
    assert rejected


@pytest.mark.parametrize(
    ("given", "request_members"),
    [
        (choice([2], [entry(token="<|im_end|>")], text=""), b""),
        (choice([0], [entry(token="<|endoftext|>")], text=""), b""),
        (choice([7, 2], [entry(token="<think>"), entry(token="<|im_end|>")], text=""), b""),
        (choice([7, 2], [entry(token="\n"), entry(token="<|im_end|>")], text=""), b""),
        (choice([7], [entry(token="\ufffd")], text="", finish="length"), b""),
        (choice([504], [entry(token="The")], text="", stop_reason="The"), b',"stop":["The"]'),
        (choice([504, 5], [entry(token="The"), entry(token="x")], text=""), b',"stop":"x"'),
        (choice([504, 5], [entry(token="The"), entry(token="x")], text=""), b',"tools":[{"type":"function"}]'),
        (choice([504, 5], [entry(token="The"), entry(token="x")], text=""), b',"include_reasoning":false'),
        (choice([0], [entry(0.0)], text="!"), b""),
    ],
    ids=[
        "stop token at once",
        "stop token 0 at once",
        "special tokens only",
        "white space",
        "half a character",
        "stop string first",
        "stop string asked",
        "tool parser",
        "reasoning hidden",
        "id 0 with a text",
    ],
)
def test_a_short_answer_that_was_sampled_is_evidence(given, request_members):
    found, rejected = problems(given, request=REQUEST[:-1] + request_members + b"}")
    assert (found, rejected) == ([], False)


@pytest.mark.parametrize("member", ["reasoning", "reasoning_content", "refusal"])
def test_other_members_than_content_are_something_said(member):
    given = choice([504, 2], [entry(token="The"), entry(token="<e>")], message={"role": "assistant", member: "The"})
    assert problems(given) == ([], False)


def test_no_ids_and_no_text_prove_nothing():
    found = Vllm().evidence(exchange(body(choice([], [], text=""), usage=(3, 0))))
    assert (found.choices[0].problems, found.choices[0].sampled_tokens) == (["no_ids"], 0)
    assert json.loads(bytes(found.choices[0].message))["content"] == ""
