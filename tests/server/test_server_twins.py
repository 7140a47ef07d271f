"""Byte-true: what a client gets through the relay equals what the engine says to it without us.

The engine replays a real engine's instrumented answer; the plain answer to the same request is what must come out.
"""

import itertools
import random

import pytest
from fakes.engine import Said, ScriptedEngine, cut
from fakes.twins import mask, restorable
from proxy import FixedEngine, proxy_before

from orchard_proxy.engines.registry import get
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.server.tap import StreamTap
from orchard_proxy.wire import chat

TWINS = [
    pytest.param(engine, twin, id=f"{engine}-{twin.name}")
    for engine in ("vllm", "llamacpp")
    for twin in restorable(engine)
]


def sizes(body: bytes) -> list:
    """One piece, small pieces, large pieces, and pieces at random; single bytes where that stays quick."""
    at_random = random.Random(len(body)).choices(range(1, 900), k=len(body) // 400 + 1)
    return [0, 1 if len(body) < 3000 else 11, 64, 1000, at_random]


@pytest.mark.parametrize(("engine_name", "twin"), TWINS)
async def test_the_plain_answer_is_restored(tmp_path, engine_name, twin):
    chunkings = iter(sizes(twin.instr_body))

    def say(heard):
        if heard.path != "/v1/chat/completions":
            return Said([b"{}"], status=404)  # Evidence beside the generation: not what this test is about.
        pieces = cut(twin.instr_body, next(chunkings))
        return Said(pieces, status=twin.instr_status, content_type=twin.instr_content_type)

    async with (
        ScriptedEngine(say) as engine,
        proxy_before(engine.url, tmp_path, engine=engine_name, mode=UpstreamStream.ON) as proxy,
    ):
        for _ in sizes(twin.instr_body):
            async with proxy.post(twin.plain_request) as answer:
                seen = await answer.read()
            assert mask(seen) == mask(twin.plain_body)
            assert answer.status == twin.status
            assert answer.headers["content-type"] == twin.content_type
        calls = await proxy.ended(len(sizes(twin.instr_body)))
    assert {call.body for call in calls} == {twin.instr_body}


STREAMS = [param for param in TWINS if param.values[1].is_stream and len(param.values[1].instr_body) < 6000]


@pytest.mark.parametrize(("engine_name", "twin"), STREAMS)
def test_a_stream_is_restored_wherever_it_is_cut(engine_name, twin):
    engine = get(engine_name)
    request = chat.decode(twin.plain_request)
    prepared = engine.prepare(request, UpstreamStream.ON)
    for at in range(len(twin.instr_body)):
        tap = StreamTap(engine, prepared, request.n)
        seen = tap.feed(twin.instr_body[:at]) + tap.feed(twin.instr_body[at:])
        tap.close()
        assert mask(seen + tap.held) == mask(twin.plain_body), at


def test_there_are_twins_of_both_engines():
    names = [param.values[0] for param in TWINS]
    assert {name: len(list(group)) for name, group in itertools.groupby(names)} == {"vllm": 45, "llamacpp": 48}
    assert FixedEngine("vllm", "").known.engine.name == "vllm"
