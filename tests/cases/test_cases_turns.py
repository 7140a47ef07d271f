"""Cases 53, 54, 56, 59, 60, 68 and 70: which calls make which rows."""

import asyncio
import json

import aiohttp
import pytest
from case_kit import (
    ASK,
    ASK_STREAM,
    BOTH_WAYS,
    CHAT,
    ask_once,
    dumps,
    events,
    finish,
    ids,
    message,
    path_to,
    sdk,
    told,
)
from fakes.engine import Said, stream, whole
from fakes.speech import SPEAKERS, Speech, Token, Vllm, text

from orchard_proxy.schema.enums import BranchReason, MaskedReason, Outcome
from orchard_proxy.schema.packed import count
from orchard_proxy.wire import chat

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
BEGIN, END = 1, 2


def encode(said: str) -> list[int]:
    return [byte + 10 for byte in said.encode()]


def rendered(turn: dict) -> str:
    """A chat template's view of a message: text and calls; null, absent and empty content are one."""
    parts = turn.get("content") or ""
    said = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    calls = [f"<call>{c['function']['name']} {c['function']['arguments']}</call>" for c in turn.get("tool_calls") or ()]
    return said + "".join(calls)


def template(turns: list[dict], tools=None) -> list[int]:
    prompt = encode(json.dumps(tools)) if tools else []
    for turn in turns:
        prompt += [BEGIN, ROLES.get(turn["role"], 9), *encode(rendered(turn)), END]
    return [*prompt, BEGIN, ROLES["assistant"]]


def spoken(turn: dict, finish_reason: str = "stop") -> Speech:
    """Return the tokens that the template gives for this answer, so that the next prompt begins with them."""
    said = turn.get("content") or ""
    tokens = [Token(one, {"content": char}, text=char) for one, char in zip(encode(said), said, strict=True)]
    for index, call in enumerate(turn.get("tool_calls") or ()):
        hidden = [Token(one, {}, text="x") for one in encode(rendered({"tool_calls": [call]}))]
        hidden[-1] = hidden[-1]._replace(delta={"tool_calls": [{"index": index, **call}]})
        tokens += hidden
    called = {"tool_calls": turn["tool_calls"]} if turn.get("tool_calls") else {}
    return Speech([*tokens, Token(END, {}, text="")], finish=finish_reason, message=called)


def talking(engine_name: str, reply):
    """An engine with a chat template, whose `reply(turns)` gives the assistant's next turn."""
    known = {}

    def say(heard):
        asked = heard.json
        if heard.path == "/tokenize":
            return known["last"].say(heard)
        turn = reply(asked["messages"])
        known["last"] = SPEAKERS[engine_name](
            *[spoken(turn, "tool_calls" if turn.get("tool_calls") else "stop")] * (asked.get("n") or 1),
            prompt=lambda turns: template(turns, asked.get("tools")),
        )
        return known["last"].say(heard)

    return say


async def post(proxy, ask: dict, **more) -> dict:
    """Ask; return the assistant's message as a harness would keep it."""
    async with proxy.post(dumps(ask), **more) as answer:
        assert answer.status == 200
        body = await answer.read()
    if not ask.get("stream"):
        return json.loads(body)["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in events(body) if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    said = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})


# 53 and 54


@pytest.mark.case(53)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
async def test_the_same_prompt_with_the_same_answer_is_as_many_samples(tmp_path, times, engine_name):
    async with path_to(talking(engine_name, lambda _: {"content": "42"}), tmp_path, engine=engine_name) as (_, proxy):
        for number in range(times):
            await post(proxy, [ASK, ASK_STREAM][number % 2])
    record = told(tmp_path)
    assert record.trained == [[*encode("42"), END]] * times
    assert [sample.branch_reason for sample in record.samples] == [
        BranchReason.MAIN,
        *[BranchReason.ROOT] * (times - 1),
    ]
    assert len({sample.sample_id for sample in record.samples}) == times


@pytest.mark.case(53)
async def test_the_same_prompt_at_the_same_time_is_as_many_samples(tmp_path):
    async with path_to(talking("vllm", lambda _: {"content": "42"}), tmp_path) as (engine, proxy):
        await asyncio.gather(*[post(proxy, ASK) for _ in range(4)])
        assert len(engine.heard) == 4
    assert told(tmp_path).trained == [[*encode("42"), END]] * 4


@pytest.mark.case(53)
async def test_what_extends_one_of_two_equal_answers_extends_the_first(tmp_path):
    """Its tokens cannot tell which; each sampled token is still trained once."""
    async with path_to(talking("vllm", lambda turns: {"content": f"a{len(turns)}"}), tmp_path) as (_, proxy):
        first = [{"role": "user", "content": "q"}]
        said = await post(proxy, {**ASK, "messages": first})
        assert await post(proxy, {**ASK, "messages": first}) == said
        await post(proxy, {**ASK, "messages": [*first, said, {"role": "user", "content": "r"}]})
    record = told(tmp_path)
    assert record.calls[2].parent_call_id == record.calls[0].call_id
    assert record.accounting.sampled == record.accounting.trained == 9
    assert len(record.samples) == 2
    assert sorted(map(len, record.trained)) == [3, 6]


@pytest.mark.case(54)
@pytest.mark.parametrize("n", [2, 3])
@BOTH_WAYS
async def test_two_calls_of_n_choices_are_twice_n_samples(tmp_path, n, ask):
    speaker = Vllm(*[text(f"a{i}", first=20 + 10 * i) for i in range(n)])
    async with path_to(speaker, tmp_path) as (_, proxy):
        for _ in range(2):
            await post(proxy, {**ask, "n": n})
    record = told(tmp_path)
    assert record.trained == [[20 + 10 * i, 2] for i in range(n)] * 2
    reasons = [BranchReason.CHOICE] * (n - 1)
    assert [s.branch_reason for s in record.samples] == [BranchReason.MAIN, *reasons, BranchReason.ROOT, *reasons]


@pytest.mark.case(54)
async def test_two_equal_choices_are_two_samples(tmp_path):
    async with path_to(talking("vllm", lambda _: {"content": "42"}), tmp_path) as (_, proxy):
        for _ in range(2):
            await post(proxy, {**ASK, "n": 2})
    record = told(tmp_path)
    assert record.trained == [[*encode("42"), END]] * 4


@pytest.mark.case(54)
async def test_four_choices_of_which_one_is_continued(tmp_path):
    """The continued one grows, the other three stay rows."""

    def say(heard):
        turns = heard.json["messages"]
        if len(turns) == 1:
            return Vllm(spoken({"content": "ab"}), spoken({"content": "cd"}), prompt=template).say(heard)
        return Vllm(spoken({"content": "ef"}), prompt=template).say(heard)

    async with path_to(say, tmp_path) as (_, proxy):
        for _ in range(2):
            await post(proxy, {**ASK, "n": 2})
        turns = [*ASK["messages"], {"role": "assistant", "content": "cd"}, {"role": "user", "content": "?"}]
        await post(proxy, {**ASK, "messages": turns})
    record = told(tmp_path)
    assert len(record.samples) == 4
    assert record.accounting.trained == record.accounting.sampled == 15
    assert sorted(map(len, record.trained)) == [3, 3, 3, 6]


# 56


@pytest.mark.case(56)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
async def test_two_hundred_turns_are_one_row(tmp_path, engine_name):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    say = talking(engine_name, lambda seen: {"content": f"step {len(seen)}"})
    async with path_to(say, tmp_path, engine=engine_name) as (_, proxy):
        for number in range(200):
            turns.append(await post(proxy, {**ASK, "messages": turns, "stream": number % 2 == 0}))
            turns.append({"role": "user", "content": f"ok {number}"})
    record = told(tmp_path)
    assert len(record.samples) == 1
    (sample,) = record.samples
    assert [turn.trained for turn in sample.turns] == [True] * 200
    assert record.trained == [[one for turn in turns if turn["role"] == "assistant" for one in spoken(turn).ids]]
    assert record.accounting.sampled == record.accounting.trained
    stored = sum(count(call.prompt.new_ids) + count(call.choices[0].token_ids) for call in record.calls)
    assert stored == count(sample.token_ids)
    assert json.loads(bytes(sample.messages)) == [*turns[:-2], message(record.calls[-1].choices[0])]


@pytest.mark.case(56)
async def test_a_chain_of_tool_turns_is_one_row(tmp_path):
    def reply(seen):
        call = {"id": f"c{len(seen)}", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    turns = [{"role": "user", "content": "go"}]
    async with path_to(talking("vllm", reply), tmp_path) as (_, proxy), sdk(proxy) as client:
        for number in range(20):
            made = await client.chat.completions.create(model="m", messages=turns, tools=TOOLS)
            turns.append(made.choices[0].message.model_dump(exclude_unset=True))
            called = made.choices[0].message.tool_calls[0].id
            turns.append({"role": "tool", "tool_call_id": called, "content": f"seen {number}"})
    record = told(tmp_path)
    assert len(record.samples) == 1
    assert len(record.samples[0].turns) == 20
    assert record.accounting.sampled == record.accounting.trained


# 59


CALL = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
ECHOES = {
    "as-it-came": {},
    "null": {"content": None},
    "empty": {"content": ""},
    "absent": {"content": "absent"},
    "empty-list": {"content": []},
    "empty-part": {"content": [{"type": "text", "text": ""}]},
    "with-refusal": {"content": None, "refusal": None, "audio": None, "annotations": []},
}


@pytest.mark.case(59)
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
@BOTH_WAYS
async def test_empty_content_beside_a_tool_call_is_the_same_turn_however_it_is_echoed(tmp_path, echo, engine_name, ask):
    def reply(seen):
        return {"content": None, "tool_calls": [CALL]} if len(seen) == 1 else {"content": "done"}

    async with path_to(talking(engine_name, reply), tmp_path, engine=engine_name) as (_, proxy):
        first = [{"role": "user", "content": "go"}]
        said = await post(proxy, {**ask, "messages": first, "tools": TOOLS})
        echoed = {**said, **echo}
        if echoed["content"] == "absent":
            del echoed["content"]
        tool = {"role": "tool", "tool_call_id": "c0", "content": "1"}
        await post(proxy, {**ask, "messages": [*first, echoed, tool], "tools": TOOLS})
    record = told(tmp_path)
    assert len(record.samples) == 1
    assert record.accounting.sampled == record.accounting.trained
    kept = message(record.calls[0].choices[0])
    assert kept["content"] is None
    assert chat.identity(kept) == chat.identity({"role": "assistant", **echoed})


@pytest.mark.case(59)
@pytest.mark.parametrize("content", [None, "", "absent"], ids=["null", "empty", "absent"])
@BOTH_WAYS
async def test_every_spelling_of_no_content_is_recorded_alike(tmp_path, content, ask):
    said = {"tool_calls": [CALL]} if content == "absent" else {"content": content, "tool_calls": [CALL]}
    delta = {"tool_calls": [{"index": 0, **CALL}]} | ({} if content == "absent" else {"content": content})
    speaker = Vllm(Speech([Token(5, delta), Token(2, {})], finish="tool_calls", message=said))
    await ask_once(speaker, tmp_path, ask)
    kept = message(told(tmp_path).choice)
    assert kept == {"role": "assistant", "content": None, "tool_calls": [CALL]}


# 60


ODD = {
    "nulls": [{"role": "user", "content": "go", "refusal": None, "annotations": [], "audio": None, "name": "ann"}],
    "unknown-role": [{"role": "critic", "content": "hm"}, {"role": "user", "content": "go"}],
    "developer": [{"role": "developer", "content": "rules"}, {"role": "user", "content": "go"}],
    "unknown-fields": [{"role": "user", "content": "go", "x_trace": {"a": [1, None, 1e-7]}, "cache_control": {}}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "x", "text": "?", "y": 1.50}]}],
    "odd-values": [{"role": "user", "content": "go", "weight": 1e400, "big": 123456789012345678901234567890}],
    "assistant-with-all": [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "a1",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
        },
        {"role": "user", "content": "on"},
    ],
}


@pytest.mark.case(60)
@pytest.mark.parametrize("turns", ODD.values(), ids=ODD.keys())
async def test_unknown_roles_and_fields_are_kept_as_they_are(tmp_path, turns):
    raw = json.dumps(turns).replace("Infinity", "1e400").encode()
    body = b'{"model": "m", "messages": ' + raw + b"}"
    async with path_to(talking("vllm", lambda _: {"content": "a1"}), tmp_path) as (engine, proxy):
        async with proxy.post(body) as answer:
            assert answer.status == 200
    assert raw in engine.heard[0].body
    record = told(tmp_path)
    assert bytes(record.call.messages) == raw
    assert bytes(record.samples[0].messages).startswith(raw[:-1])
    assert record.trained == [[*encode("a1"), END]]


@pytest.mark.case(60)
@pytest.mark.parametrize(
    "more",
    [{"refusal": None}, {"annotations": []}, {"audio": None}, {"function_call": None}, {"reasoning": None}, {"x": 1}],
    ids=str,
)
async def test_an_echo_with_more_fields_is_the_same_turn(tmp_path, more):
    async with path_to(talking("vllm", lambda seen: {"content": f"a{len(seen)}"}), tmp_path) as (_, proxy):
        first = [{"role": "user", "content": "q"}]
        await post(proxy, {**ASK, "messages": first})
        echoed = {"role": "assistant", "content": "a1", **more}
        await post(proxy, {**ASK, "messages": [*first, echoed, {"role": "user", "content": "r"}]})
    record = told(tmp_path)
    assert len(record.samples) == 1
    assert chat.identity(echoed) == chat.identity(message(record.calls[0].choices[0]))
    assert record.accounting.sampled == record.accounting.trained


# 68


def cut_after(events_sent: int):
    """A stream that dies after some events."""

    def say(speaker_says, heard):
        said = speaker_says(heard)
        blocks = b"".join(said.pieces).split(b"\n\n")
        return Said([b"".join(b + b"\n\n" for b in blocks[:events_sent]), None], content_type="text/event-stream")

    return say


def plain(said: Said):
    return lambda _says, _heard: said


FAULTS = {
    "500": (plain(whole('{"error":{"message":"oops"}}', status=500)), ASK),
    "503": (plain(whole('{"error":{"message":"busy"}}', status=503)), ASK_STREAM),
    "429": (plain(whole('{"error":{"message":"slow down"}}', status=429)), ASK),
    "html": (plain(whole("<html>busy</html>")), ASK),
    "empty": (plain(whole("")), ASK_STREAM),
    "no-byte": (plain(Said([None], status=0, before_head_s=1.1)), ASK),
    "cut-before-tokens": (cut_after(1), ASK_STREAM),
    "cut-after-tokens": (cut_after(3), ASK_STREAM),
    "error-event": (plain(stream(b'data: {"error":{"message":"oops"}}\n\ndata: [DONE]\n\n')), ASK_STREAM),
}


@pytest.mark.case(68)
@pytest.mark.parametrize(("fault", "ask"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_retry_after_an_engine_error_continues_the_clean_path(tmp_path, fault, ask):
    """Three turns, the second fails first: one row, no token of the failure in it."""
    failing = {"left": 1}
    says = talking("vllm", lambda seen: {"content": f"a{len(seen)}"})

    def say(heard):
        if len(heard.json["messages"]) == 3 and failing["left"]:
            failing["left"] -= 1
            return fault(says, heard)
        return says(heard)

    turns = [{"role": "user", "content": "q"}]
    async with path_to(say, tmp_path) as (engine, proxy):
        for number in range(3):
            if number == 1:
                with_error = proxy.post(dumps({**ask, "messages": turns}))
                try:
                    async with with_error as answer:
                        body = await answer.read()
                    assert answer.status != 200 or b"error" in body
                except aiohttp.ClientPayloadError:
                    assert "cut" in str(fault)
            turns.append(await post(proxy, {**ask, "messages": turns}, headers={"x-stainless-retry-count": "1"}))
            turns.append({"role": "user", "content": "r"})
        assert len(engine.heard) == 4
    record = told(tmp_path)
    assert len(record.samples) == 1
    assert len(record.samples[0].turns) == 3
    assert all(turn.trained for turn in record.samples[0].turns)
    assert record.trained == [[one for turn in turns if turn["role"] == "assistant" for one in spoken(turn).ids]]
    failed = [call for call in record.calls if call.outcome in (Outcome.ENGINE_ERROR, Outcome.UPSTREAM_CUT)]
    assert len(failed) == 1
    masked = sum(count(choice.token_ids) for choice in failed[0].choices)
    assert sum(record.accounting.masked.values()) == masked


@pytest.mark.case(68)
@BOTH_WAYS
async def test_the_sdks_own_retries_leave_one_clean_sample(tmp_path, ask):
    failing = {"left": 2}
    says = talking("vllm", lambda _: {"content": "a"})

    def say(heard):
        failing["left"] -= 1
        if failing["left"] >= 0:
            return whole('{"error":{"message":"busy"}}', status=503, headers={"retry-after-ms": "10"})
        return says(heard)

    async with path_to(say, tmp_path) as (engine, proxy), sdk(proxy, max_retries=3) as client:
        made = await client.chat.completions.create(**ask)
        if ask is ASK_STREAM:
            assert [c async for c in made]
        assert len(engine.heard) == 3
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.ENGINE_ERROR] * 2 + [Outcome.COMPLETE]
    assert record.trained == [[*encode("a"), END]]


@pytest.mark.case(68)
async def test_a_whole_client_retry_after_its_own_loss_stays_masked(tmp_path):
    """The first answer was never taken; the second is the path."""
    says = talking("vllm", lambda _: {"content": "a"})

    def say(heard):
        said = says(heard)
        said.before_head_s = 30 if b'"user":"first"' in heard.body.replace(b" ", b"") else 0
        return said

    async with path_to(say, tmp_path) as (_, proxy):
        with pytest.raises(TimeoutError):
            async with proxy.post(dumps({**ASK, "user": "first"}), timeout=aiohttp.ClientTimeout(total=0.2)):
                pass
        await post(proxy, ASK)
        await proxy.ended(2)
    record = told(tmp_path)
    assert [call.outcome for call in record.calls] == [Outcome.CLIENT_GONE, Outcome.COMPLETE]
    assert record.trained == [[*encode("a"), END]]


# 70


@pytest.mark.case(70)
@pytest.mark.parametrize(
    "headers",
    [{}, {"x-stainless-retry-count": "1"}, {"Idempotency-Key": "same"}, {"X-Request-Id": "same"}],
    ids=["plain", "retry", "idempotency-key", "request-id"],
)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
@BOTH_WAYS
async def test_equal_calls_of_two_rollouts_are_never_one(tmp_path, headers, engine_name, ask):
    says = talking(engine_name, lambda _: {"content": "a"})

    def say(heard):
        said = says(heard)
        said.before_head_s = 0.1 if heard.path == CHAT else 0
        return said

    async with path_to(say, tmp_path, engine=engine_name) as (engine, proxy):
        keys = ["one", "two", "one", "three"]
        await asyncio.gather(*[post(proxy, ask, key=key, headers=headers) for key in keys])
        for key in set(keys):
            await finish(proxy, key)
    assert len([heard for heard in engine.heard if heard.path == CHAT]) == 4
    for key, times in (("one", 2), ("two", 1), ("three", 1)):
        record = told(tmp_path, key)
        assert record.trained == [[*encode("a"), END]] * times
        assert {sample.rollout_id for sample in record.samples} == {key}
        assert [call.seq for call in sorted(record.calls, key=lambda call: call.seq)] == [*range(times)]


@pytest.mark.case(70)
async def test_a_rollout_never_continues_anothers_tokens(tmp_path):
    """The second rollout's prompt begins with what the first one sampled; it still has no parent there."""
    async with path_to(talking("vllm", lambda seen: {"content": f"a{len(seen)}"}), tmp_path) as (_, proxy):
        first = [{"role": "user", "content": "q"}]
        said = await post(proxy, {**ASK, "messages": first}, key="one")
        await post(proxy, {**ASK, "messages": [*first, said, {"role": "user", "content": "r"}]}, key="two")
    record = told(tmp_path, "two")
    assert record.call.parent_call_id is None
    assert record.trained == [[*encode("a3"), END]]
    assert record.samples[0].turns[0].masked_reason is None
    assert MaskedReason.UNCERTAIN not in record.accounting.masked
    assert ids(told(tmp_path, "one").choice) == [*encode("a1"), END]
