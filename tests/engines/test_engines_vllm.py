import json

import pytest
from engine_answers import body, choice, chunk, entries, entry, exchange, ids, logprobs, sse
from fakes import twins
from msgspec.structs import replace

from orchard_proxy.engines.base import Exchange, Strip
from orchard_proxy.engines.vllm import Vllm
from orchard_proxy.schema.enums import IdsGrade, LogprobsGrade, UpstreamStream
from orchard_proxy.schema.packed import unpack_ids
from orchard_proxy.schema.records import Usage
from orchard_proxy.wire import chat

AUTO, ON, OFF = UpstreamStream.AUTO, UpstreamStream.ON, UpstreamStream.OFF
BASE = b'{"model":"smol","messages":[]%b}'
HIDDEN = Strip(prompt_ids=True, ids=True, logprobs=True, empty_chunks=True, reasoning=True)
ROLE = chunk(delta={"role": "assistant", "content": ""})


def prepare(members: bytes, mode=AUTO):
    return Vllm().prepare(chat.decode(BASE % members), mode)


def read(answer: bytes, **more):
    return Vllm().evidence(exchange(answer, **more))


# --- prepare


@pytest.mark.parametrize(
    ("members", "added", "strip"),
    [
        (
            b"",
            b',"return_token_ids":true,"logprobs":true,"top_logprobs":0',
            Strip(prompt_ids=True, ids=True, logprobs=True, empty_chunks=True),
        ),
        (b',"logprobs":true', b',"return_token_ids":true,"top_logprobs":0', Strip(prompt_ids=True, ids=True)),
        (b',"logprobs":true,"top_logprobs":5', b',"return_token_ids":true', Strip(prompt_ids=True, ids=True)),
        (b',"return_token_ids":true', b',"logprobs":true,"top_logprobs":0', Strip(logprobs=True)),
        (b',"return_token_ids":true,"logprobs":true,"top_logprobs":1', b"", Strip()),
    ],
    ids=["nothing asked", "logprobs asked", "top_logprobs asked", "ids asked", "all asked"],
)
def test_what_is_missing_is_asked_for_and_no_more(members, added, strip):
    prepared = prepare(members)
    assert prepared.body == BASE % (members + added)
    assert prepared.strip == strip


@pytest.mark.parametrize(
    "members",
    [
        b',"top_logprobs":null',
        b',"logprobs":null,"top_logprobs":null',
        b',"logprobs":true,"top_logprobs":null',
        b',"logprobs":false',
    ],
)
def test_an_explicit_null_still_gives_logprobs(members):
    sent = json.loads(prepare(members).body)
    assert (sent["logprobs"], sent["top_logprobs"], sent["return_token_ids"]) == (True, 0, True)


@pytest.mark.parametrize(
    ("members", "strip"),
    [
        (b',"logprobs":true,"top_logprobs":null', Strip(prompt_ids=True, ids=True, logprobs=True, empty_chunks=True)),
        (b',"logprobs":true,"include_reasoning":false', HIDDEN),
        (b',"logprobs":1,"include_reasoning":"no"', HIDDEN),
        (b',"return_token_ids":true,"include_reasoning":false', replace(HIDDEN, prompt_ids=False)),
    ],
    ids=["explicit null", "hidden reasoning, logprobs", "the same, spelt oddly", "hidden reasoning, ids"],
)
def test_what_the_engine_would_not_print_is_not_shown_though_asked_for(members, strip):
    assert prepare(members).strip == strip


@pytest.mark.parametrize(
    "members",
    [
        b',"top_logprobs":1',
        b',"top_logprobs":-1',
        b',"logprobs":false,"top_logprobs":2',
        b',"logprobs":null,"top_logprobs":2',
        b',"top_logprobs":"2"',
        b',"top_logprobs":0.5',
        b',"top_logprobs":[]',
        b',"logprobs":"abc"',
        b',"logprobs":5',
        b',"logprobs":{}',
        b',"return_token_ids":"maybe"',
        b',"stream":"perhaps"',
    ],
)
@pytest.mark.parametrize("mode", [AUTO, ON, OFF])
def test_a_request_that_must_fail_is_left_alone(members, mode):
    prepared = prepare(members, mode)
    assert (prepared.body, prepared.edits, prepared.strip) == (BASE % members, [], Strip())


@pytest.mark.parametrize("sent", [b"", b"not json", b"[]", b'{"a":', b"null", b"\xff"])
def test_what_is_not_a_request_is_left_alone(sent):
    assert Vllm().prepare(chat.decode(sent), AUTO).body == sent


# --- booleans as pydantic takes them


@pytest.mark.parametrize("word", [b"1", b"1.0", b'"true"', b'"On"', b'"YES"'])
@pytest.mark.parametrize("mode", [AUTO, ON, OFF])
def test_an_oddly_spelt_stream_is_the_engines_own(word, mode):
    members = b',"stream":%b' % word
    prepared = prepare(members, mode)
    assert prepared.body == BASE % (members + b',"return_token_ids":true,"logprobs":true,"top_logprobs":0')
    assert (prepared.stream, prepared.synthesise) == (True, False)


@pytest.mark.parametrize("word", [b"0", b'"false"', b'"off"', b"0.0"])
def test_an_oddly_spelt_answer_is_whole(word):
    prepared = prepare(b',"stream":%b' % word, OFF)
    assert (prepared.stream, prepared.synthesise) == (False, False)
    assert json.loads(prepared.body)["return_token_ids"] is True


@pytest.mark.parametrize("word", [b"1", b'"true"', b'"t"'])
def test_what_the_client_asks_for_oddly_it_gets_as_it_asked(word):
    prepared = prepare(b',"logprobs":%b,"return_token_ids":%b,"top_logprobs":0' % (word, word))
    assert (prepared.edits, prepared.strip) == ([], Strip())


@pytest.mark.parametrize("word", [b"0", b'"no"'])
def test_what_the_client_declines_oddly_is_hidden(word):
    prepared = prepare(b',"logprobs":%b,"return_token_ids":%b' % (word, word))
    assert prepared.strip == replace(HIDDEN, reasoning=False)
    assert (json.loads(prepared.body)["logprobs"], json.loads(prepared.body)["return_token_ids"]) == (True, True)


def test_a_stream_whose_usage_is_asked_for_oddly_is_the_engines_own():
    assert not prepare(b',"stream":true,"stream_options":{"include_usage":1}', OFF).synthesise


def test_include_usage_is_not_added_since_it_would_move_the_fingerprint():
    sent = json.loads(prepare(b',"stream":true').body)
    assert "stream_options" not in sent
    plain, asked = (next(t for t in twins.load("vllm") if t.name == name) for name in ("b_stream", "c_stream_usage"))
    last = plain.plain_body.split(b"\n\n")[-3]
    assert b'"finish_reason":"stop"' in last
    assert b"system_fingerprint" in last
    assert b"system_fingerprint" not in next(
        e for e in asked.plain_body.split(b"\n\n") if b'"finish_reason":"stop"' in e
    )


def test_whole_answers_upstream_when_streams_are_off():
    prepared = prepare(b',"stream":true,"stream_options":{"include_usage":true}', OFF)
    sent = json.loads(prepared.body)
    assert not {"stream", "stream_options"} & set(sent)
    assert (prepared.stream, prepared.synthesise) == (False, True)
    assert {e.name for e in prepared.edits} >= {"field:stream", "field:stream_options", "synthesised_stream"}


def test_a_request_without_stream_is_never_synthesised():
    prepared = prepare(b"", OFF)
    assert (prepared.stream, prepared.synthesise) == (False, False)


def test_every_change_is_listed():
    assert [(e.name, e.detail) for e in prepare(b',"logprobs":false').edits] == [
        ("field:return_token_ids", "true"),
        ("field:logprobs", "true"),
        ("field:top_logprobs", "0"),
    ]


def test_broken_tool_arguments_in_the_history_are_repaired_upstream():
    call = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\": "}}]}'
    prepared = Vllm().prepare(chat.decode(b'{"messages":[%b]}' % call), AUTO)
    arguments = json.loads(prepared.body)["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"_malformed": '{"a": '}
    assert "tool_arguments_repaired" in {e.name for e in prepared.edits}


# --- reasoning that the client wants hidden (vllm#28256)


def test_hidden_reasoning_is_kept_upstream_and_hidden_by_us():
    prepared = prepare(b',"include_reasoning":false')
    assert json.loads(prepared.body)["include_reasoning"] is True
    assert prepared.strip.reasoning
    assert "reasoning_kept" in {e.name for e in prepared.edits}


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_hidden_reasoning_does_not_reach_the_client(key):
    prepared = prepare(b',"include_reasoning":false,"stream":true')
    whole = json.dumps({"choices": [{"message": {"role": "assistant", "content": "4", key: "2+2"}}]}).encode()
    assert json.loads(Vllm().strip_body(whole, prepared))["choices"][0]["message"][key] is None

    def event(delta, finish=None):
        data = json.dumps(chunk([5], delta=delta, finish=finish)).encode()
        copy = Vllm().strip_event(data, prepared)
        return copy and json.loads(copy)["choices"][0]["delta"]

    assert event({key: "2+2"}) is None
    assert event({"content": None, key: "2+2"}) is None
    assert event({"content": "4", key: None}) == {"content": "4", key: None}
    assert event({"content": "4", key: "so"}) == {"content": "4", key: None}
    assert event({key: "2+2"}, "length") == {}
    assert event({}) is None
    assert event({}, "stop") == {}
    assert event({"role": "assistant", "content": ""}) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("delta", "shown"),
    [
        (b'{"content":"4"}', b'{"content":"4","reasoning":null}'),
        (b'{"content":null,"tool_calls":[]}', b'{"content":null,"reasoning":null,"tool_calls":[]}'),
        (b'{"tool_calls":[{"index":0}]}', b'{"reasoning":null,"tool_calls":[{"index":0}]}'),
        (b'{"content":"4","reasoning":null}', b'{"content":"4","reasoning":null}'),
        (b'{"role":"assistant","content":""}', b'{"role":"assistant","content":""}'),
        (b'"x"', b'"x"'),
        (b"null", b"null"),
    ],
)
def test_hidden_reasoning_is_null_where_the_engine_prints_null(delta, shown):
    """As captured: r_noreason_stream, r2_noreason_tools_stream."""
    event = b'{"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":null,"token_ids":null}]}'
    prepared = prepare(b',"include_reasoning":false,"stream":true')
    assert Vllm().strip_event(event % delta, prepared) == event % shown


def test_ids_under_hidden_reasoning_are_kept():
    found = read(
        sse(
            ROLE | {"prompt_token_ids": [1]},
            chunk([5], delta={"reasoning": "r"}),
            chunk([6, 2], delta={"content": "4"}, finish="stop"),
        )
    )
    assert ids(found.choices[0]) == [5, 6, 2]
    assert json.loads(bytes(found.choices[0].message))["reasoning_content"] == "r"


# --- strip


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[1]", b"{", b'"x"', b"\xff\xfe"])
def test_what_is_not_an_answer_is_not_touched(answer):
    prepared = prepare(b"")
    assert Vllm().strip_body(answer, prepared) == answer
    assert Vllm().strip_event(answer, prepared) == answer


def test_stripping_keeps_the_spelling_of_everything_else():
    form = b'{ "choices" : [ {"token_ids" : %b,"logprobs": %b, "x": 7.1E-05} ],\n "prompt_token_ids":%b, "z":NaN }'
    answer = form % (b"[5,6]", b'{"content":[]}', b"[1]")
    assert Vllm().strip_body(answer, prepare(b"")) == form % (b"null", b"null", b"null")


def test_text_that_looks_like_our_fields_is_text():
    said = json.dumps(
        {"choices": [{"delta": {"content": '"token_ids":[5],"logprobs":{} {} '}}]}, separators=(",", ":")
    ).encode()
    assert Vllm().strip_event(said, prepare(b"")) == said


@pytest.mark.parametrize(
    ("members", "kept"),
    [(b"", False), (b',"logprobs":true', True), (b',"return_token_ids":true', True), (b',"logprobs":false', False)],
)
def test_an_event_of_ids_alone_is_dropped_iff_the_engine_would_not_send_it(members, kept):
    data = json.dumps(chunk([5])).encode()
    assert (Vllm().strip_event(data, prepare(members)) is not None) is kept


@pytest.mark.parametrize(
    "data",
    [
        chunk([2], finish="stop"),
        {"choices": [], "usage": {"prompt_tokens": 1}},
        {"choices": [chunk([5])["choices"][0], chunk([6], delta={"content": "x"}, index=1)["choices"][0]]},
        {"error": {}},
    ],
    ids=["finish", "usage", "one of two speaks", "error"],
)
def test_an_event_that_says_something_is_kept(data):
    assert Vllm().strip_event(json.dumps(data).encode(), prepare(b"")) is not None


# --- evidence: captured answers


def instr(name):
    return next(t for t in twins.load("vllm") if t.name == name)


def evidence_of(twin):
    kind, answer = twin.instr_content_type, twin.instr_body
    said = Exchange(
        request=twin.plain_request, status=twin.instr_status, content_type=kind, answer=answer, logprobs_mode="raw"
    )
    return Vllm().evidence(said)


COMPLETE = [t for t in twins.load("vllm") if not t.is_noise and t.instr_status == 200 and not t.name.startswith("r")]


@pytest.mark.parametrize("twin", COMPLETE, ids=lambda t: t.name)
def test_captured_answers_prove_every_token(twin):
    found = evidence_of(twin)
    assert (found.problems, found.rejected) == ([], False)
    assert len(unpack_ids(found.prompt_ids)) in (21, 25, 24, 182)
    for one in found.choices:
        assert one.ids_grade == IdsGrade.ENGINE
        assert one.sampled_tokens == len(ids(one)) > 0
        if twin.name == "f6_tools_stream_ids_only":
            assert (one.logprobs, one.problems, one.logprobs_grade) == (b"", ["no_logprobs"], LogprobsGrade.NONE)
        else:
            assert (len(logprobs(one)), one.problems, one.logprobs_grade) == (len(ids(one)), [], LogprobsGrade.RAW)


def test_a_stream_and_a_whole_answer_prove_the_same():
    whole, streamed = evidence_of(instr("a_chat")), evidence_of(instr("b_stream"))
    assert (whole.prompt_ids, whole.choices) == (streamed.prompt_ids, streamed.choices)
    assert ids(whole.choices[0]) == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert logprobs(whole.choices[0])[0] == pytest.approx(-0.7401407361030579)
    assert whole.usage == Usage(prompt_tokens=21, completion_tokens=8)
    assert (whole.model, whole.system_fingerprint) == ("smol", "vllm-0.32.0-79c0dc5e")


def test_a_stop_string_cuts_the_text_and_not_the_ids():
    one = evidence_of(instr("h_stop")).choices[0]
    assert (len(ids(one)), one.finish_reason, one.stop_reason) == (4, "stop", '"France"')
    assert json.loads(bytes(one.message))["content"] == "The capital of "


@pytest.mark.parametrize("name", ["r_noreason_stream", "r2_noreason_tools_stream", "r3_noreason_tools"])
def test_an_engine_that_hides_its_ids_proves_nothing(name):
    one = evidence_of(instr(name)).choices[0]
    assert (one.ids_grade, one.token_ids, one.problems) == (IdsGrade.NONE, b"", ["no_ids"])


@pytest.mark.parametrize(
    ("name", "problems"), [("j5_toolong", ["http_400", "context_overflow"]), ("j2_badmodel_stream", ["http_404"])]
)
def test_a_refusal_is_no_evidence(name, problems):
    found = evidence_of(instr(name))
    assert (found.choices, found.problems, found.rejected) == ([], problems, False)


# --- evidence: streams


def test_prompt_ids_may_come_in_any_event():
    late = read(sse(ROLE, chunk([5], delta={"content": "a"}, prompt_token_ids=[1, 2]), chunk([2], finish="stop")))
    assert unpack_ids(late.prompt_ids) == [1, 2]
    never = read(sse(ROLE, chunk([5, 2], delta={"content": "a"}, finish="stop")))
    assert never.prompt_ids is None
    assert (never.problems, never.rejected) == (["no_prompt_ids"], False)
    assert never.choices[0].ids_grade == IdsGrade.NONE


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"], ids=ascii)
def test_unicode_line_separators_are_text(separator):
    text = f"a{separator}b"
    raw = json.dumps(chunk([5, 6, 7], delta={"content": text}, finish="stop", prompt_token_ids=[1]), ensure_ascii=False)
    found = read(sse(raw.encode() if ord(separator) > 0x1F else json.dumps(json.loads(raw)).encode()))
    assert (ids(found.choices[0]), len(logprobs(found.choices[0]))) == ([5, 6, 7], 3)
    assert json.loads(bytes(found.choices[0].message))["content"] == text


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_line_ends_and_comments_do_not_matter(end):
    plain = sse(ROLE | {"prompt_token_ids": [1]}, chunk([5], delta={"content": "a"}), chunk([2], finish="stop"))
    odd = b": ping\n\n" + plain.replace(b"data: ", b"event: message\ndata:")
    found = read(odd.replace(b"\n", end), content_type="text/event-stream")
    assert found == read(plain)
    assert ids(found.choices[0]) == [5, 2]


def test_events_without_text_carry_ids():
    found = read(
        sse(
            ROLE | {"prompt_token_ids": [1]},
            chunk([5]),
            chunk([6, 7]),
            chunk([8], delta={"content": "x"}),
            chunk([2], finish="tool_calls"),
        )
    )
    assert ids(found.choices[0]) == [5, 6, 7, 8, 2]
    assert found.choices[0].problems == []


def test_interleaved_choices_are_kept_apart():
    found = read(
        sse(
            chunk(delta={"role": "assistant"}, index=1, prompt_token_ids=[1, 2]),
            chunk(delta={"role": "assistant"}, index=0, prompt_token_ids=[1, 2]),
            chunk([10], index=1, delta={"content": "b"}),
            chunk([5], index=0, delta={"content": "a"}),
            chunk([2], index=0, finish="stop"),
            chunk([11, 12], index=1, delta={"content": "c"}, finish="length"),
            {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}},
        )
    )
    assert [(c.index, ids(c), c.finish_reason) for c in found.choices] == [
        (0, [5, 2], "stop"),
        (1, [10, 11, 12], "length"),
    ]
    assert (found.problems, found.rejected) == ([], False)


@pytest.mark.parametrize("error", [{"error": {"message": "boom"}}, {"object": "error", "message": "boom"}])
def test_an_error_inside_a_stream_is_named(error):
    found = read(sse(ROLE | {"prompt_token_ids": [1]}, chunk([5], delta={"content": "a"}), error))
    assert "error_in_stream" in found.problems
    assert ids(found.choices[0]) == [5]


def test_a_cut_stream_keeps_what_came():
    whole = sse(
        ROLE | {"prompt_token_ids": [1]},
        chunk([5], delta={"content": "a"}),
        chunk([6], delta={"content": "b"}),
        done=False,
    )
    for cut in (whole, whole + b'data: {"choices":[{"ind', whole + b"da"):
        found = read(cut, outcome="upstream_cut")
        assert ids(found.choices[0]) == [5, 6]
        assert found.choices[0].problems == ["no_finish_reason"]
        assert "terminated_without_done" in found.problems


def test_a_last_event_without_blank_line_counts():
    found = read(
        sse(ROLE | {"prompt_token_ids": [1]}, chunk([5, 2], delta={"content": "a"}, finish="stop"), done=False).rstrip(
            b"\n"
        )
    )
    assert ids(found.choices[0]) == [5, 2]
    assert found.problems == ["terminated_without_done"]


def test_running_usage_is_not_taken_for_the_sum():
    running = {"prompt_tokens": 1, "completion_tokens": 1}
    found = read(
        sse(
            chunk([5], index=0, delta={"content": "a"}, prompt_token_ids=[1], usage=running, finish="stop"),
            chunk([6], index=1, delta={"content": "a"}, usage=running, finish="stop"),
        )
    )
    assert not found.rejected


# --- evidence: contradictions


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (choice([5, 6], entries([5])), "ids_logprobs_length"),
        (choice([5], entries([5, 6])), "ids_logprobs_length"),
        (choice([5], []), "ids_logprobs_length"),
        (choice([], entries([5])), "ids_logprobs_length"),
        (choice([5, 6], [entry(token="token_id:6"), entry(token="token_id:7")]), "ids_token_id_mismatch"),
        (choice([5, 6], [entry(id=5), entry(id=7)]), "ids_token_id_mismatch"),
        (choice([5, 6], [entry(), entry(float("nan"))]), "logprob_nan"),
        (choice([5, 6], [entry(float("-inf")), entry()]), "logprob_minus_inf"),
        (choice([5, 6], [entry(-9999.0), entry()]), "logprob_sentinel"),
        (choice([5, 6], [entry(0.5), entry()]), "logprob_positive"),
        (choice([5, 6], [entry(None), entry()]), "logprob_null"),
        (choice([5, 6], [None, entry()]), "logprob_null"),
        (choice([5, 6], [entry(logprob=True), entry()]), "logprob_not_number"),
        (choice([5, 6], [entry("-1"), entry()]), "logprob_not_number"),
        (choice([-1, 6]), "id_out_of_range"),
        (choice([5, 2**31]), "id_out_of_range"),
        (choice([5.0, 6]), "id_not_int"),
        (choice([True, 6]), "id_not_int"),
        (choice(["5", 6]), "id_not_int"),
        (choice("56", entries([5, 6])), "malformed_token_arrays"),
        (choice([5, 6], {"a": 1}), "malformed_token_arrays"),
        (choice([5, 6], "abc"), "malformed_token_arrays"),
    ],
)
@pytest.mark.parametrize("usage", [None, (3, 2)], ids=["no usage", "usage"])
def test_evidence_that_contradicts_itself_is_rejected(given, problem, usage):
    found = read(body(given, usage=usage))
    one = found.choices[0]
    assert found.rejected
    assert problem in one.problems
    assert (one.logprobs, one.logprobs_grade) == (b"", LogprobsGrade.NONE)


def test_one_bad_choice_rejects_the_call_and_spares_the_record_of_the_other():
    found = read(body(choice([5, 6]), choice([7, 8], entries([7]), index=1)))
    assert found.rejected
    assert [(ids(c), len(logprobs(c))) for c in found.choices] == [([5, 6], 2), ([7, 8], 0)]


@pytest.mark.parametrize(
    ("usage", "problem"),
    [
        ((3, 2), None),
        ((3, None), None),
        ((None, 2), None),
        ((3, 3), "ids_usage_mismatch"),
        ((3, 1), "ids_usage_mismatch"),
        ((4, 2), "prompt_usage_mismatch"),
        ((3, "2"), "usage_malformed"),
        (("3", 2), "usage_malformed"),
        ((3, 2.0), "usage_malformed"),
        ((3, True), "usage_malformed"),
        ((-3, 2), "usage_malformed"),
        ((3, 2**31), "usage_malformed"),
    ],
    ids=str,
)
def test_ids_are_held_against_the_usage(usage, problem):
    found = read(body(choice([5, 6]), usage=usage))
    assert found.problems == ([problem] if problem else [])
    assert found.rejected is (problem is not None)


def test_usage_is_the_sum_of_the_choices():
    both = (choice([5, 6]), choice([7], index=1))
    assert not read(body(*both, usage=(3, 3))).rejected
    assert read(body(*both, usage=(3, 2))).rejected


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([-1], "prompt_id_out_of_range"),
        ([1.5], "prompt_id_not_int"),
        ("12", "prompt_id_not_int"),
        ([True], "prompt_id_not_int"),
    ],
)
def test_bad_prompt_ids_are_rejected(prompt, problem):
    found = read(body(choice([5]), prompt=prompt))
    assert (found.prompt_ids, found.problems, found.rejected) == (None, [problem], True)


def test_prompts_that_differ_are_rejected():
    found = read(
        sse(
            chunk([5], delta={"content": "a"}, prompt_token_ids=[1]), chunk([2], finish="stop", prompt_token_ids=[1, 2])
        )
    )
    assert (found.problems, found.rejected) == (["prompt_ids_conflict"], True)


@pytest.mark.parametrize("prompt", [None, []], ids=str)
def test_no_prompt_is_not_known(prompt):
    found = read(body(choice([5]), prompt=prompt))
    assert (found.prompt_ids, found.problems, found.rejected) == (None, ["no_prompt_ids"], False)
    assert found.choices[0].ids_grade == IdsGrade.NONE


def test_ids_are_bound_by_the_vocabulary_where_it_is_known():
    assert not read(body(choice([5, 6])), n_vocab=7).rejected
    assert read(body(choice([5, 7])), n_vocab=7).choices[0].problems == ["id_out_of_range"]
    assert read(body(choice([5]), prompt=[7]), n_vocab=7).problems == ["prompt_id_out_of_range"]


def test_missing_logprobs_are_missing_and_not_a_contradiction():
    found = read(body(choice([5, 6], None)))
    one = found.choices[0]
    assert not found.rejected
    assert (ids(one), one.logprobs, one.problems, one.logprobs_grade) == (
        [5, 6],
        b"",
        ["no_logprobs"],
        LogprobsGrade.NONE,
    )


@pytest.mark.parametrize(
    ("mode", "grade"),
    [
        ("raw", LogprobsGrade.RAW),
        ("processed", LogprobsGrade.PROCESSED),
        ("none", LogprobsGrade.NONE),
        ("odd", LogprobsGrade.NONE),
    ],
)
def test_the_grade_is_what_the_probe_found(mode, grade):
    assert read(body(choice([5])), logprobs_mode=mode).choices[0].logprobs_grade == grade


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "empty_answer"),
        (b" \n", "empty_answer"),
        (b"<html>502</html>", "not_json"),
        (b'{"choices":[{"index', "not_json"),
        (b"[]", "not_an_answer"),
        (b"null", "not_an_answer"),
        (b"{}", "no_choices"),
        (b'{"choices":{}}', "no_choices"),
        (b'{"choices":[null,5]}', "no_choices"),
        (b'{"error":{"message":"no"}}', "error_in_body"),
        (b"data: <html>\n\n", "no_choices"),
        (b"\xff\xfe\x00", "not_json"),
        (b"[" * 100_000, "not_json"),
    ],
)
def test_what_is_no_answer_is_named(answer, problem):
    found = read(answer)
    assert problem in found.problems
    assert found.choices == []


def test_odd_members_do_not_raise():
    odd = {
        "index": "0",
        "message": 5,
        "finish_reason": 7,
        "stop_reason": [1],
        "logprobs": {"content": None},
        "token_ids": None,
    }
    found = read(body(odd, usage=("x", [])))
    assert (len(found.choices), found.choices[0].problems) == (1, ["no_ids", "no_finish_reason"])


def test_no_answer_at_all():
    found = Vllm().evidence(Exchange(request=b"", status=None))
    assert (found.problems, found.choices, found.rejected) == (["no_answer"], [], False)


def test_a_bad_request_body_is_no_obstacle():
    assert ids(read(body(choice([5])), request=b"\xffnope").choices[0]) == [5]


def test_unknown_members_of_a_message_do_no_harm():
    message = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None, "new": {"x": 1}}
    found = read(body(choice([5], message=message)))
    assert json.loads(bytes(found.choices[0].message)) == {"role": "assistant", "content": "a"}
