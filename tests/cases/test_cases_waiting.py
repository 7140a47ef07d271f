"""Cases 21, 22, 24 and 83 to 85: slow engines, slow readers, large requests, clients that leave, stale connections."""

import asyncio
import contextlib
import io
import json
import struct
import time
from pathlib import Path

import openai
import pytest
from case_kit import ASK, ASK_STREAM, BOTH_WAYS, ask_once, content, direct, dumps, ids, path_to, sdk, told
from fakes.engine import Said, whole
from fakes.speech import SPEAKERS, Vllm, text

from orchard_proxy.schema.enums import Delivery, Outcome, UpstreamStream
from orchard_proxy.settings import ServeSettings

ABORT_S = 0.5
"""CONTRACTS: our upstream connection is closed within this time after the client left."""


def only(speaker, change):
    """Let `change` touch the answers to chat completions; what is asked beside them is answered at once."""

    def say(heard):
        said = speaker.say(heard)
        if heard.path == "/v1/chat/completions":
            change(said)
        return said

    return say


def slow(seconds: float):
    def change(said):
        said.before_head_s = seconds

    return change


# 21


@pytest.mark.case(21)
@pytest.mark.parametrize(("engine_name", "mode"), [("vllm", "auto"), ("vllm", "off"), ("llamacpp", "auto")])
async def test_a_slow_first_token_is_bridged_by_comments(tmp_path, engine_name, mode):
    """A load balancer sees a byte long before the engine says one; the SDK sees no difference."""
    speaker = SPEAKERS[engine_name](text("he", "llo"))
    settings = {"engine": engine_name, "mode": UpstreamStream(mode), "keepalive_s": 0.1}
    async with path_to(only(speaker, slow(0.6)), tmp_path, **settings) as (_, proxy):
        began = time.monotonic()
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            first_s, status = time.monotonic() - began, answer.status
            body = await answer.read()
        async with sdk(proxy) as client:
            chunks = [c async for c in await client.chat.completions.create(**ASK, stream=True)]
    assert (status, first_s < 0.4) == (200, True)
    assert body.startswith(b":")
    assert content(body) == "hello"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello"
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.COMPLETE] * 2
    assert all(any(edit.startswith("keep_alive") for edit in call.edits) for call in record.calls)
    assert record.trained == [[5, 6, 2]] * 2


@pytest.mark.case(21)
async def test_comments_also_bridge_a_pause_between_tokens(tmp_path):
    speaker = Vllm(text("he", "llo"))
    blocks = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True}).split(b"\n\n")
    pieces = [block + b"\n\n" for block in blocks if block]
    half = len(pieces[1]) // 2
    torn = [pieces[0], pieces[1][:half], pieces[1][half:], b"".join(pieces[2:])]
    said = Said(torn, content_type="text/event-stream", between_s=0.25)
    _, body = await ask_once(lambda _: said, tmp_path, ASK_STREAM, keepalive_s=0.1)
    assert body.count(b": keep-alive\n\n") >= 2
    assert body.replace(b": keep-alive\n\n", b"") == direct(speaker, ASK_STREAM)
    assert told(tmp_path).trained == [[5, 6, 2]]


@pytest.mark.case(21)
@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_an_engine_that_fails_fast_keeps_its_status(tmp_path, status):
    said = whole('{"error":{"message":"no"}}', status=status, before_head_s=0.05)
    got, body = await ask_once(lambda _: said, tmp_path, ASK_STREAM, keepalive_s=0.2)
    assert (got, body) == (status, b'{"error":{"message":"no"}}')
    assert told(tmp_path).call.http_status == status


@pytest.mark.case(21)
async def test_an_engine_that_fails_late_is_told_as_an_event(tmp_path):
    said = whole('{"error":{"message":"no such luck"}}', status=503, before_head_s=0.4)
    async with path_to(lambda _: said, tmp_path, keepalive_s=0.1) as (_, proxy), sdk(proxy) as client:
        with pytest.raises(openai.APIError, match="no such luck"):
            [c async for c in await client.chat.completions.create(**ASK, stream=True)]
    record = told(tmp_path)
    assert (record.call.outcome, record.call.http_status) == (Outcome.ENGINE_ERROR, 503)
    assert record.samples == []


@pytest.mark.case(21)
async def test_a_client_that_asked_for_a_whole_answer_gets_no_comments(tmp_path):
    speaker = Vllm(text("he", "llo"))
    _, body = await ask_once(only(speaker, slow(0.4)), tmp_path, ASK, keepalive_s=0.1)
    assert body == direct(speaker, ASK)


# 22


def open_sockets() -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(path.readlink()).startswith("socket:")
    return found


def raw_post(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-label\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connect(proxy, ask: dict):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), limit=2**16)
    writer.write(raw_post(dumps(ask)))
    return reader, writer


def big(tokens: int = 100):
    return text(*["x" * 50_000] * tokens)


@pytest.mark.case(22)
@pytest.mark.parametrize(
    ("engine_name", "ask"),
    [("vllm", ASK_STREAM), ("vllm", ASK), ("llamacpp", ASK_STREAM)],
    ids=["stream", "whole", "made-stream"],
)
async def test_a_client_that_stops_reading_loses_nothing_and_holds_up_nobody(tmp_path, engine_name, ask):
    speaker = SPEAKERS[engine_name](big())
    before = open_sockets()
    async with path_to(speaker, tmp_path, engine=engine_name) as (_, proxy):
        reader, writer = await connect(proxy, ask)
        await asyncio.sleep(0.5)
        async with proxy.post(dumps(ASK), key="somebody-else") as answer:
            assert answer.status == 200
            await answer.read()
        async with asyncio.timeout(20):
            body = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert body.count(b"x") > 5_000_000
    record = told(tmp_path)
    assert (record.call.outcome, record.call.delivery) == (Outcome.COMPLETE, Delivery.CONFIRMED)
    assert record.trained == [[*range(5, 105), 2]]
    assert open_sockets() <= before


@pytest.mark.case(22)
async def test_what_a_slow_reader_makes_us_hold_is_bounded(tmp_path):
    """The engine waits with us: of 20 MB little more than the sockets' buffers leaves it."""
    speaker = Vllm(big(400))
    async with path_to(speaker, tmp_path) as (engine, proxy):
        reader, writer = await connect(proxy, ASK_STREAM)
        await asyncio.sleep(0.6)
        (call,) = await proxy.recorded()
        held, over = len(call.body), engine.heard[0].over
        async with asyncio.timeout(20):
            while await reader.read(1 << 20):
                pass
        writer.close()
    assert not over
    assert held < 12_000_000
    assert told(tmp_path).call.outcome is Outcome.COMPLETE


@pytest.mark.case(22)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
async def test_a_client_that_never_reads_again_is_given_up(tmp_path, engine_name):
    speaker = SPEAKERS[engine_name](big(400))
    before = open_sockets()
    async with path_to(speaker, tmp_path, engine=engine_name, stall_s=0.3) as (_, proxy):
        _, writer = await connect(proxy, ASK_STREAM)
        await proxy.ended()
        await asyncio.sleep(0.5)
        writer.close()
    record = told(tmp_path)
    if engine_name == "vllm":  # The engine's own stream was still going.
        assert record.call.outcome is Outcome.CLIENT_GONE
        assert record.accounting.masked == {"client_gone": record.accounting.sampled}
    else:  # The answer was complete and committed; nobody has all of it.
        assert (record.call.outcome, record.call.delivery) == (Outcome.COMPLETE, Delivery.UNCERTAIN)
        assert record.accounting.masked == {"uncertain": 401}
    assert record.accounting.trained == 0
    assert open_sockets() <= before


# 24


async def pieces_of(body: bytes):
    view = memoryview(body)
    for start in range(0, len(body), 1 << 20):
        yield bytes(view[start : start + (1 << 20)])


@pytest.mark.case(24)
async def test_images_are_taken_and_recorded_up_to_the_limit(tmp_path):
    image = "data:image/png;base64," + "A" * 30_000_000
    parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": image}}]
    ask = dumps({**ASK, "messages": [{"role": "user", "content": parts}]})
    async with path_to(Vllm(text("a cat")), tmp_path) as (engine, proxy):
        async with proxy.post(io.BytesIO(ask)) as answer:
            assert answer.status == 200
            assert content(await answer.read()) == "a cat"
    assert len(engine.heard[0].body) > 30_000_000
    record = told(tmp_path)
    assert record.trained == [[5, 2]]
    assert json.loads(bytes(record.call.messages))[0]["content"] == parts


@pytest.mark.case(24)
async def test_a_hundred_megabytes_are_beyond_the_default_limit(tmp_path):
    assert ServeSettings().max_body_bytes == 64 * 1024 * 1024
    async with path_to(Vllm(text("a cat")), tmp_path) as (engine, proxy):
        async with proxy.post(io.BytesIO(dumps({**ASK, "user": "x" * 100_000_000}))) as answer:
            assert answer.status == 413
            assert "67108864" in (await answer.json())["error"]["message"]
        async with proxy.post(dumps(ASK)) as answer:
            assert answer.status == 200
    assert len(engine.heard) == 1
    assert len(told(tmp_path).calls) == 1


@pytest.mark.case(24)
@pytest.mark.parametrize("by_chunks", [False, True], ids=["content-length", "chunked"])
@pytest.mark.parametrize("more", [1, 5_000_000], ids=["one-byte", "far"])
async def test_beyond_the_limit_is_a_413_and_no_record(tmp_path, by_chunks, more):
    limit = 2_000_000
    fits = dumps({**ASK, "user": ""})
    fits = dumps({**ASK, "user": "x" * (limit - len(fits))})
    over = dumps({**ASK, "user": "x" * (len(json.loads(fits)["user"]) + more)})
    assert len(fits) == limit
    async with path_to(Vllm(text("hello")), tmp_path, max_body_bytes=limit) as (engine, proxy):
        async with proxy.post(pieces_of(fits) if by_chunks else io.BytesIO(fits)) as answer:
            assert answer.status == 200
        async with proxy.post(pieces_of(over) if by_chunks else io.BytesIO(over)) as answer:
            refused = (await answer.json())["error"]
    assert answer.status == 413
    assert (refused["code"], refused["type"]) == ("request_too_large", "invalid_request_error")
    assert "--max-body-bytes" in refused["message"]
    assert len(engine.heard) == 1
    assert len(told(tmp_path).calls) == 1


@pytest.mark.case(24)
async def test_the_sdk_raises_beyond_the_limit(tmp_path):
    async with path_to(Vllm(text("hello")), tmp_path, max_body_bytes=100_000) as (_, proxy), sdk(proxy) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 200_000}])
    assert raised.value.status_code == 413


# 83 and 84


def hanging_before(said):
    said.before_head_s = 60


def hanging_inside(said):
    body = b"".join(said.pieces)
    said.pieces, said.hang = [body[: len(body) // 2]], True


async def leave_by_closing(writer):
    writer.close()


async def leave_by_reset(writer):
    writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: a reset
    writer.transport.abort()


async def leave_by_half(writer):
    writer.write_eof()


LEAVING = {"close": leave_by_closing, "reset": leave_by_reset, "half-close": leave_by_half}


@pytest.mark.case(83, 84)
@pytest.mark.parametrize(
    ("leave", "engine_name"),
    [("close", "vllm"), ("reset", "vllm"), ("half-close", "vllm"), ("close", "llamacpp"), ("close", "openai")],
)
@pytest.mark.parametrize("hang", [hanging_before, hanging_inside], ids=["before-head", "inside"])
@BOTH_WAYS
async def test_the_engine_is_let_go_when_the_client_leaves(tmp_path, leave, engine_name, hang, ask):
    speaker = SPEAKERS[engine_name](text("he", "llo", "!"))
    async with path_to(only(speaker, hang), tmp_path, engine=engine_name) as (engine, proxy):
        _, writer = await connect(proxy, ask)
        async with asyncio.timeout(5):
            while not (heard := [h for h in engine.heard if h.path == "/v1/chat/completions"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await LEAVING[leave](writer)
        async with asyncio.timeout(ABORT_S):
            await heard[0].gone.wait()
        await proxy.ended()
        writer.close()
    record = told(tmp_path)
    assert record.call.outcome is Outcome.CLIENT_GONE
    assert record.call.delivery is Delivery.NONE
    assert (record.call.failure.code, record.call.failure.blame) == ("client_gone", "client")
    assert record.accounting.trained == 0
    assert record.accounting.masked.get("client_gone", 0) == record.accounting.sampled


@pytest.mark.case(84)
@pytest.mark.parametrize("n", [1, 2])
async def test_the_partial_answer_of_a_client_that_left_is_kept(tmp_path, n):
    speaker = Vllm(*[text("he", "llo", "!")] * n)
    blocks = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True}).split(b"\n\n")
    said = Said([b"".join(b + b"\n\n" for b in blocks[: 3 * n])], content_type="text/event-stream", hang=True)
    async with path_to(lambda _: said, tmp_path) as (engine, proxy):
        async with sdk(proxy) as client:
            streamed = await client.chat.completions.create(**ASK, stream=True, n=n)
            async for part in streamed:
                if part.choices[0].delta.content == "llo":
                    break
            await streamed.close()
        async with asyncio.timeout(ABORT_S):
            await engine.heard[0].gone.wait()
        await proxy.ended()
    record = told(tmp_path)
    assert record.call.outcome is Outcome.CLIENT_GONE
    assert [ids(choice) for choice in record.call.choices] == [[5, 6]] * n
    assert record.accounting.masked == {"client_gone": 2 * n}
    assert record.accounting.trained == 0


@pytest.mark.case(83)
async def test_a_client_that_gave_up_waiting_frees_its_call_and_no_other(tmp_path):
    """The SDK's own timeout, while another client of the same engine goes on."""
    speaker = Vllm(text("he", "llo"))

    def say(heard):
        said = speaker.say(heard)
        said.before_head_s = 30 if b"impatient" in heard.body else 0.5
        return said

    async with path_to(say, tmp_path) as (engine, proxy):
        async with sdk(proxy, timeout=0.2) as hasty:
            other = asyncio.create_task(ask_other(proxy))
            with pytest.raises(openai.APITimeoutError):
                await hasty.chat.completions.create(model="m", messages=[{"role": "user", "content": "impatient"}])
            async with asyncio.timeout(ABORT_S):
                await next(h for h in engine.heard if b"impatient" in h.body).gone.wait()
        assert await other == 200
    assert told(tmp_path).call.outcome is Outcome.CLIENT_GONE
    assert told(tmp_path, "other").trained == [[5, 6, 2]]


async def ask_other(proxy) -> int:
    async with proxy.post(dumps(ASK), key="other") as answer:
        await answer.read()
        return answer.status


@pytest.mark.case(83)
async def test_a_client_that_leaves_after_the_last_byte_has_it(tmp_path):
    """Leaving with the whole answer in hand is no loss, however rude the goodbye."""
    async with path_to(Vllm(text("he", "llo")), tmp_path) as (_, proxy):
        for ask in (ASK, ASK_STREAM):
            reader, writer = await connect(proxy, ask)
            await reader.read()
            await leave_by_reset(writer)
        await proxy.ended(2)
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.COMPLETE] * 2
    assert record.trained == [[5, 6, 2]] * 2


# 85


@pytest.mark.case(85)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
@pytest.mark.parametrize("size", [10, 3_000_000], ids=["small", "large"])
@BOTH_WAYS
async def test_a_stale_connection_costs_no_call_and_no_second_generation(tmp_path, engine_name, size, ask):
    speaker = SPEAKERS[engine_name](text("he", "llo"))
    ask = {**ask, "user": "x" * size}
    async with path_to(speaker, tmp_path, engine=engine_name) as (engine, proxy):
        engine.idle_close_s = 0.15
        for _ in range(4):
            async with proxy.post(io.BytesIO(dumps(ask))) as answer:
                assert answer.status == 200
                await answer.read()
            await asyncio.sleep(0.15)  # Right when the engine closes.
    assert len([h for h in engine.heard if h.path == "/v1/chat/completions"]) == 4
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.COMPLETE] * 4
    assert record.trained == [[5, 6, 2]] * 4


@pytest.mark.case(85)
@pytest.mark.parametrize("after_s", [0.0, 1.2], ids=["at-once", "later"])
@pytest.mark.parametrize("pieces", [[None], [b'{"id":', None]], ids=["head", "half-a-body"])
@pytest.mark.parametrize("status", [200, 0], ids=["answered", "no-byte"])
async def test_what_was_worked_on_is_not_sent_again(tmp_path, after_s, pieces, status):
    """An engine that read the request and dies may have generated: the client is told, and decides itself.

    Without a byte of an answer and at once, on a reused connection, nobody can tell it from a stale one: such a
    request may go out twice, never three times.
    """
    speaker = Vllm(text("he", "llo"))

    def say(heard):
        dies = b"die" in heard.body
        return Said(list(pieces), before_head_s=after_s, status=status) if dies else speaker.say(heard)

    async with path_to(say, tmp_path) as (engine, proxy):
        async with proxy.post(dumps(ASK)) as answer:
            await answer.read()
        async with proxy.post(dumps({**ASK, "user": "die"})) as answer:
            assert answer.status == 502
    unclear = status == 0 and after_s == 0
    assert len([h for h in engine.heard if b"die" in h.body]) == (2 if unclear else 1)
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.COMPLETE, Outcome.UPSTREAM_CUT]
    assert record.trained == [[5, 6, 2]]


@pytest.mark.case(85)
async def test_an_engine_that_was_restarted_is_found_again_at_once(tmp_path):
    """All pooled connections are dead; each is replaced without the client seeing it."""
    speaker = Vllm(text("he", "llo"))
    async with path_to(speaker, tmp_path) as (engine, proxy):
        statuses = [await ask_other(proxy) for _ in range(3)]
        for task in list(engine._tasks):
            task.cancel()
        await asyncio.sleep(0.05)
        statuses += await asyncio.gather(*[ask_other(proxy) for _ in range(5)])
    assert statuses == [200] * 8
    assert len(engine.heard) == 8
