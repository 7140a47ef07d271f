import json
import math

import pytest

from orchard_proxy.engines import evidence
from orchard_proxy.engines.evidence import Refused
from orchard_proxy.schema.packed import pack_floats, pack_ids, unpack_floats, unpack_ids
from orchard_proxy.schema.records import Usage


@pytest.mark.parametrize("ids", [[], [0], [5, 6, 7], [2**24 - 1]], ids=str)
def test_ids_are_packed_as_they_are(ids):
    packed = evidence.read_ids(ids)
    assert isinstance(packed, bytes)
    assert unpack_ids(packed) == ids


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([-1], "id_out_of_range"),
        ([5, -7, 6], "id_out_of_range"),
        ([2**31], "id_out_of_range"),
        ([2**31 - 1], "id_out_of_range"),
        ([5, 2**24], "id_out_of_range"),
        ([-(2**31) - 1], "id_out_of_range"),
        ([2**63], "id_out_of_range"),
        ([10**40], "id_out_of_range"),
        ([5.0], "id_not_int"),
        ([5, 6.5], "id_not_int"),
        ([True], "id_not_int"),
        ([1, False], "id_not_int"),
        (["5"], "id_not_int"),
        ([None], "id_not_int"),
        ([[5]], "id_not_int"),
        ([{"id": 5}], "id_not_int"),
        ([math.nan], "id_not_int"),
        ("567", "id_not_int"),
        ({"0": 5}, "id_not_int"),
        (None, "id_not_int"),
    ],
    ids=str,
)
def test_ids_that_are_none_are_refused_by_name(ids, problem):
    assert evidence.read_ids(ids) == Refused(problem)


@pytest.mark.parametrize(("n_vocab", "taken"), [(None, True), (8, True), (7, False), (1, False)])
def test_ids_stay_below_the_vocabulary(n_vocab, taken):
    assert isinstance(evidence.read_ids([5, 6, 7], n_vocab), bytes) is taken


@pytest.mark.parametrize(
    "values", [[], [0.0], [-0.0, -1.5], [0, -3], [1e-7], [-9998.9], [-1e-45], [-12345678e-4]], ids=str
)
def test_logprobs_are_packed_as_they_are(values):
    packed = evidence.read_logprobs(values)
    assert packed == pack_floats(values)
    assert isinstance(packed, bytes)
    assert unpack_floats(packed) == pytest.approx(values)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "logprob_nan"),
        (math.inf, "logprob_plus_inf"),
        (-math.inf, "logprob_minus_inf"),
        (-9999.0, "logprob_sentinel"),
        (-9999, "logprob_sentinel"),
        (-9999.99, "logprob_sentinel"),
        (-3.4e38, "logprob_sentinel"),
        (-1e300, "logprob_sentinel"),
        (0.1, "logprob_positive"),
        (1, "logprob_positive"),
        (2e-6, "logprob_positive"),
        (None, "logprob_null"),
        (True, "logprob_not_number"),
        (False, "logprob_not_number"),
        ("-0.5", "logprob_not_number"),
        ("NaN", "logprob_not_number"),
        ([], "logprob_not_number"),
        ({}, "logprob_not_number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_logprobs_that_are_none_are_refused_by_name(value, problem, at):
    values = [-0.5, -0.25]
    values.insert(at, value)
    assert evidence.read_logprobs(values) == Refused(problem)


@pytest.mark.parametrize(
    ("entries", "contradicts"),
    [
        ([{"token": "token_id:5"}, {"token": "token_id:6"}], False),
        ([{"token": "token_id:6"}, {"token": "token_id:7"}], True),
        ([{"token": "a"}, {"token": "token_id:5"}], True),
        ([{"token": "a"}, {"token": "b"}], False),
        ([{"token": "token_id:"}, {}], True),
        ([{"token": "token_id:x"}, {}], True),
        ([{"id": 5}, {"id": 6}], False),
        ([{"id": 5}, {"id": 5}], True),
        ([{"id": "x", "token": None}, None], False),
    ],
    ids=json.dumps,
)
def test_entries_that_name_other_ids_are_caught(entries, contradicts):
    assert evidence.contradicts_entries([5, 6], entries) is contradicts


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        ([], [], True),
        ([], [1], True),
        ([1, 3], [1, 2, 3], True),
        ([2, 2], [2, 1, 2], True),
        ([2, 2], [2, 1], False),
        ([3, 1], [1, 3], False),
    ],
    ids=str,
)
def test_is_subsequence(part, whole, expected):
    assert evidence.is_subsequence(part, whole) is expected


@pytest.mark.parametrize(
    ("prompt", "stated", "problem"),
    [
        ([1, 2], 2, None),
        ([1, 2], None, None),
        (None, 2, None),
        ([1, 2], 3, "prompt_usage_mismatch"),
        ([1, 2], 0, "prompt_usage_mismatch"),
    ],
    ids=str,
)
def test_prompt_ids_are_counted(prompt, stated, problem):
    packed = None if prompt is None else pack_ids(prompt)
    assert evidence.usage_problem(packed, Usage(prompt_tokens=stated)) == problem


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (400, b'{"error":{"message":"This model\'s maximum context length is 2048 tokens. However..."}}', True),
        (400, b'{"error":{"type":"exceed_context_size_error","n_ctx":2048}}', True),
        (400, b'{"error":{"message":"prompt is too long: 9 tokens > 8 maximum"}}', True),
        (400, b'{"error":{"code":"context_length_exceeded"}}', True),
        (400, b'{"error":{"message":"max_tokens must be at least 1, got -5."}}', False),
        (500, b"maximum context length", False),
        (200, b"maximum context length", False),
    ],
    ids=["vllm", "llamacpp", "anthropic", "openai", "another 400", "a 500", "a 200"],
)
def test_context_overflow_is_recognised(status, answer, expected):
    assert evidence.is_context_overflow(status, answer) is expected


@pytest.mark.parametrize(
    ("asked", "answered", "problems"),
    [
        ('"smol"', "smol", []),
        ('"gpt-9"', "gpt-9-2026-11-01", []),
        ('"smol"', "other", ["model_mismatch"]),
        ('"step-2"', "step-1", ["model_mismatch"]),
        ("5", "smol", []),
        ('"smol"', None, []),
    ],
)
def test_another_model_is_flagged(asked, answered, problems):
    assert evidence.model_problems(b'{"model":%b}' % asked.encode(), answered) == problems
