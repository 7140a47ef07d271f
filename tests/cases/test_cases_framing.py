"""Cases 1, 2, 4 to 8: whatever the frames of a stream look like, bytes pass and tokens are kept."""

import json

import aiohttp
import openai
import pytest
from case_kit import ASK, ASK_STREAM, BOTH_WAYS, ENGINES, ask_once, content, direct, events, ids, path_to, sdk, told
from fakes.engine import Said, stream, whole
from fakes.speech import DONE, SPEAKERS, Vllm, text

from orchard_proxy.schema.enums import Outcome, UpstreamStream
from orchard_proxy.schema.packed import count

LINE_BREAKS = {f"U+{ord(c):04X}": c for c in "\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e\u2424\ufeff\u200b\x7f"}


def printed(body: bytes, **said):
    """An engine that prints exactly this."""
    return lambda _: stream(body, said.pop("sizes", 0), **said)


# 1


@pytest.mark.case(1)
@pytest.mark.parametrize("mark", LINE_BREAKS.values(), ids=LINE_BREAKS.keys())
@pytest.mark.parametrize("where", ["content", "reasoning"])
@BOTH_WAYS
async def test_unicode_line_breaks_are_no_line_ends(tmp_path, mark, where, ask):
    said = text(f"a{mark}", f"{mark}b", key=where, end=7)
    speaker = Vllm(said, sizes=1)
    status, body = await ask_once(speaker, tmp_path, ask)
    assert (status, body) == (200, direct(speaker, ask))
    record = told(tmp_path)
    assert ids(record.choice) == [5, 6, 7]
    assert count(record.choice.logprobs) == 3
    assert record.trained == [[5, 6, 7]]


@pytest.mark.case(1)
@ENGINES
async def test_unicode_line_breaks_survive_every_way_a_stream_is_made(tmp_path, engine_name):
    every = "".join(LINE_BREAKS.values())
    speaker = SPEAKERS[engine_name](text(f"a{every}", f"{every}b", end=7))
    for number, mode in enumerate(UpstreamStream):
        _, body = await ask_once(speaker, tmp_path / str(number), ASK_STREAM, engine=engine_name, mode=mode)
        assert content(body) == f"a{every}{every}b"
        record = told(tmp_path / str(number))
        assert json.loads(bytes(record.choice.message))["content"] == f"a{every}{every}b"


@pytest.mark.case(1)
async def test_unicode_line_breaks_in_what_the_client_says_and_as_escapes(tmp_path):
    every = "".join(LINE_BREAKS.values())
    escaped = direct(Vllm(text("a\u2028b", end=7)), {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    escaped = escaped.replace("\u2028".encode(), b"\\u2028")
    ask = {**ASK_STREAM, "messages": [{"role": "user", "content": every}]}
    async with path_to(printed(escaped, sizes=3), tmp_path) as (engine, proxy):
        async with proxy.post(json.dumps(ask, ensure_ascii=False).encode()) as answer:
            body = await answer.read()
    assert b"a\\u2028b" in body
    assert engine.heard[0].json["messages"][0]["content"] == every
    assert json.loads(bytes(told(tmp_path).call.messages))[0]["content"] == every


@pytest.mark.case(1)
async def test_the_sdk_reads_unicode_line_breaks(tmp_path):
    every = "".join(LINE_BREAKS.values())
    async with path_to(Vllm(text("a", every, "b"), sizes=1), tmp_path) as (_, proxy), sdk(proxy) as client:
        chunks = [c async for c in await client.chat.completions.create(**ASK, stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == f"a{every}b"


# 2


SPELLINGS = {
    "no-space": lambda body: body.replace(b"data: ", b"data:"),
    "crlf": lambda body: body.replace(b"\n", b"\r\n"),
    "cr": lambda body: body.replace(b"\n", b"\r"),
    "crlf-no-space": lambda body: body.replace(b"data: ", b"data:").replace(b"\n", b"\r\n"),
    "mixed": lambda body: body.replace(b"\n\n", b"\r\n\n", 2).replace(b"\n\n", b"\r\r", 1),
    "more-spaces": lambda body: body.replace(b"data: ", b"data:   "),
    "more-blank-lines": lambda body: body.replace(b"\n\n", b"\n\n\n\n"),
    "bom": lambda body: b"\xef\xbb\xbf" + body,
}


@pytest.mark.case(2)
@pytest.mark.parametrize("spelt", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("speech", [[text("he", "llo")], [text("a"), text("b", "c")]], ids=["one", "n2"])
async def test_other_spellings_of_the_frame_say_the_same(tmp_path, spelt, size, speech):
    speaker = Vllm(*speech)
    ask = {**ASK_STREAM, "n": len(speech)}
    asked = direct(speaker, {**ask, "return_token_ids": True, "logprobs": True})
    _, body = await ask_once(printed(spelt(asked), sizes=size), tmp_path, ask)
    assert body == spelt(direct(speaker, ask))
    record = told(tmp_path)
    assert [ids(choice) for choice in record.call.choices] == [one.ids for one in speech]
    assert record.call.outcome is Outcome.COMPLETE
    assert record.trained == [one.ids for one in speech]


# 4


def between(extra: bytes):
    return lambda body: extra + body.replace(b"\n\n", b"\n\n" + extra)


FIELDS = {
    "comment": between(b": ping\n\n"),
    "bare-comment": between(b":\n\n"),
    "comment-line-in-event": lambda body: body.replace(b"data: ", b": ping\ndata: "),
    "event": lambda body: body.replace(b"data: ", b"event: message\ndata: "),
    "id": lambda body: body.replace(b"data: ", b"id: 7\ndata: "),
    "retry": between(b"retry: 3000\n\n"),
    "event-without-data": between(b"event: ping\n\n"),
    "fields-behind": lambda body: body.replace(b"\n\n", b"\nid: 9\nevent: x\n\n"),
    "unknown-field": lambda body: body.replace(b"data: ", b"foo: {}\ndata: "),
    "field-without-colon": lambda body: body.replace(b"data: ", b"nonsense\ndata: "),
}


@pytest.mark.case(4)
@pytest.mark.parametrize("spelt", FIELDS.values(), ids=FIELDS.keys())
@pytest.mark.parametrize("size", [0, 1])
async def test_comments_and_other_fields_pass_and_change_nothing(tmp_path, spelt, size):
    speaker = Vllm(text("he", "llo"))
    asked = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    _, body = await ask_once(printed(spelt(asked), sizes=size), tmp_path, ASK_STREAM)
    assert body == spelt(direct(speaker, ASK_STREAM))
    record = told(tmp_path)
    assert record.trained == [[5, 6, 2]]
    assert record.call.outcome is Outcome.COMPLETE


@pytest.mark.case(4)
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("size", [0, 1])
async def test_data_of_several_lines_is_joined(tmp_path, end, size):
    speaker = Vllm(text("he", "llo"))
    asked = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    spelt = asked.replace(b',"choices":', b",\ndata: " + b'"choices":').replace(b"\n", end)
    _, body = await ask_once(printed(spelt, sizes=size), tmp_path, ASK_STREAM)
    assert events(body) == events(direct(speaker, ASK_STREAM))
    assert told(tmp_path).trained == [[5, 6, 2]]


# 5 and 6


def without_finish(body: bytes) -> bytes:
    """Drop the last event before [DONE], and [DONE]."""
    *most, _finish, _done, _ = body.split(b"\n\n")
    return b"\n\n".join(most) + b"\n\n"


ENDS = {
    "no-done": (lambda body: body.removesuffix(DONE), Outcome.COMPLETE),
    "no-done-no-blank-line": (lambda body: body.removesuffix(DONE)[:-1], Outcome.COMPLETE),
    "no-done-no-line-end": (lambda body: body.removesuffix(DONE)[:-2], Outcome.COMPLETE),
    "done-without-blank-line": (lambda body: body[:-2], Outcome.COMPLETE),
    "bytes-behind-done": (lambda body: body + b": bye\n\n", Outcome.COMPLETE),
    "before-finish": (without_finish, Outcome.UPSTREAM_CUT),
}


@pytest.mark.case(5, 6)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("cut", [False, True], ids=["closed", "cut"])
@pytest.mark.parametrize("speech", [[text("he", "llo")], [text("a"), text("b", "c")]], ids=["one", "n2"])
async def test_a_stream_is_over_when_every_choice_has_finished(tmp_path, name, cut, speech):
    """[DONE] and a last blank line are courtesy; the finish reason decides."""
    ask = {**ASK_STREAM, "n": len(speech)}
    asked = direct(Vllm(*speech), {**ask, "return_token_ids": True, "logprobs": True})
    spelt, outcome = ENDS[name]
    body = spelt(asked)
    said = Said([body, None] if cut else [body], content_type="text/event-stream")
    async with path_to(lambda _: said, tmp_path) as (_, proxy):
        seen, broken = b"", False
        async with proxy.post(json.dumps(ask).encode()) as answer:
            try:
                async for part in answer.content.iter_any():
                    seen += part
            except aiohttp.ClientPayloadError:
                broken = True
    record = told(tmp_path)
    assert record.call.outcome is outcome
    if outcome is Outcome.COMPLETE:
        assert not broken
        assert record.trained == [one.ids for one in speech]
        assert {e["choices"][0]["index"] for e in events(seen) if e["choices"][0]["finish_reason"]} == {
            *range(len(speech))
        }
        assert ("terminated_without_done" in record.problems) is name.startswith("no-done")
    else:
        assert broken
        assert events(seen)[-1]["error"]["code"]
        assert record.trained == []
        assert record.accounting.masked == {"upstream_cut": record.accounting.sampled}


@pytest.mark.case(5)
async def test_a_last_event_with_usage_and_no_blank_line_is_read(tmp_path):
    speaker = Vllm(text("he", "llo"))
    ask = {**ASK_STREAM, "stream_options": {"include_usage": True}}
    asked = direct(speaker, {**ask, "return_token_ids": True, "logprobs": True})
    _, body = await ask_once(printed(asked.removesuffix(b"\n\n" + DONE)), tmp_path, ask)
    assert events(body)[-1]["usage"]["completion_tokens"] == 3
    record = told(tmp_path)
    assert record.call.usage.completion_tokens == 3
    assert record.trained == [[5, 6, 2]]


@pytest.mark.case(6)
async def test_done_before_the_finish_is_a_cut_and_passes_as_the_engine_said_it(tmp_path):
    asked = direct(Vllm(text("he", "llo")), {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    body = without_finish(asked) + DONE
    status, seen = await ask_once(printed(body), tmp_path, ASK_STREAM)
    assert (status, seen) == (200, without_finish(direct(Vllm(text("he", "llo")), ASK_STREAM)) + DONE)
    record = told(tmp_path)
    assert record.call.outcome is Outcome.UPSTREAM_CUT
    assert ids(record.choice) == [5, 6]
    assert record.trained == []
    assert record.accounting.masked == {"upstream_cut": 2}


# 7


CUTS = {"after-head": 0, "after-role": 1, "after-one-token": 2, "after-two-tokens": 3}


@pytest.mark.case(7)
@pytest.mark.parametrize("after", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("half", [False, True], ids=["between-events", "inside-an-event"])
@pytest.mark.parametrize("gently", [False, True], ids=["reset", "closed"])
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
async def test_a_cut_stream_keeps_its_tokens_and_is_not_trained(tmp_path, after, half, gently, engine_name):
    """However the engine goes, the client can tell; the tokens that came are kept under the cut's name."""
    speaker = SPEAKERS[engine_name](text("he", "llo", "!"))
    upstream = {"return_token_ids": True, "logprobs": True}
    blocks = direct(speaker, {**ASK_STREAM, **upstream}).split(b"\n\n")
    said = b"".join(block + b"\n\n" for block in blocks[:after]) + (blocks[after][:-9] if half else b"")
    pieces = [said] if gently else [said, None]

    def say(heard):
        if heard.path != "/v1/chat/completions":
            return speaker.say(heard)
        return Said(list(pieces), content_type="text/event-stream")

    async with path_to(say, tmp_path, engine=engine_name, mode=UpstreamStream.ON) as (_, proxy):
        seen, broken = b"", False
        async with proxy.post(json.dumps(ASK_STREAM).encode()) as answer:
            try:
                async for part in answer.content.iter_any():
                    seen += part
            except aiohttp.ClientPayloadError:
                broken = True
    assert (answer.status, broken) == ((200, True) if after else (502, False))
    error = events(seen)[-1]["error"] if after else json.loads(seen)["error"]
    assert error["message"]
    assert b"[DONE]" not in seen
    record = told(tmp_path)
    assert record.call.outcome is Outcome.UPSTREAM_CUT
    assert record.samples == []
    tokens = max(after - 1, 0)
    if engine_name == "vllm":
        assert [t for choice in record.call.choices for t in ids(choice)] == [5, 6][:tokens]
        assert [count(choice.logprobs) for choice in record.call.choices] == [tokens] * min(after, 1)
    assert record.accounting.sampled == tokens
    assert record.accounting.masked == ({"upstream_cut": tokens} if tokens else {})


@pytest.mark.case(7)
async def test_a_cut_stream_of_two_choices_masks_both(tmp_path):
    """One choice is over, the other is not: the call is cut."""
    speaker = Vllm(text("a"), text("b", "c", "d"))
    blocks = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True}).split(b"\n\n")
    said = Said([b"".join(block + b"\n\n" for block in blocks[:6]), None], content_type="text/event-stream")
    async with path_to(lambda _: said, tmp_path) as (_, proxy):
        async with proxy.post(json.dumps({**ASK_STREAM, "n": 2}).encode()) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
    record = told(tmp_path)
    assert [ids(choice) for choice in record.call.choices] == [[5, 2], [5, 6]]
    assert record.accounting.masked == {"upstream_cut": 4}
    assert record.samples == []


@pytest.mark.case(7)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])
@BOTH_WAYS
async def test_a_whole_answer_that_is_cut_is_a_502_and_kept(tmp_path, engine_name, ask):
    speaker = SPEAKERS[engine_name](text("he", "llo"))

    def say(heard):
        if heard.path != "/v1/chat/completions":
            return speaker.say(heard)
        return Said([direct(speaker, ASK)[:150], None])

    status, body = await ask_once(say, tmp_path, ask, engine=engine_name, mode=UpstreamStream.OFF)
    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_cut")
    record = told(tmp_path)
    assert record.call.outcome is Outcome.UPSTREAM_CUT
    assert record.samples == []


@pytest.mark.case(7)
async def test_the_sdk_raises_on_a_cut_stream(tmp_path):
    blocks = direct(Vllm(text("he", "llo")), {**ASK_STREAM, "return_token_ids": True}).split(b"\n\n")
    said = Said([b"\n\n".join(blocks[:2]) + b"\n\n" + blocks[2][:40]], content_type="text/event-stream")
    async with path_to(lambda _: said, tmp_path) as (_, proxy), sdk(proxy) as client:
        with pytest.raises(openai.APIError, match="ended early"):
            [c async for c in await client.chat.completions.create(**ASK, stream=True)]


# 8


ERRORS = {
    "openai": b'data: {"error":{"message":"boom","type":"server_error","code":500}}\n\n',
    "text": b'data: {"error":"boom"}\n\n',
    "old-vllm": b'data: {"object":"error","message":"boom","type":"InternalServerError","code":500}\n\n',
    "named-event": b'event: error\ndata: {"message":"boom"}\n\n',
    "beside-choices": b'data: {"choices":[],"error":{"message":"boom"}}\n\n',
    "spaced": b'data:  { "error" : { "message" : "boom" } }\n\n',
    "with-nan": b'data: {"error":{"message":"boom","at":NaN}}\n\n',
    "last-without-blank-line": b'data: {"error":{"message":"boom"}}',
}


@pytest.mark.case(8)
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("after", [0, 1, 3], ids=["first", "after-role", "after-tokens"])
@pytest.mark.parametrize("engine_name", ["vllm", "openai"])
async def test_an_error_inside_a_200_stream_is_an_error_and_no_sample(tmp_path, error, after, engine_name):
    speaker = SPEAKERS[engine_name](text("he", "llo"))
    blocks = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True}).split(b"\n\n")
    body = b"".join(block + b"\n\n" for block in blocks[:after]) + error + (DONE if error.endswith(b"\n\n") else b"")
    status, seen = await ask_once(printed(body, sizes=11), tmp_path, ASK_STREAM, engine=engine_name)
    assert status == 200
    assert error in seen
    record = told(tmp_path)
    assert record.call.outcome is Outcome.ENGINE_ERROR
    assert record.call.failure.code == "error_in_stream"
    assert "boom" in record.call.failure.message
    assert record.samples == []
    assert record.trained == []
    assert record.accounting.masked.get("engine_error", 0) == record.accounting.sampled


@pytest.mark.case(8)
async def test_the_sdk_raises_on_an_error_event(tmp_path):
    role = direct(Vllm(text("he")), ASK_STREAM).split(b"\n\n")[0] + b"\n\n"
    async with path_to(printed(role + ERRORS["openai"] + DONE), tmp_path) as (_, proxy), sdk(proxy) as client:
        with pytest.raises(openai.APIError, match="boom"):
            [c async for c in await client.chat.completions.create(**ASK, stream=True)]


@pytest.mark.case(8)
@pytest.mark.parametrize("member", ["null", "{}", '""'], ids=["null", "empty-object", "empty-text"])
async def test_an_empty_error_member_is_no_error(tmp_path, member):
    speaker = Vllm(text("he", "llo"))
    asked = direct(speaker, {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    body = asked.replace(b'{"id"', b'{"error":%s,"id"' % member.encode())
    await ask_once(printed(body), tmp_path, ASK_STREAM)
    record = told(tmp_path)
    assert record.call.outcome is Outcome.COMPLETE
    assert record.trained == [[5, 6, 2]]


@pytest.mark.case(8)
@BOTH_WAYS
@pytest.mark.parametrize("error", ['{"error":{"message":"boom"}}', '{"error":"boom"}'], ids=["object", "text"])
async def test_an_error_body_with_status_200_is_an_error(tmp_path, ask, error):
    status, body = await ask_once(lambda _: whole(error), tmp_path, ask)
    assert status == 200
    assert b"boom" in body
    record = told(tmp_path)
    assert record.call.outcome is Outcome.ENGINE_ERROR
    assert record.samples == []
