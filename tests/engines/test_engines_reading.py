"""Whatever an engine sends, reading it never raises and never invents."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.registry import ENGINES
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.frames import EvidenceFrame
from orchard_proxy.schema.packed import count
from orchard_proxy.wire import chat

TRIES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
ANY = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
IDS = st.lists(st.integers(-2, 2**33), max_size=4)


def objects(**members):
    """Objects with any of these members, each as it should be or anything at all."""
    return st.fixed_dictionaries({}, optional={key: value | ANY for key, value in members.items()})


ENTRY = objects(token=st.text(max_size=3), logprob=st.floats(), id=st.integers(-1, 9))
MESSAGE = objects(role=st.just("assistant"), content=st.text(max_size=3), tool_calls=ANY)
CHOICE = objects(
    index=st.integers(0, 2),
    message=MESSAGE,
    delta=MESSAGE,
    token_ids=IDS,
    logprobs=objects(content=st.lists(ENTRY | ANY, max_size=4)),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=ANY,
)
REPORT = objects(
    tokens=IDS,
    index=st.integers(0, 1),
    prompt=ANY,
    generation_settings=objects(stop=ANY, n_predict=st.integers(0, 4)),
    stop_type=st.just("word"),
)
ANSWER = objects(
    choices=st.lists(CHOICE | ANY, max_size=3),
    prompt_token_ids=IDS,
    usage=objects(prompt_tokens=st.integers(0, 4), completion_tokens=st.integers(0, 6)),
    model=ANY,
    timings=objects(predicted_n=st.integers(0, 4)),
    __verbose=REPORT,
    error=ANY,
)


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(answers=st.lists(ANSWER, min_size=1, max_size=4), tokens=IDS | ANY, asked=ANY, streamed=st.booleans())
def test_evidence_is_total(name, answers, tokens, asked, streamed):
    if streamed:
        answer = b"".join(b"data: " + json.dumps(a).encode() + b"\n\n" for a in answers)
    else:
        answer = json.dumps(answers[0]).encode()
    side = [EvidenceFrame(path="/tokenize", request=b"", status=200, answer=json.dumps({"tokens": tokens}).encode())]
    request = json.dumps({"model": asked, "stop": asked}).encode()
    found = ENGINES[name].evidence(Exchange(request=request, status=200, answer=answer, side=side, logprobs_mode="raw"))
    for one in found.choices:
        assert count(one.logprobs) in (0, count(one.token_ids))
        assert one.sampled_tokens >= count(one.token_ids)
        assert json.loads(bytes(one.message))["role"]


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(
    answer=st.binary(max_size=40),
    status=st.sampled_from([None, 200, 204, 400, 500]),
    kind=st.sampled_from(["", "text/event-stream"]),
)
def test_bytes_are_read_or_named(name, answer, status, kind):
    found = ENGINES[name].evidence(Exchange(request=answer, status=status, answer=answer, content_type=kind))
    assert found.choices or found.problems


REQUEST = objects(
    messages=ANY,
    stream=st.booleans(),
    stream_options=ANY,
    logprobs=st.booleans(),
    top_logprobs=st.integers(-1, 3),
    return_token_ids=st.booleans(),
    include_reasoning=st.booleans(),
    verbose=st.booleans(),
    n_probs=st.integers(0, 2),
    tools=st.lists(ANY, max_size=1),
)


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(request_=REQUEST | ANY, mode=st.sampled_from(UpstreamStream), answer=ANSWER | ANY)
def test_preparing_and_stripping_are_total(name, request_, mode, answer):
    engine = ENGINES[name]
    request = chat.decode(json.dumps(request_).encode())
    prepared = engine.prepare(request, mode)
    assert bool(prepared.edits) == (prepared.body != request.body)
    assert not (prepared.stream and prepared.synthesise)
    data = json.dumps(answer).encode()
    engine.strip_body(data, prepared)
    engine.strip_event(data, prepared)
    for _ in engine.side(request):
        break
