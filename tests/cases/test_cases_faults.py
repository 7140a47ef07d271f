"""Cases 81, 82, 86, 89 and 91: full disks, deaths between commit and delivery, answers that are none, broken histories.

Case 79, fifty kills under load, is tests/server/test_server_kill.py.
"""

import asyncio
import itertools
import json
import os
import resource
import subprocess

import aiohttp
import openai
import pytest
from case_kit import (
    ADMIN,
    ASK,
    ASK_STREAM,
    BOTH_WAYS,
    CHAT,
    ENGINES,
    ask_once,
    direct,
    dumps,
    finish,
    path_to,
    sdk,
    told,
)
from fakes.engine import Said, ScriptedEngine, stream, whole
from fakes.speech import DONE, SPEAKERS, Vllm, text
from support.children import ORCHARD, Child

from orchard_proxy.schema.enums import Delivery, Outcome, UpstreamStream


class Served:
    """The real command, in a process that can be killed and whose files can be kept small."""

    def __init__(self, engine_url: str, folder, *flags: str) -> None:
        self.data_dir = folder / "data"
        known = ["--upstream", engine_url, "--data", str(self.data_dir), "--port", "0", "--admin-key", ADMIN]
        self._child = Child(["serve", *known, *flags], folder / "serve.port", folder / "serve.log")
        self._session = aiohttp.ClientSession()

    async def __aenter__(self):
        self.port = await asyncio.to_thread(self._child.wait_for_port)
        return self

    async def __aexit__(self, *_):
        await self._session.close()
        await asyncio.to_thread(self._child.stop if self._child.process.poll() is None else self._child.kill)

    def kill(self) -> None:
        self._child.kill()

    def limit_files(self, size: int) -> None:
        """No file of the server grows beyond this: what a full disk is to it."""
        _, hard = resource.prlimit(self._child.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._child.process.pid, resource.RLIMIT_FSIZE, (size, hard))

    async def send(self, method: str, path: str, body=None, key: str = ADMIN) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else dumps(body)
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            return answer.status, await answer.read()

    async def create(self, rollout_id: str) -> str:
        status, made = await self.send("POST", "/rollouts", {"rollout_id": rollout_id})
        assert status in (200, 201), made
        return json.loads(made)["api_key"]


def engine(speaker):
    def say(heard):
        if heard.path == "/v1/models":
            return whole({"object": "list", "data": [{"id": "m"}]})
        return speaker.say(heard)

    return ScriptedEngine(say)


# 81


@pytest.mark.case(81)
@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_full_disk_fails_the_call_and_is_over_when_there_is_room(tmp_path, durability):
    """No answer that is not on the disk, no silence about it, nothing that was delivered is lost."""
    speaker = Vllm(text("he", "llo"))
    async with engine(speaker) as running, Served(running.url, tmp_path, "--durability", durability) as server:
        key = await server.create("r1")
        assert (await server.send("POST", CHAT, ASK, key))[0] == 200
        server.limit_files(100)
        for ask in (ASK, ASK_STREAM):
            try:
                status, body = await server.send("POST", CHAT, ask, key)
            except aiohttp.ClientPayloadError:
                assert ask is ASK_STREAM
                continue
            assert (status, json.loads(body)["error"]["code"]) == (500, "not_recorded")
            assert "hello" not in body.decode()
        status, body = await server.send("POST", "/rollouts", {"rollout_id": "r2"})
        assert status >= 500, body
        assert json.loads(body)["error"]["message"]
        server.limit_files(resource.RLIM_INFINITY)
        assert (await server.send("POST", CHAT, ASK_STREAM, key))[0] == 200
        assert (await server.send("POST", "/rollouts/r1/finish", {"reward": 1.0}))[0] == 200
        status, body = await server.send("GET", "/rollouts/r1/samples?wait_s=30")
        assert status == 200, body
    record = told(server.data_dir, "r1")
    assert [call.outcome for call in record.calls if call.outcome is not Outcome.CRASHED] == [Outcome.COMPLETE] * 2
    assert record.trained == [[5, 6, 2]] * 2
    assert record.rollout.reward == 1.0


@pytest.mark.case(81)
async def test_a_stream_on_a_full_disk_never_shows_its_end(tmp_path):
    speaker = Vllm(text("he", "llo"))
    async with engine(speaker) as running, Served(running.url, tmp_path) as server:
        key = await server.create("r1")
        server.limit_files(100)
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            finishes = []
            with pytest.raises(openai.APIError, match="could not be recorded"):
                async for part in await client.chat.completions.create(**ASK, stream=True):
                    finishes += [choice.finish_reason for choice in part.choices if choice.finish_reason]
        assert finishes == []
        server.limit_files(resource.RLIM_INFINITY)
    assert told(server.data_dir, "r1").accounting.trained == 0


@pytest.mark.case(81)
@pytest.mark.parametrize("what", ["a-file", "below-a-file", "a-file-as-journal"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path, what):
    (tmp_path / "taken").write_text("not a folder")
    data = {"a-file": tmp_path / "taken", "below-a-file": tmp_path / "taken" / "data"}.get(what, tmp_path / "data")
    if what == "a-file-as-journal":
        data.mkdir()
        (data / "journal").write_text("not a folder")
    command = [*ORCHARD, "serve", "--data", str(data), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert str(data) in ended.stderr


@pytest.mark.case(81)
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "data").mkdir(mode=0o500)
    command = [*ORCHARD, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr


# 82


async def unread(port: int, key: str, ask: dict):
    """Ask, and read nothing of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
    body = dumps(ask)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


def chained(turns: list[dict]) -> list[int]:
    """A prompt that begins with all that was sampled before."""
    prompt = [1, 3]
    for turn in turns[1:]:
        prompt += [5] if turn["role"] == "assistant" else [9]
    return prompt


NEXT = [*ASK["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "on"}]


def large_then_small(heard):
    if heard.path == "/v1/models":
        return whole({"object": "list", "data": [{"id": "m"}]})
    first = len(heard.json["messages"]) == 1 and b"Name any animal" not in heard.body
    large = text("x" * 16_000_000, end=None)  # Of a stream the last event, which is held until the call is committed.
    return Vllm(large if first else text("ok", first=7), prompt=chained).say(heard)


@pytest.mark.case(82)
@pytest.mark.parametrize(
    ("then", "ask"),
    [("nothing", ASK_STREAM), ("extended", ASK), ("finished", ASK), ("another-path", ASK)],
    ids=["nothing", "extended", "finished", "another-path"],
)
async def test_an_answer_whose_delivery_nobody_saw_is_not_trained_until_there_is_evidence(tmp_path, then, ask):
    """Killed between commit and delivery: END is on the disk, the client has part of it at most."""
    async with ScriptedEngine(large_then_small) as running:
        async with Served(running.url, tmp_path) as server:
            key = await server.create("r1")
            _, writer = await unread(server.port, key, ask)
            async with asyncio.timeout(20):
                while (await shown(server))["calls"] == []:  # noqa: ASYNC110 -- HTTP has no event
                    await asyncio.sleep(0.05)
            server.kill()
            writer.close()
        record = told(server.data_dir, "r1")
        assert (record.call.outcome, record.call.delivery) == (Outcome.COMPLETE, Delivery.UNCERTAIN)
        assert record.accounting.masked == {"uncertain": 1}
        assert record.trained == [[]]
        turns = {"extended": NEXT, "another-path": [{"role": "user", "content": ""}, *NEXT]}
        async with Served(running.url, tmp_path) as server:
            assert await server.create("r1") == key
            if then in turns:
                assert (await server.send("POST", CHAT, {**ASK, "messages": turns[then]}, key))[0] == 200
            elif then == "finished":
                assert (await server.send("POST", "/rollouts/r1/finish", {"reward": 1.0}))[0] == 200
    record = told(server.data_dir, "r1")
    certain = then in ("extended", "finished")
    assert record.calls[0].delivery is (Delivery.CONFIRMED if certain else Delivery.UNCERTAIN)
    assert record.accounting.masked == ({} if certain else {"uncertain": 1})
    trained = {"nothing": [[]], "extended": [[5, 7, 2]], "finished": [[5]], "another-path": [[], [7, 2]]}
    assert record.trained == trained[then]


async def shown(server) -> dict:
    _, body = await server.send("GET", "/rollouts/r1?wait_s=5")
    return json.loads(body)


@pytest.mark.case(82)
@pytest.mark.parametrize("confirmed_by", ["nobody", "extension", "finish"])
async def test_a_client_that_leaves_between_commit_and_delivery(tmp_path, confirmed_by):
    """The same doubt without a crash: the answer is committed, the client is gone before it has it."""
    async with path_to(large_then_small, tmp_path) as (_, proxy):
        _, writer = await unread(int(proxy.url.rsplit(":", 1)[1]), "a-label", ASK)
        await proxy.ended()
        writer.transport.abort()
        await asyncio.sleep(0.1)
        if confirmed_by == "extension":
            async with proxy.post(dumps({**ASK, "messages": NEXT})) as answer:
                assert answer.status == 200
        elif confirmed_by == "finish":
            await finish(proxy)
    record = told(tmp_path)
    assert record.calls[0].outcome is Outcome.COMPLETE
    certain = confirmed_by != "nobody"
    assert record.calls[0].delivery is (Delivery.CONFIRMED if certain else Delivery.UNCERTAIN)
    assert record.accounting.masked == ({} if certain else {"uncertain": 1})


@pytest.mark.case(82)
async def test_a_kill_before_the_commit_is_a_crash_and_no_sample(tmp_path):
    speaker = Vllm(text("he", "llo"))

    def say(heard):
        if heard.path == "/v1/models":
            return whole({"object": "list", "data": [{"id": "m"}]})
        said = speaker.say(heard)
        if b"slow" in heard.body:
            said.pieces, said.hang = [b"".join(said.pieces)[:900]], True
        return said

    async with ScriptedEngine(say) as running:
        async with Served(running.url, tmp_path) as server:
            key = await server.create("r1")
            reader, writer = await unread(server.port, key, {**ASK_STREAM, "user": "slow"})
            await reader.readuntil(b"data: ")
            await asyncio.sleep(0.15)
            server.kill()
            writer.close()
        async with Served(running.url, tmp_path) as server:
            assert (await server.send("POST", "/rollouts/r1/finish", {"reward": 1.0}))[0] == 200
    record = told(server.data_dir, "r1")
    assert (record.call.outcome, record.call.delivery) == (Outcome.CRASHED, Delivery.NONE)
    assert record.samples == []
    assert record.accounting.masked.get("crashed", 0) == record.accounting.sampled


# 86


NO_ANSWERS = {
    "html": whole("<html><body>busy</body></html>", content_type="text/html"),
    "html-as-json": whole("<html><body>busy</body></html>"),
    "empty": whole(""),
    "spaces": whole(" \n"),
    "text": whole("OK", content_type="text/plain"),
    "object": whole("{}"),
    "list": whole("[]"),
    "list-of-answers": whole('[{"choices":[]}]'),
    "string": whole('"hello"'),
    "number": whole("42"),
    "null": whole("null"),
    "no-choices": whole('{"id":"x","choices":[]}'),
    "null-choices": whole('{"id":"x","choices":null}'),
    "choices-of-other-kind": whole('{"id":"x","choices":{"0":{}}}'),
    "other-api": whole('{"model":"m","message":{"role":"assistant","content":"hi"},"done":true}'),
    "torn": whole('{"id":"x","choices":[{"index":0,"mess'),
    "two-bodies": whole('{"id":"x"}{"id":"y"}'),
    "binary": whole(b"\x1f\x8b\x08\x00\xff\xfe"),
    "not-utf8": whole(b'{"choices":"\xff'),
    "deep": whole("[" * 100_000),
    "empty-events": stream(b""),
    "html-as-events": stream(b"<html><body>busy</body></html>"),
    "garbage-events": stream(b"data: <html>busy</html>\n\n"),
    "json-as-events": stream(b'{"detail":"no"}'),
    "done-alone": stream(DONE),
}


@pytest.mark.case(86)
@pytest.mark.parametrize("said", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
async def test_a_200_that_is_no_answer_is_a_502_and_no_sample(tmp_path, said):
    def say(heard):
        return said if heard.path == CHAT else Said([b"{}"], status=404)

    for engine_name, ask in itertools.product(SPEAKERS, (ASK, ASK_STREAM)):
        status, body = await ask_once(say, tmp_path / engine_name, ask, engine=engine_name)
        assert status == 502, body
        assert json.loads(body)["error"]["code"] in ("bad_upstream_answer", "upstream_cut")
        assert len(json.loads(body)["error"]["message"]) > 20
    for engine_name in SPEAKERS:
        record = told(tmp_path / engine_name)
        assert {call.outcome for call in record.calls} <= {Outcome.ENGINE_ERROR, Outcome.UPSTREAM_CUT}
        assert [call.failure is not None for call in record.calls] == [True, True]
        assert record.samples == []
        assert record.accounting.sampled == record.accounting.trained == 0


@pytest.mark.case(86)
@BOTH_WAYS
async def test_the_sdk_raises_on_a_200_that_is_no_answer(tmp_path, ask):
    async with path_to(lambda _: NO_ANSWERS["html"], tmp_path) as (_, proxy), sdk(proxy) as client:
        with pytest.raises(openai.InternalServerError, match="not a chat completion"):
            await client.chat.completions.create(**ask)


@pytest.mark.case(86)
@pytest.mark.parametrize("body", [b": ping\n\n: ping\n\n", b"data: \n\ndata:\n\n"], ids=["comments", "empty-data"])
async def test_a_stream_of_keep_alives_alone_ends_in_an_error(tmp_path, body):
    """They had to pass at once, so the status line is gone."""
    async with path_to(lambda _: stream(body), tmp_path) as (_, proxy), sdk(proxy) as client:
        with pytest.raises((openai.APIError, json.JSONDecodeError)):
            [c async for c in await client.chat.completions.create(**ASK, stream=True)]
    record = told(tmp_path)
    assert record.call.outcome is Outcome.UPSTREAM_CUT
    assert record.samples == []


@pytest.mark.case(86)
@pytest.mark.parametrize(
    "garbage",
    [b"data: <html>", b"data: 42", b"data: []", b'data: {"id":"x","choi', b"data: null"],
    ids=["html", "number", "list", "torn", "null"],
)
async def test_garbage_in_the_middle_of_a_stream_is_no_sample(tmp_path, garbage):
    asked = direct(Vllm(text("he", "llo")), {**ASK_STREAM, "return_token_ids": True, "logprobs": True})
    blocks = asked.split(b"\n\n")
    body = b"\n\n".join([*blocks[:2], garbage, *blocks[2:]])
    await ask_once(lambda _: stream(body), tmp_path, ASK_STREAM)
    record = told(tmp_path)
    assert record.call.outcome is Outcome.ENGINE_ERROR
    assert record.call.failure.code == "garbage_in_stream"
    assert record.samples == []
    assert record.accounting.trained == 0


# 89


MALFORMED = {
    "truncated": '{"a": ',
    "truncated-string": '{"a": "b',
    "open-brace": "{",
    "trailing-comma": '{"a": 1,}',
    "nan": '{"a": NaN}',
    "infinity": '{"a": -Infinity}',
    "single-quotes": "{'a': 1}",
    "newline-in-string": '{"a": "b\nc"}',
    "control-character": '{"a": "\x00\x1b"}',
    "whitespace": "  ",
    "newline": "\n",
    "words": "look at a",
    "two-objects": '{"a": 1}{"b": 2}',
    "behind-it": '{"a": 1} done',
    "python": "{'a': True, 'b': None}",
    "fenced": '```json\n{"a": 1}\n```',
    "bad-escape": '{"a": "\\x41"}',
    "unquoted-key": "{a: 1}",
    "xml": "<a>1</a>",
    "emoji": "\U0001f98a\u2028",
    "quote": '"',
    "leading-zero": '{"a": 01}',
}
WELL_FORMED = {
    "empty": "",
    "object": '{"a": 1}',
    "empty-object": "{}",
    "spaced": ' {"a" : 1.50 } ',
    "float": '{"a": 0.000071, "b": 1e-7}',
    "nested": '{"a": "{\\"b\\": "}',
    "list": "[1, 2]",
    "null": "null",
    "string": '"text"',
    "escapes": '{"a": "\\u2028\\n\\u0000"}',
}


def strict(speaker, *, empty_ok: bool = True):
    """An engine that answers 400 to a history whose tool arguments are not JSON, as vLLM does; once and forever."""

    def bad(arguments) -> bool:
        if not isinstance(arguments, str) or (arguments == "" and empty_ok):
            return False
        try:
            json.loads(arguments, parse_constant=int)
        except ValueError:
            return True
        return False

    def say(heard):
        asked = heard.json
        for turn in asked.get("messages", []):
            functions = [call["function"] for call in turn.get("tool_calls") or ()]
            functions += [turn["function_call"]] if turn.get("function_call") else []
            if any(bad(function.get("arguments")) for function in functions):
                return whole('{"error":{"message":"Expecting value: line 1 column 7","code":400}}', status=400)
        return speaker.say(heard)

    return say


def history(*arguments, legacy: bool = False) -> list[dict]:
    turns = [{"role": "user", "content": "go"}]
    if legacy:
        turns += [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": a}} for a in arguments
        ]
        return [*turns, {"role": "function", "name": "f", "content": "no"}]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": a}} for i, a in enumerate(arguments)
    ]
    turns.append({"role": "assistant", "content": "hm \u2028", "tool_calls": calls})
    return [*turns, *[{"role": "tool", "tool_call_id": call["id"], "content": "bad call"} for call in calls]]


def arguments_in(turns: list[dict]) -> list:
    functions = [call["function"] for turn in turns for call in turn.get("tool_calls") or ()]
    functions += [turn["function_call"] for turn in turns if turn.get("function_call")]
    return [function["arguments"] for function in functions]


@pytest.mark.case(89)
@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_arguments_in_the_history_are_repaired_upstream_and_kept_raw(tmp_path, malformed):
    asked = [history(malformed, '{"b": 2.50}', legacy=legacy) for legacy in (False, True)]
    async with path_to(strict(Vllm(text("he", "llo"))), tmp_path) as (running, proxy):
        for turns, ask in zip(asked, (ASK, ASK_STREAM), strict=True):
            async with proxy.post(dumps({**ask, "messages": turns})) as answer:
                assert answer.status == 200
                await answer.read()
    for heard in running.heard:
        repaired, other = arguments_in(heard.json["messages"])
        assert json.loads(repaired) == {"_malformed": malformed}
        assert other == '{"b": 2.50}'
    record = told(tmp_path)
    assert [json.loads(bytes(call.messages)) for call in record.calls] == asked
    for call in record.calls:
        assert call.outcome is Outcome.COMPLETE
        assert any(edit.startswith("tool_arguments_repaired") for edit in call.edits)
    assert record.trained == [[5, 6, 2]] * 2


@pytest.mark.case(89)
@ENGINES
async def test_every_engine_gets_repaired_arguments_and_good_ones_byte_for_byte(tmp_path, engine_name):
    """Beside the generation too: llama.cpp renders the prompt from the same messages."""
    speaker = SPEAKERS[engine_name](text("he", "llo"))
    async with path_to(strict(speaker), tmp_path, engine=engine_name) as (running, proxy):
        for legacy, arguments in itertools.product((False, True), (*MALFORMED.values(), *WELL_FORMED.values())):
            raw = json.dumps(history(arguments, legacy=legacy), ensure_ascii=False).encode()
            async with proxy.post(b'{"model": "m", "messages": ' + raw + b"}") as answer:
                assert answer.status == 200
            heard = [heard for heard in running.heard if "messages" in heard.json]
            assert len(heard) == (2 if engine_name == "llamacpp" else 1)
            for one in heard:
                (sent,) = arguments_in(one.json["messages"])
                if arguments in WELL_FORMED.values():
                    assert raw in one.body
                else:
                    assert json.loads(sent) == {"_malformed": arguments}
            running.heard.clear()
    record = told(tmp_path)
    assert {call.outcome for call in record.calls} == {Outcome.COMPLETE}
    repaired = [any(edit.startswith("tool_arguments") for edit in call.edits) for call in record.calls]
    assert repaired == ([True] * len(MALFORMED) + [False] * len(WELL_FORMED)) * 2


@pytest.mark.case(89)
@pytest.mark.parametrize("arguments", [{"a": 1}, None, 5, ["a"]], ids=["object", "null", "number", "list"])
async def test_arguments_that_are_no_text_are_the_engines_affair(tmp_path, arguments):
    speaker = Vllm(text("he", "llo"))
    turns = history(arguments)
    async with path_to(strict(speaker), tmp_path) as (running, proxy):
        async with proxy.post(dumps({**ASK, "messages": turns})) as answer:
            assert answer.status == 200
    assert running.heard[0].json["messages"] == turns


@pytest.mark.case(89)
@pytest.mark.parametrize("mode", list(UpstreamStream), ids=str)
async def test_only_the_broken_one_of_many_changes(tmp_path, mode):
    """Many turns, odd spacing, floats that Python would spell otherwise."""
    good = '{"x": 0.000071}'
    turns = history(good, '{"a": ', good) + history(good)[1:] + history("{'b'}")[1:]
    raw = json.dumps(turns, indent=1, ensure_ascii=False).encode()
    ask = b'{ "temperature":0.70,"messages" :\t' + raw + b', "stream": true ,"model":"m"}'
    async with path_to(strict(Vllm(text("he", "llo"))), tmp_path, mode=mode) as (running, proxy):
        async with proxy.post(ask) as answer:
            assert answer.status == 200
            await answer.read()
    wanted = raw
    for broken in ('{"a": ', "{'b'}"):
        wrapped = json.dumps({"_malformed": broken}, separators=(",", ":"), ensure_ascii=False)
        wanted = wanted.replace(json.dumps(broken).encode(), json.dumps(wrapped).encode())
    assert wanted in running.heard[0].body
    assert b'"temperature":0.70' in running.heard[0].body
    assert bytes(told(tmp_path).call.messages) == raw


@pytest.mark.case(89)
async def test_a_rollout_with_a_broken_call_goes_on_to_its_end(tmp_path):
    """The model's own broken call comes back in every later request: no endless 400."""
    broken = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    says = {"first": text("x", finish="tool_calls", message={"tool_calls": [broken]})}

    def say(heard):
        speech = says["first"] if len(heard.json["messages"]) == 1 else text("ok", first=30)
        return strict(Vllm(speech, prompt=(1, 3, len(heard.json["messages"]))))(heard)

    turns = [{"role": "user", "content": "go"}]
    async with path_to(say, tmp_path) as (_, proxy), sdk(proxy) as client:
        for number in range(4):
            made = await client.chat.completions.create(model="m", messages=turns)
            turns.append(made.choices[0].message.model_dump(exclude_none=True))
            reply = (
                {"role": "tool", "tool_call_id": "c0", "content": "no"}
                if not number
                else {"role": "user", "content": "on"}
            )
            turns.append(reply)
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.COMPLETE] * 4
    repaired = [any(e.startswith("tool_arguments_repaired") for e in call.edits) for call in record.calls]
    assert repaired == [False, True, True, True]
    kept = json.loads(bytes(record.calls[0].choices[0].message))["tool_calls"][0]
    assert kept["function"]["arguments"] == '{"a": '


# 91


OVERFLOWS = {
    "vllm": b'{"error":{"message":"This model\'s maximum context length is 2048 tokens. However, you requested 9010'
    b' output tokens","type":"BadRequestError","param":"input_tokens","code":400}}',
    "vllm-prompt": b'{"error":{"message":"The decoder prompt (length 9010) is longer than the maximum model length of'
    b' 2048.","type":"BadRequestError","param":null,"code":400}}',
    "llamacpp": b'{"error":{"code":400,"message":"request (9010 tokens) exceeds the available context size (2048'
    b' tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":9010,"n_ctx":2048}}',
    "openai": b'{"error":{"message":"Your input exceeds the limit","type":"invalid_request_error",'
    b'"param":"messages","code":"context_length_exceeded"}}',
    "anthropic": b'{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 9010"}}',
    "sglang": b'{"object":"error","message":"The input (9010 tokens) is longer than the model\'s context length (2048'
    b' tokens).","type":"BadRequestError","code":400}',
    "sglang-requested": b'{"object":"error","message":"Requested token count exceeds the model\'s maximum context'
    b' length of 2048 tokens.","type":"BadRequestError","code":400}',
    "tgi": b'{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 9010",'
    b'"error_type":"validation"}',
}


@pytest.mark.case(91)
@pytest.mark.parametrize("error", OVERFLOWS.values(), ids=OVERFLOWS.keys())
@ENGINES
async def test_a_context_overflow_passes_as_it_is_and_is_flagged(tmp_path, error, engine_name):
    """The client's own words from the engine, once; the call says why."""

    def say(heard):
        return whole(error, status=400) if heard.path == CHAT else Said([b"{}"], status=404)

    for number, ask in enumerate((ASK, ASK_STREAM)):
        folder = tmp_path / str(number)
        async with path_to(say, folder, engine=engine_name) as (running, proxy):
            async with proxy.post(dumps(ask)) as answer:
                assert (answer.status, await answer.read()) == (400, error)
            assert len([heard for heard in running.heard if heard.path == CHAT]) == 1
        record = told(folder)
        assert record.call.outcome is Outcome.ENGINE_ERROR
        assert (record.call.failure.code, record.call.failure.retryable) == ("http_400", False)
        assert "context_overflow" in record.call.problems
        assert record.samples == []


@pytest.mark.case(91)
@BOTH_WAYS
async def test_the_sdk_sees_a_bad_request_and_does_not_retry(tmp_path, ask):
    async with path_to(lambda _: whole(OVERFLOWS["openai"], status=400), tmp_path) as (running, proxy):
        async with sdk(proxy, max_retries=2) as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(**ask)
        assert raised.value.code == "context_length_exceeded"
        assert len(running.heard) == 1
    assert "context_overflow" in told(tmp_path).call.problems


@pytest.mark.case(91)
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, b'{"error":{"message":"temperature must be positive"}}'),
        (400, b'{"error":{"message":"no such tool: context"}}'),
        (500, OVERFLOWS["vllm"]),
        (404, b'{"error":{"message":"no model"}}'),
    ],
    ids=["other-400", "the-word-alone", "a-500", "404"],
)
async def test_other_refusals_are_no_overflow(tmp_path, status, error):
    got, body = await ask_once(lambda _: whole(error, status=status), tmp_path, ASK)
    assert (got, body) == (status, error)
    assert "context_overflow" not in told(tmp_path).call.problems


@pytest.mark.case(91)
async def test_a_rollout_goes_on_after_an_overflow(tmp_path):
    """The harness compacts and asks again: its first path and its second are both there, the overflow is not."""
    speaker = Vllm(text("he", "llo"))

    def say(heard):
        return whole(OVERFLOWS["vllm"], status=400) if b"too much" in heard.body else speaker.say(heard)

    async with path_to(say, tmp_path) as (_, proxy):
        for said in ("a", "too much", "b"):
            async with proxy.post(dumps({**ASK, "messages": [{"role": "user", "content": said}]})) as answer:
                await answer.read()
    record = told(tmp_path)
    assert record.trained == [[5, 6, 2]] * 2
    assert [call.problems for call in record.calls] == [[], ["http_400", "context_overflow"], []]
    assert record.accounting.masked == {}
