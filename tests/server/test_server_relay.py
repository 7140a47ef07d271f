"""The pipeline, through real sockets, in front of a scripted engine."""

import asyncio
import io
import json

import aiohttp
import pytest
from fakes.engine import Said, ScriptedEngine, stream, whole
from proxy import proxy_before

from orchard_proxy.schema.enums import Outcome, UpstreamStream
from orchard_proxy.wire import chat, sse

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASK_STREAM = {**ASK, "stream": True}


def chunk(delta, finish=None, index=0, **extra):
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": extra.pop("ids", None),
    }
    return sse.encode(
        json.dumps(
            {"id": "x", "object": "chat.completion.chunk", "choices": [choice], **extra}, separators=(",", ":")
        ).encode()
    )


HELLO = [
    chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2]),
    chunk({"content": "he"}, ids=[5]),
    chunk({"content": "llo"}, ids=[6]),
    chunk({}, "stop", ids=[7]),
]
DONE = sse.encode(b"[DONE]")
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [5, 6, 7],
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    "prompt_token_ids": [1, 2],
}


def dumps(body) -> bytes:
    return json.dumps(body).encode()


def raw_post(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def events(body: bytes) -> list[dict]:
    parser = sse.SseParser()
    found = parser.feed(body) + parser.close()
    return [json.loads(e.data) for e in found if e.data is not None and not sse.is_done(e)]


async def test_a_whole_answer_is_stripped_recorded_and_delivered(tmp_path):
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK)) as answer:
            body = await answer.json()
        assert answer.status == 200
        assert body["choices"][0]["token_ids"] is None
        assert body["prompt_token_ids"] is None
        (call,) = await proxy.recorded()
    assert call.begin.body == dumps(ASK)
    assert call.begin.rollout_id == "a-label"
    assert json.loads(call.body) == ANSWER
    assert call.end.outcome is Outcome.COMPLETE
    assert call.delivered
    assert engine.heard[0].json["return_token_ids"] is True
    assert engine.heard[0].headers["authorization"] == "Bearer upstream-secret"


async def test_a_stream_passes_event_by_event(tmp_path):
    said = stream(b"".join(HELLO) + DONE, 1)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            body = await answer.read()
        (call,) = await proxy.recorded()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert body.endswith(DONE)
    assert [e["choices"][0]["delta"] for e in events(body)] == [
        {"role": "assistant", "content": ""},
        {"content": "he"},
        {"content": "llo"},
        {},
    ]
    assert all(e["choices"][0]["token_ids"] is None for e in events(body))
    assert call.body == b"".join(HELLO) + DONE
    assert call.end.outcome is Outcome.COMPLETE
    assert call.delivered


async def test_a_stream_is_passed_on_before_it_is_over(tmp_path):
    said = Said([*HELLO[:2]], content_type="text/event-stream", hang=True)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            async with asyncio.timeout(2):
                first = await answer.content.readuntil(b"\n\n")
    assert b'"role":"assistant"' in first


async def test_no_client_sees_the_end_before_it_is_committed(tmp_path):
    """The finishing event and all behind it wait for END, also when the engine dawdles before [DONE]."""
    said = Said([*HELLO, DONE], content_type="text/event-stream", between_s=0.15)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            seen = b""
            while b'"stop"' not in seen:
                seen += await answer.content.readany()
            ends = [call.end for call in await proxy.recorded()]
    assert ends[0].outcome is Outcome.COMPLETE


@pytest.mark.parametrize(
    ("body", "outcome", "code"),
    [
        pytest.param(b"".join(HELLO), Outcome.COMPLETE, None, id="no-done-after-finish"),
        pytest.param(b"".join(HELLO)[:-2], Outcome.COMPLETE, None, id="last-event-without-blank-line"),
        pytest.param(b"".join(HELLO[:3]), Outcome.UPSTREAM_CUT, "stream_incomplete", id="closed-before-finish"),
        pytest.param(b"".join(HELLO[:3]) + DONE, Outcome.UPSTREAM_CUT, "stream_incomplete", id="done-before-finish"),
        pytest.param(b"", Outcome.UPSTREAM_CUT, "empty_stream", id="empty"),
        pytest.param(DONE, Outcome.UPSTREAM_CUT, "empty_stream", id="done-alone"),
        pytest.param(
            HELLO[0] + sse.encode(b'{"error":{"message":"boom"}}') + DONE,
            Outcome.ENGINE_ERROR,
            "error_in_stream",
            id="error-event",
        ),
        pytest.param(
            HELLO[0] + b'event: error\ndata: {"message":"boom"}\n\n',
            Outcome.ENGINE_ERROR,
            "error_in_stream",
            id="error-by-event-name",
        ),
        pytest.param(
            HELLO[0] + sse.encode(b"<html>") + HELLO[3] + DONE, Outcome.ENGINE_ERROR, "garbage_in_stream", id="garbage"
        ),
        pytest.param(HELLO[0] + HELLO[1] + chunk({}, "length") + DONE, Outcome.LENGTH, None, id="length"),
        pytest.param(HELLO[0] + chunk({}, "abort") + DONE, Outcome.UPSTREAM_CUT, "finish_abort", id="abort"),
        pytest.param(HELLO[0] + chunk({}, "error") + DONE, Outcome.ENGINE_ERROR, "finish_error", id="finish-error"),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 7], ids=["whole", "bytes", "sevens"])
async def test_how_a_stream_ends(tmp_path, body, outcome, code, size):
    async with ScriptedEngine(lambda _: stream(body, size)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        try:
            async with proxy.post(dumps(ASK_STREAM)) as answer:
                seen = await answer.read()
        except aiohttp.ClientPayloadError:
            seen = None  # A broken transfer is how a cut shows.
        (call,) = await proxy.ended()
    assert call.body == body
    assert call.end.outcome is outcome
    assert (call.end.failure.code if call.end.failure else None) == code
    if outcome in (Outcome.COMPLETE, Outcome.LENGTH):
        assert seen is not None
        assert call.delivered


async def test_a_cut_stream_gives_an_error_event_and_a_broken_transfer(tmp_path):
    said = Said([HELLO[0], HELLO[1], None], content_type="text/event-stream")
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        seen = b""
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    seen += await answer.content.readany()
        (call,) = await proxy.ended()
    assert events(seen)[-1]["error"]["code"] == "engine_cut"
    assert DONE not in seen
    assert call.body == HELLO[0] + HELLO[1]
    assert call.end.outcome is Outcome.UPSTREAM_CUT
    assert not call.delivered


async def test_a_stream_cut_after_the_finish_is_complete(tmp_path):
    said = Said([*HELLO, None], content_type="text/event-stream")
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    assert call.end.outcome is Outcome.COMPLETE
    assert events(seen)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_two_interleaved_choices_both_finish(tmp_path):
    body = [
        chunk({"role": "assistant", "content": ""}, index=0, prompt_token_ids=[1]),
        chunk({"role": "assistant", "content": ""}, index=1, prompt_token_ids=[1]),
        chunk({"content": "a"}, index=1, ids=[5]),
        chunk({"content": "b"}, index=0, ids=[6]),
        chunk({}, "stop", index=1, ids=[2]),
        chunk({"content": "c"}, index=0, ids=[7]),
        chunk({}, "length", index=0, ids=[8]),
    ]
    said = stream(b"".join(body) + DONE, 5)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps({**ASK_STREAM, "n": 2})) as answer:
            seen = events(await answer.read())
        (call,) = await proxy.ended()
    finishes = {
        e["choices"][0]["index"]: e["choices"][0]["finish_reason"] for e in seen if e["choices"][0]["finish_reason"]
    }
    assert finishes == {0: "length", 1: "stop"}
    assert call.end.outcome is Outcome.LENGTH


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>busy</html>", b"{}", b"[]", b'"text"', b"null", b'{"choices":[]}', b'{"choices":', b"\xff\xfe"],
    ids=["empty", "html", "object", "array", "string", "null", "no-choices", "torn", "binary"],
)
@pytest.mark.parametrize("ask", [ASK, ASK_STREAM], ids=["whole", "stream"])
async def test_a_200_that_is_no_answer_is_refused(tmp_path, body, ask):
    said = whole(body, content_type="text/html")
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ask)) as answer:
            error = (await answer.json())["error"]
        (call,) = await proxy.ended()
    assert answer.status == 502
    assert error["code"] == "bad_upstream_answer"
    assert call.end.outcome is Outcome.ENGINE_ERROR
    assert call.end.failure.code == "not_an_answer"
    assert call.body == body


async def test_a_client_that_asked_for_a_stream_gets_one_from_an_engine_that_answers_whole(tmp_path):
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events(seen) if e["choices"]) == "hello"
    assert seen.endswith(DONE)
    assert "synthesised_stream" in [edit.name for edit in call.end.edits]


async def test_a_stream_that_nobody_expected_is_passed_on_as_one(tmp_path):
    """An engine that reads `"stream": "true"` as true."""
    said = stream(b"".join(HELLO) + DONE)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path, engine="openai") as proxy:
        async with proxy.post(dumps({**ASK, "stream": "true"})) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    assert seen == b"".join(HELLO) + DONE
    assert call.end.outcome is Outcome.COMPLETE


async def test_a_redirect_never_leads_the_client_past_the_proxy(tmp_path):
    said = whole(b"", status=307, headers={"location": "http://elsewhere.invalid/"})
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK), allow_redirects=False) as answer:
            assert answer.status == 502
            assert "location" not in answer.headers
        (call,) = await proxy.ended()
    assert call.end.failure.code == "http_307"


@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])
@pytest.mark.parametrize("mode", [UpstreamStream.OFF], ids=["off"])
async def test_upstream_stream_off_asks_for_a_whole_answer(tmp_path, engine_name, mode):
    async with (
        ScriptedEngine(lambda _: whole(ANSWER)) as engine,
        proxy_before(engine.url, tmp_path, engine=engine_name, mode=mode) as proxy,
    ):
        async with proxy.post(dumps({**ASK_STREAM, "stream_options": {"include_usage": True}})) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    sent = next(heard.json for heard in engine.heard if heard.path == "/v1/chat/completions")
    assert not sent.get("stream")
    assert "stream_options" not in sent
    assert events(seen)[-1]["usage"]["completion_tokens"] == 3
    assert call.end.outcome is Outcome.COMPLETE


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("ask", [ASK, ASK_STREAM], ids=["whole", "stream"])
async def test_an_engine_error_passes_as_it_is(tmp_path, status, ask):
    body = b'{"error":{"message":"no: \xe2\x80\xa8 such","code":%d}}' % status
    said = whole(body, status=status, headers={"retry-after": "7"})
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ask)) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    assert (answer.status, seen) == (status, body)
    assert answer.headers["retry-after"] == "7"
    assert call.end.outcome is Outcome.ENGINE_ERROR
    assert call.end.failure.code == f"http_{status}"


@pytest.mark.parametrize("ask", [ASK, ASK_STREAM], ids=["whole", "stream"])
async def test_a_client_that_leaves_stops_the_engine(tmp_path, ask):
    pieces = [HELLO[0], HELLO[1]] if ask is ASK_STREAM else []
    kind = "text/event-stream" if ask is ASK_STREAM else "application/json"
    said = Said(pieces, content_type=kind, before_head_s=0 if pieces else 60, hang=True)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        with pytest.raises((TimeoutError, aiohttp.ClientError)):
            async with proxy.post(dumps(ask), timeout=aiohttp.ClientTimeout(total=0.3)) as answer:
                await answer.read()
        async with asyncio.timeout(0.5):
            await engine.heard[0].gone.wait()
        (call,) = await proxy.ended()
    assert call.end.outcome is Outcome.CLIENT_GONE
    assert call.body == b"".join(pieces)
    assert not call.delivered


@pytest.mark.parametrize("ask", [ASK, ASK_STREAM], ids=["whole", "stream"])
async def test_an_absent_engine_is_named(tmp_path, ask):
    async with proxy_before("http://127.0.0.1:9", tmp_path) as proxy:
        async with proxy.post(dumps(ask)) as answer:
            error = (await answer.json())["error"]
        (call,) = await proxy.ended()
        assert proxy.engines.suspected == 1
    assert answer.status == 502
    assert "--upstream" in error["message"]
    assert call.end.failure.code == "engine_unreachable"


async def test_an_unprobed_engine_is_a_recorded_failure(tmp_path):
    async with proxy_before("http://127.0.0.1:9", tmp_path) as proxy:
        proxy.engines.absent = True
        async with proxy.post(dumps(ASK)) as answer:
            assert answer.status == 502
        (call,) = await proxy.ended()
    assert call.edit.engine == "none"
    assert call.end.outcome is Outcome.ENGINE_ERROR


async def test_a_silent_engine_is_given_up(tmp_path):
    said = Said([], before_head_s=60)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path, silence_s=0.2) as proxy:
        async with proxy.post(dumps(ASK)) as answer:
            assert answer.status == 504
        (call,) = await proxy.ended()
    assert call.end.failure.code == "engine_silent"


async def test_a_slow_first_token_is_bridged_by_comments(tmp_path):
    said = stream(b"".join(HELLO) + DONE, before_head_s=0.5)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path, keepalive_s=0.1) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            seen = await answer.read()
        (call,) = await proxy.ended()
    assert seen.startswith(b":")
    assert len(events(seen)) == 4
    assert [edit.name for edit in call.end.edits] == ["keep_alive"]


async def test_a_fast_failure_keeps_its_status_and_a_late_one_becomes_an_event(tmp_path):
    refused = {"error": {"message": "no", "code": 400}}
    said = whole(refused, status=400)
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path, keepalive_s=0.1) as proxy:
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            assert answer.status == 400
        said.before_head_s = 0.4
        seen = b""
        async with proxy.post(dumps(ASK_STREAM)) as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    seen += await answer.content.readany()
    assert "no" in events(seen)[-1]["error"]["message"]


async def test_a_stale_pooled_connection_is_replaced_once(tmp_path):
    async with (
        ScriptedEngine(lambda _: whole(ANSWER), idle_close_s=0.2) as engine,
        proxy_before(engine.url, tmp_path) as proxy,
    ):
        for _ in range(4):
            async with proxy.post(dumps(ASK)) as answer:
                assert answer.status == 200
            await asyncio.sleep(0.2)  # Right when the engine closes.
    assert len(engine.heard) == 4


async def test_a_request_that_was_worked_on_is_never_sent_twice(tmp_path):
    answers = iter([whole(ANSWER), Said([None], before_head_s=1.2)])
    async with ScriptedEngine(lambda _: next(answers)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.post(dumps(ASK)) as answer:
            assert answer.status == 200
        async with proxy.post(dumps(ASK)) as answer:
            assert answer.status == 502
    assert len(engine.heard) == 2


async def test_a_slow_reader_holds_the_engine_back(tmp_path):
    """5 MB for a client that does not read: bounded buffers, and the recording finishes once it reads again."""
    big = [chunk({"content": "x" * 50_000}) for _ in range(100)]
    said = Said([*HELLO[:1], *big, HELLO[3], DONE], content_type="text/event-stream")
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), limit=2**16)
        body = dumps(ASK_STREAM)
        writer.write(raw_post(body))
        await asyncio.sleep(0.7)
        (call,) = await proxy.recorded()
        assert call.end is None
        held_back = len(call.body)
        async with asyncio.timeout(10):
            while b"data: [DONE]" not in (await reader.readline()):
                pass
        (call,) = await proxy.ended()
        writer.close()
    assert held_back < 5_000_000
    assert len(call.body) > 5_000_000
    assert call.delivered


async def test_a_client_that_never_reads_is_given_up(tmp_path):
    big = [chunk({"content": "x" * 50_000}) for _ in range(400)]
    said = Said([*HELLO[:1], *big, HELLO[3], DONE], content_type="text/event-stream")
    async with ScriptedEngine(lambda _: said) as engine, proxy_before(engine.url, tmp_path, stall_s=0.3) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]), limit=2**16)
        body = dumps(ASK_STREAM)
        writer.write(raw_post(body))
        (call,) = await proxy.ended()
        async with asyncio.timeout(1):
            await engine.heard[0].gone.wait()
        writer.close()
    assert call.end.outcome is Outcome.CLIENT_GONE


async def test_two_rollouts_with_the_same_body_are_two_generations(tmp_path):
    async with (
        ScriptedEngine(lambda _: whole(ANSWER, before_head_s=0.1)) as engine,
        proxy_before(engine.url, tmp_path) as proxy,
    ):

        async def ask(key):
            async with proxy.post(dumps(ASK), key=key) as answer:
                return answer.status

        assert await asyncio.gather(ask("a"), ask("b"), ask("a")) == [200, 200, 200]
        calls = await proxy.recorded()
    assert len(engine.heard) == 3
    assert sorted((call.begin.rollout_id, call.begin.seq) for call in calls) == [("a", 0), ("a", 1), ("b", 0)]


async def test_first_calls_of_a_label_that_come_together_are_numbered_once(tmp_path):
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine, proxy_before(engine.url, tmp_path) as proxy:

        async def ask():
            async def slowly():
                yield dumps(ASK)[:10]
                await asyncio.sleep(0.1)
                yield dumps(ASK)[10:]

            async with proxy.post(slowly()) as answer:
                return answer.status

        assert await asyncio.gather(*(ask() for _ in range(5))) == [200] * 5
        calls = await proxy.recorded()
    assert sorted(call.begin.seq for call in calls) == [0, 1, 2, 3, 4]


async def test_a_large_body_is_taken_and_a_larger_one_refused(tmp_path):
    limit = 3_000_000
    async with (
        ScriptedEngine(lambda _: whole(ANSWER)) as engine,
        proxy_before(engine.url, tmp_path, max_body_bytes=limit) as proxy,
    ):
        fits = dumps({**ASK, "pad": "x" * (limit - 200)})
        async with proxy.post(io.BytesIO(fits)) as answer:
            assert answer.status == 200
        async with proxy.post(io.BytesIO(dumps({**ASK, "pad": "x" * limit}))) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "request_too_large"
        assert len(await proxy.recorded()) == 1


async def test_one_rollout_cannot_fill_the_memory_of_all(tmp_path):
    """Many half-sent bodies under one key: a bound for all of them together, and other rollouts go on."""
    bounds = {"max_body_bytes": 400_000, "max_rollout_bytes": 1_000_000}
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine, proxy_before(engine.url, tmp_path, **bounds) as proxy:
        port = int(proxy.url.rsplit(":", 1)[1])
        writers, answers = [], []
        for _ in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_post(b"x" * 399_000)[:-1000])
            writers.append(writer)
            answers.append(asyncio.create_task(reader.readline()))
        done, _ = await asyncio.wait(answers, timeout=1)
        assert len(done) >= 3
        assert {task.result().split()[1] for task in done} == {b"429"}
        async with proxy.post(dumps(ASK), key="another") as answer:
            assert answer.status == 200
        for writer in writers:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)
        await asyncio.sleep(0.1)
        async with proxy.post(dumps(ASK), key="a") as answer:
            assert answer.status == 200


async def test_a_body_that_never_comes_is_given_up(tmp_path):
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine:
        async with proxy_before(engine.url, tmp_path, stall_s=0.2) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
            writer.write(raw_post(b"x" * 100)[:-10])
            async with asyncio.timeout(3):
                assert b" 408 " in await reader.readline()
            writer.close()


async def test_odd_bodies_are_the_engines_business(tmp_path):
    """Whatever is not a request of ours goes up untouched, and the engine refuses it in its own words."""
    refused = b'{"error":{"message":"bad"}}'
    async with (
        ScriptedEngine(lambda _: whole(refused, status=400)) as engine,
        proxy_before(engine.url, tmp_path) as proxy,
    ):
        for body in [b"", b"{", b"[]", b"null", b'{"messages":1,"n":"x","stream":"yes"}', b"\xff"]:
            async with proxy.post(body) as answer:
                assert (answer.status, await answer.read()) == (400, refused)
        calls = await proxy.ended(6)
    assert [heard.body for heard in engine.heard][:4] == [b"", b"{", b"[]", b"null"]
    assert {call.end.outcome for call in calls} == {Outcome.ENGINE_ERROR}


async def test_credentials_reach_no_record(tmp_path):
    secret = "sk-very-secret-0123456789"
    async with ScriptedEngine(lambda _: whole(ANSWER)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        for headers, path in [
            ({"Authorization": f"Bearer {secret}"}, "/v1/chat/completions"),
            ({"x-api-key": secret}, "/v1/chat/completions"),
            ({"x-goog-api-key": secret, "Cookie": f"a={secret}"}, "/v1/chat/completions"),
            ({}, f"/v1/chat/completions?key={secret}"),
            ({}, f"/r/{secret}/v1/chat/completions"),
        ]:
            async with proxy.session.post(proxy.url + path, data=dumps(ASK), headers=headers) as answer:
                assert answer.status == 200
        await proxy.recorded()
    assert all(secret not in str(heard.headers) + heard.path for heard in engine.heard)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


async def test_models_pass_through(tmp_path):
    models = b'{"object":"list","data":[{"id":"m"}]}'
    async with ScriptedEngine(lambda _: whole(models)) as engine, proxy_before(engine.url, tmp_path) as proxy:
        async with proxy.session.get(proxy.url + "/v1/models", headers={"Authorization": "Bearer a"}) as answer:
            assert (answer.status, await answer.read()) == (200, models)
        async with proxy.session.get(proxy.url + "/v1/models") as answer:
            assert answer.status == 401
    assert chat.DIALECT == "chat"
