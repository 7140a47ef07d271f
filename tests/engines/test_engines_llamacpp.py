import json

import pytest
from engine_answers import entry, exchange, ids, logprobs
from fakes import twins

from orchard_proxy.engines.base import Exchange, SideRequest, Strip
from orchard_proxy.engines.llamacpp import LlamaCpp
from orchard_proxy.schema.enums import IdsGrade, LogprobsGrade, UpstreamStream
from orchard_proxy.schema.frames import EvidenceFrame
from orchard_proxy.schema.packed import unpack_ids
from orchard_proxy.wire import chat

AUTO, ON, OFF = UpstreamStream.AUTO, UpstreamStream.ON, UpstreamStream.OFF
ENGINE = LlamaCpp()
TOOLS = b',"tools":[{"type":"function","function":{"name":"f"}}]'
WHOLE = {"verbose": True, "return_tokens": True, "n_probs": 1}


def prepare(members: bytes, mode=AUTO):
    return ENGINE.prepare(chat.decode(b'{"messages":[]%b}' % members), mode)


def added(members: bytes, mode=AUTO) -> dict:
    """What is sent besides the messages."""
    sent = json.loads(prepare(members, mode).body)
    del sent["messages"]
    return sent


# --- prepare


@pytest.mark.parametrize("mode", [AUTO, ON, OFF])
def test_a_whole_answer_is_asked_for_with_every_id(mode):
    assert added(b"", mode) == WHOLE
    assert prepare(b"", mode).strip == Strip(ids=True, logprobs=True, verbose=True)
    assert not prepare(b"", mode).synthesise


@pytest.mark.parametrize("mode", [AUTO, OFF])
@pytest.mark.parametrize("tools", [b"", TOOLS], ids=["no tools", "tools"])
def test_a_stream_is_made_by_us_from_a_whole_answer(mode, tools):
    members = b',"stream":true,"stream_options":{"include_usage":true}' + tools
    prepared = prepare(members, mode)
    assert WHOLE.items() <= json.loads(prepared.body).items()
    assert not {"stream", "stream_options"} & set(json.loads(prepared.body))
    assert (prepared.stream, prepared.synthesise) == (False, True)
    assert "synthesised_stream" in {edit.name for edit in prepared.edits}


@pytest.mark.parametrize(
    ("members", "sent"),
    [
        (b"", {"logprobs": True, "top_logprobs": 1}),
        (TOOLS, {"n_probs": 1}),
        (b',"tools":[]', {"logprobs": True, "top_logprobs": 1}),
    ],
    ids=["no tools", "tools", "empty tools"],
)
def test_the_engines_own_stream_where_the_user_insists(members, sent):
    prepared = prepare(b',"stream":true' + members, ON)
    assert (prepared.stream, prepared.synthesise) == (True, False)
    found = added(b',"stream":true' + members, ON)
    found.pop("tools", None)
    assert found == {"stream": True} | sent


@pytest.mark.parametrize(
    ("members", "sent", "shown"),
    [
        (b',"logprobs":true', {"logprobs": True}, True),
        (b',"logprobs":true,"top_logprobs":null', {"logprobs": True, "top_logprobs": None}, True),
        (b',"logprobs":true,"top_logprobs":3', {"logprobs": True, "top_logprobs": 3}, True),
        (b',"logprobs":true,"top_logprobs":"2"', {"logprobs": True, "top_logprobs": "2"}, True),
        (b',"logprobs":2', {"logprobs": 2}, True),
        (b',"n_probs":5', {"n_probs": 5}, True),
        (b',"logprobs":true,"top_logprobs":0', {"n_probs": 1}, False),
        (b',"logprobs":true,"top_logprobs":-1', {"n_probs": 1}, False),
        (b',"logprobs":false', {"n_probs": 1}, False),
        (b',"logprobs":null,"top_logprobs":null', {"n_probs": 1}, False),
        (b',"logprobs":0', {"n_probs": 1}, False),
        (b',"n_probs":0', {"n_probs": 1}, False),
        (b',"n_probs":null,"post_sampling_probs":true', {"n_probs": 1}, False),
    ],
)
def test_the_client_sees_what_it_asked_for(members, sent, shown):
    assert added(members) == {"verbose": True, "return_tokens": True} | sent
    assert prepare(members).strip.logprobs is not shown


@pytest.mark.parametrize("flag", [b"true", b"false", b"null"])
def test_the_report_is_the_clients_iff_it_asked(flag):
    assert prepare(b',"verbose":' + flag).strip.verbose is (flag != b"true")
    assert added(b',"verbose":' + flag)["verbose"] is True


@pytest.mark.parametrize(
    "members",
    [
        b',"top_logprobs":1',
        b',"top_logprobs":0',
        b',"logprobs":false,"top_logprobs":1',
        b',"logprobs":1,"top_logprobs":1',
        b',"logprobs":"abc"',
        b',"logprobs":[]',
        b',"stream":true,"logprobs":true' + TOOLS,
        b',"stream":"yes"',
        b',"stream":1',
        b',"stream":true,"stream_options":{"include_usage":"x"}',
        b',"verbose":"x"',
        b',"return_tokens":1',
        b',"n_probs":"a"',
    ],
)
@pytest.mark.parametrize("mode", [AUTO, ON, OFF])
def test_a_request_that_must_fail_is_left_alone(members, mode):
    prepared = prepare(members, mode)
    assert (prepared.body, prepared.edits) == (b'{"messages":[]%b}' % members, [])
    assert list(ENGINE.side(chat.decode(prepared.body))) == []


def test_events_are_never_dropped():
    event = b'{"choices":[{"delta":{},"finish_reason":null,"logprobs":{"content":[]}}],"__verbose":{"x":1},"t":1}'
    assert (
        ENGINE.strip_event(event, prepare(b',"stream":true', ON))
        == b'{"choices":[{"delta":{},"finish_reason":null}],"t":1}'
    )


# --- side requests


def test_the_prompt_is_rendered_then_cut_into_tokens():
    body = b'{"messages":[{"role":"user","content":"hi"}],"n":2,"stream":true,"logprobs":false,"tools":[],"k":1.50}'
    plan = ENGINE.side(chat.decode(body))
    first = next(plan)
    assert first == SideRequest(
        path="/apply-template", body=b'{"messages":[{"role":"user","content":"hi"}],"tools":[],"k":1.50}'
    )
    second = plan.send('{"prompt":"<|user|>\u2028hi"}'.encode())
    assert second.path == "/tokenize"
    assert json.loads(second.body) == {"content": "<|user|>\u2028hi", "add_special": True, "parse_special": True}
    with pytest.raises(StopIteration):
        plan.send(b'{"tokens":[1]}')


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"{}", b'{"prompt":5}', b'{"prompt":null}'])
def test_a_template_that_cannot_be_had_ends_the_plan(answer):
    plan = ENGINE.side(chat.decode(b'{"messages":[]}'))
    next(plan)
    with pytest.raises(StopIteration):
        plan.send(answer)


def test_the_template_sees_the_repaired_history():
    call = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a"}}]}'
    request = chat.decode(b'{"messages":[%b]}' % call)
    side = json.loads(next(ENGINE.side(request)).body)
    assert side["messages"] == json.loads(ENGINE.prepare(request, AUTO).body)["messages"]


# --- evidence


def side(tokens=(1, 2, 3), prompt="P", status=200):
    return [
        EvidenceFrame(
            path="/apply-template", request=b"", status=status, answer=json.dumps({"prompt": prompt}).encode()
        ),
        EvidenceFrame(path="/tokenize", request=b"", status=status, answer=json.dumps({"tokens": tokens}).encode()),
    ]


def named(*names: int, text: str = "a") -> list[dict]:
    return [entry(id=name, token=text) for name in names]


def whole(
    tokens=(5, 6, 2), lps=None, *, usage=(3, 3), finish="stop", text="aa", others=(), report: dict | None = None
) -> bytes:
    lps = named(*tokens) if lps is None else lps
    first = {"finish_reason": finish, "index": 0, "message": {"role": "assistant", "content": text}}
    first |= {"logprobs": {"content": lps}} if lps else {}
    verbose = {
        "index": 0,
        "tokens": tokens,
        "prompt": "P",
        "stop_type": "eos",
        "generation_settings": {"stop": [], "n_predict": 9},
    }
    stated = {"completion_tokens": usage[1], "prompt_tokens": usage[0]}
    return json.dumps({"choices": [first, *others], "usage": stated, "__verbose": verbose | (report or {})}).encode()


def read(answer: bytes, **more):
    return ENGINE.evidence(exchange(answer, **{"side": side(), **more}))


def test_ids_are_those_of_the_report():
    found = read(whole())
    one = found.choices[0]
    assert (found.problems, found.rejected, one.problems) == ([], False, [])
    assert (unpack_ids(found.prompt_ids), ids(one), len(logprobs(one))) == ([1, 2, 3], [5, 6, 2], 3)
    assert (one.ids_grade, one.logprobs_grade) == (IdsGrade.ENGINE, LogprobsGrade.RAW)


@pytest.mark.parametrize("lps", [named(5, 2), named(6), named(2)], ids=["middle", "ends", "last"])
def test_tokens_without_entries_keep_their_ids_and_have_no_logprobs(lps):
    found = read(whole(lps=lps))
    one = found.choices[0]
    assert not found.rejected
    assert (ids(one), one.logprobs, one.problems) == ([5, 6, 2], b"", ["logprobs_incomplete"])
    assert (one.ids_grade, one.logprobs_grade) == (IdsGrade.ENGINE, LogprobsGrade.NONE)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (whole(lps=named(5, 7)), "ids_token_id_mismatch"),
        (whole(lps=named(6, 5)), "ids_token_id_mismatch"),
        (whole(lps=named(5, 7, 2)), "ids_token_id_mismatch"),
        (whole(lps=named(6, 5, 2)), "ids_token_id_mismatch"),
        (whole(lps=named(5, 6, 2, 2)), "ids_logprobs_length"),
        (whole(usage=(3, 4)), "ids_usage_mismatch"),
        (whole(usage=(3, 2)), "ids_usage_mismatch"),
        (whole(tokens=[5, -6, 2]), "id_out_of_range"),
        (whole(tokens=[5, "6", 2], lps=[]), "id_not_int"),
        (whole(tokens="562", lps=[]), "malformed_token_arrays"),
        (whole(lps=[*named(5, 6), entry(float("nan"), id=2)]), "logprob_nan"),
        (whole(lps=[*named(5, 6), entry(0.7, id=2)]), "logprob_positive"),
        (whole(tokens=[0], lps=[entry(0.0, id=0)], text="", usage=(3, 0)), "fabricated_ids"),
    ],
)
def test_evidence_that_contradicts_itself_is_rejected(answer, problem):
    found = read(answer)
    assert found.rejected
    assert problem in found.choices[0].problems
    assert len(found.choices[0].logprobs) in (0, len(found.choices[0].token_ids))


@pytest.mark.parametrize(
    ("more", "problem", "rejected"),
    [
        ({"side": []}, "no_prompt_ids", False),
        ({"side": side()[:1]}, "no_prompt_ids", False),
        ({"side": side(status=500)}, "no_prompt_ids", False),
        ({"side": [EvidenceFrame(path="/tokenize", request=b"", status=0, error="gone")]}, "no_prompt_ids", False),
        (
            {"side": [EvidenceFrame(path="/tokenize", request=b"", status=200, answer=b"<html>")]},
            "no_prompt_ids",
            False,
        ),
        ({"side": side([1, 2])}, "prompt_usage_mismatch", True),
        ({"side": side([1, 2, -3])}, "prompt_id_out_of_range", True),
        ({"side": side([{"id": 1, "piece": "a"}] * 3)}, "prompt_id_not_int", True),
        ({"side": side(prompt="another")}, "prompt_text_mismatch", True),
    ],
)
def test_prompt_ids_are_held_against_the_answer(more, problem, rejected):
    found = read(whole(), **more)
    assert (found.problems, found.rejected) == ([problem], rejected)
    if not rejected:
        assert found.prompt_ids is None
        assert (found.choices[0].ids_grade, ids(found.choices[0])) == (IdsGrade.NONE, [5, 6, 2])


def test_a_matched_stop_string_is_kept():
    found = read(whole(report={"stop_type": "word", "stopping_word": "Fr\u00e9"}))
    assert found.choices[0].stop_reason == '"Fr\u00e9"'
    assert read(whole()).choices[0].stop_reason is None


def second(lps, finish="stop"):
    message = {"role": "assistant", "content": "b"}
    return {"finish_reason": finish, "index": 1, "message": message, "logprobs": {"content": lps}}


EOS = entry(id=2, token="")
NINE = named(*range(10, 19))


@pytest.mark.parametrize(
    ("other", "report", "expected"),
    [
        (second([*named(7, 8), EOS]), {}, [7, 8, 2]),
        (second([*named(7, 8, text=" b"), EOS], "tool_calls"), {}, [7, 8, 2]),
        (second(NINE, "length"), {}, list(range(10, 19))),
        (second([*named(7, 8, text="\u00e9"), EOS]), {}, None),
        (second([*named(7, 8, text=""), EOS]), {}, None),
        (second(named(7, 8)), {}, None),
        (second(NINE[:8], "length"), {}, None),
        (second([*named(7, 8), EOS]), {"generation_settings": {"stop": ["x"], "n_predict": 9}}, None),
        (second([*named(7, 8), EOS]), {"generation_settings": None}, None),
        (second([]), {}, None),
    ],
    ids=[
        "plain text to the stop token",
        "tool call to the stop token",
        "as many as allowed",
        "text that may hide pieces",
        "entry without text",
        "no stop token",
        "fewer than allowed",
        "stop strings",
        "settings not told",
        "no entries",
    ],
)
def test_the_second_choice_has_ids_only_where_none_can_be_missing(other, report, expected):
    found = read(whole(others=[other], report=report))
    first, then = found.choices
    assert not found.rejected
    assert (ids(first), first.problems) == ([5, 6, 2], [])
    if expected is None:
        assert (then.token_ids, then.logprobs, then.problems) == (b"", b"", ["ids_incomplete"])
        assert then.ids_grade == IdsGrade.NONE
    else:
        assert (ids(then), len(logprobs(then)), then.problems) == (expected, len(expected), [])


def test_entries_stand_in_for_a_report_that_is_missing():
    without = json.loads(whole())
    del without["__verbose"]
    assert ids(read(json.dumps(without).encode()).choices[0]) == [5, 6, 2]
    without["usage"]["completion_tokens"] = 4
    found = read(json.dumps(without).encode())
    assert (found.choices[0].problems, found.choices[0].sampled_tokens) == (["ids_incomplete"], 4)
    assert not found.rejected
    without["usage"]["completion_tokens"] = 2
    assert read(json.dumps(without).encode()).rejected


def captured(name):
    return next(t for t in twins.load("llamacpp") if t.name == name)


def evidence_of(name):
    twin = captured(name)
    return ENGINE.evidence(
        Exchange(
            request=twin.plain_request,
            status=twin.instr_status,
            content_type=twin.instr_content_type,
            answer=twin.instr_body,
            logprobs_mode="raw",
        )
    )


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("v_verbose_emoji", [(32, 0, ["logprobs_incomplete"])]),
        ("v3_verbose_stop", [(4, 0, ["logprobs_incomplete"])]),
        ("v4_verbose_tool_call", [(32, 32, [])]),
        ("a_chat", [(8, 8, [])]),
        ("h_stop", [(0, 0, ["ids_incomplete"])]),
        ("k2_emoji", [(0, 0, ["ids_incomplete"])]),
        ("d2_n2", [(0, 0, ["ids_incomplete"])] * 2),
        ("b_stream", [(0, 0, ["ids_incomplete"])]),
        ("c_stream_usage", [(0, 0, ["ids_incomplete"])]),
        ("h2_stop_stream", [(4, 4, [])]),
        ("h4_stop_stream_cont_usage", [(0, 0, ["ids_incomplete"])]),
        ("k_emoji_stream", [(0, 0, ["ids_incomplete"])]),
        ("v5_verbose_tool_call_stream", [(0, 0, ["ids_incomplete"])]),
        ("v7_verbose_n2_stream", [(16, 16, [])] * 2),
        ("f5_tools_stream_nprobs", [(48, 48, [])]),
    ],
)
def test_captured_answers_prove_what_they_hold_and_no_more(name, counts):
    found = evidence_of(name)
    assert not found.rejected
    assert [(len(ids(c)), len(logprobs(c)), c.problems) for c in found.choices] == counts


@pytest.mark.parametrize(
    ("name", "problems"),
    [("j5_toolong", ["http_400", "context_overflow"]), ("f_tools_stream", ["http_400"])],
)
def test_a_refusal_is_no_evidence(name, problems):
    found = evidence_of(name)
    assert (found.choices, found.problems, found.rejected) == ([], problems, False)


def test_tokens_are_counted_where_ids_are_not_known():
    assert [c.sampled_tokens for c in evidence_of("b_stream").choices] == [8]
    assert [c.sampled_tokens for c in evidence_of("k2_emoji").choices] == [32]
    assert [c.sampled_tokens for c in evidence_of("d2_n2").choices] == [16, 16]


@pytest.mark.parametrize("index", [[], {}, None, "0", 0.5], ids=str)
def test_a_report_of_no_choice_is_of_none(index):
    found = read(whole(others=[second(named(7))], report={"index": index}))
    assert [c.problems for c in found.choices] == [["ids_incomplete"]] * 2
    assert not found.rejected


REPORT = (
    b'{"choices":[{"index":0,"message":{},"logprobs":{"content":[]}}],"__verbose":{"content":"x","tokens":[5],'
    b'"generation_settings":{"n_probs":1,"stream":false},"completion_probabilities":[]},"timings":{}}'
)
LESS = (
    b'{"choices":[{"index":0,"message":{}}],"__verbose":{"content":"x","tokens":[],'
    b'"generation_settings":{"n_probs":0,"stream":false}},"timings":{}}'
)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (b"", b'{"choices":[{"index":0,"message":{}}],"timings":{}}'),
        (b',"verbose":true', LESS),
        (b',"verbose":true,"return_tokens":true,"logprobs":true,"top_logprobs":1', REPORT),
    ],
    ids=["none", "a report", "a report with all"],
)
def test_a_report_that_the_client_asks_for_has_nothing_of_ours(asked, shown):
    prepared = prepare(asked)
    assert LlamaCpp().strip_body(REPORT, prepared) == shown
