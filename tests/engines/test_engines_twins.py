"""The client's copy equals the plain answer, byte for byte, for everything that real engines said both ways."""

import json

import pytest
from fakes import twins

from orchard_proxy.engines.base import Prepared
from orchard_proxy.engines.registry import get
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.wire import chat, sse

ALL = [
    pytest.param(engine, twin, id=f"{engine}-{twin.name}")
    for engine in ("vllm", "llamacpp")
    for twin in twins.load(engine)
]
RESTORABLE = [p for p in ALL if p.values[1].name not in twins.NOT_RESTORABLE[p.values[0]]]


def mode_of(engine, twin):
    return UpstreamStream.ON if engine == "llamacpp" else UpstreamStream.AUTO


def client_copy(engine, body: bytes, prepared: Prepared) -> bytes:
    """What the relay does, without a relay."""
    if not body.startswith(b"data:"):
        return engine.strip_body(body, prepared)
    parser, out = sse.SseParser(), []
    for event in [*parser.feed(body), *parser.close()]:
        data = None if event.data is None or sse.is_done(event) else engine.strip_event(event.data, prepared)
        if event.data is None or sse.is_done(event):
            out.append(event.raw)
        elif data is not None:
            out.append(event.replaced(data))
    return b"".join(out)


def restored(engine_name, twin) -> bool:
    engine = get(engine_name)
    prepared = engine.prepare(chat.decode(twin.plain_request), mode_of(engine_name, twin))
    copy = twin.instr_body if twin.is_noise else client_copy(engine, twin.instr_body, prepared)
    return twins.mask(copy) == twins.mask(twin.plain_body) and twin.status == twin.instr_status


@pytest.mark.parametrize(("engine", "twin"), RESTORABLE)
def test_the_plain_answer_is_restored(engine, twin):
    assert restored(engine, twin)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_list_of_those_that_are_not_is_exact(engine):
    found = {twin.name for twin in twins.load(engine) if not restored(engine, twin)}
    assert found == set(twins.NOT_RESTORABLE[engine])


MUST_FAIL = [p for p in ALL if p.values[1].status >= 400 and p.values[1].instr_status == 200]


@pytest.mark.parametrize(("engine", "twin"), MUST_FAIL)
@pytest.mark.parametrize("mode", list(UpstreamStream))
def test_a_request_that_must_fail_goes_up_as_it_came(engine, twin, mode):
    prepared = get(engine).prepare(chat.decode(twin.plain_request), mode)
    assert prepared == Prepared(body=twin.plain_request, stream=False)


def same_request(engine, twin) -> bool:
    """Whether the twin was captured with the fields that we send: some were captured to try others."""
    if twin.is_noise or twin.name in twins.NOT_RESTORABLE[engine]:
        return False
    if engine == "vllm":
        return b'"include_reasoning": false' not in twin.plain_request and b'"logprobs": true' in twin.instr_request
    asks = json.loads(twin.instr_request)
    streams = asks.get("stream") is True
    return ("verbose" in asks) != streams and (asks.get("n_probs") == 1) == (not streams or "tools" in asks)


SAME = [p for p in ALL if same_request(*p.values)]


@pytest.mark.parametrize(("engine", "twin"), SAME)
def test_the_upstream_request_is_the_instrumented_one(engine, twin):
    prepared = get(engine).prepare(chat.decode(twin.plain_request), mode_of(engine, twin))
    ours, theirs = json.loads(prepared.body), json.loads(twin.instr_request)
    ours["logprobs"], theirs["logprobs"] = ours.get("logprobs") or None, theirs.get("logprobs") or None
    assert ours == theirs


def test_most_twins_were_captured_with_our_request():
    names = [p.values[0] for p in SAME]
    assert (names.count("vllm"), names.count("llamacpp")) == (38, 19)


@pytest.mark.parametrize(("engine", "twin"), ALL)
def test_a_prepared_request_lists_its_edits(engine, twin):
    for mode in UpstreamStream:
        prepared = get(engine).prepare(chat.decode(twin.plain_request), mode)
        assert bool(prepared.edits) == (prepared.body != twin.plain_request)
        assert len({edit.name for edit in prepared.edits}) == len(prepared.edits)
