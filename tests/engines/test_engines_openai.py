import json

import pytest
from engine_answers import body, choice, chunk, exchange, sse

from orchard_proxy.engines.openai import OpenAi
from orchard_proxy.schema.enums import IdsGrade, LogprobsGrade, UpstreamStream
from orchard_proxy.wire import chat

ENGINE = OpenAi()


@pytest.mark.parametrize("sent", [b'{"messages":[], "x": 1.50}', b'{"stream":true}', b"junk", b'{"stream":"yes"}'])
@pytest.mark.parametrize("mode", [UpstreamStream.AUTO, UpstreamStream.ON])
def test_requests_go_up_as_they_came(sent, mode):
    prepared = ENGINE.prepare(chat.decode(sent), mode)
    assert (prepared.body, prepared.edits, prepared.synthesise) == (sent, [], False)
    assert list(ENGINE.side(chat.decode(sent))) == []


def test_streams_off_asks_for_a_whole_answer():
    prepared = ENGINE.prepare(
        chat.decode(b'{"stream":true,"stream_options":{},"n":1,"messages":[]}'), UpstreamStream.OFF
    )
    assert (prepared.body, prepared.stream, prepared.synthesise) == (b'{"n":1,"messages":[]}', False, True)


@pytest.mark.parametrize("data", [b"x", b'{"token_ids":[1],"logprobs":{}}'])
def test_answers_come_back_as_they_are(data):
    prepared = ENGINE.prepare(chat.decode(b"{}"), UpstreamStream.AUTO)
    assert (ENGINE.strip_body(data, prepared), ENGINE.strip_event(data, prepared)) == (data, data)


def test_text_is_graded_as_text_and_tokens_are_counted():
    found = ENGINE.evidence(exchange(body(choice([5, 6]), usage=(3, 2))))
    one = found.choices[0]
    assert (one.ids_grade, one.logprobs_grade, one.token_ids, one.logprobs) == (
        IdsGrade.NONE,
        LogprobsGrade.NONE,
        b"",
        b"",
    )
    assert (one.sampled_tokens, one.problems, found.problems) == (2, ["text_only"], ["no_prompt_ids"])
    assert not found.rejected
    assert json.loads(bytes(one.message))["content"] == "aaa"


@pytest.mark.parametrize(
    ("usage", "counts"), [((3, 7), [7, 0]), ((3, None), [0, 0]), (None, [0, 0])], ids=["sum", "odd", "none"]
)
def test_the_sum_over_choices_is_the_engines(usage, counts):
    found = ENGINE.evidence(exchange(body(choice(None, None), choice(None, None, index=1), usage=usage)))
    assert [c.sampled_tokens for c in found.choices] == counts


def test_a_stream_is_folded():
    found = ENGINE.evidence(exchange(sse(chunk(delta={"content": "a"}), chunk(delta={"content": "b"}, finish="stop"))))
    assert json.loads(bytes(found.choices[0].message))["content"] == "ab"
    assert found.choices[0].finish_reason == "stop"


def test_another_model_than_asked_is_flagged():
    found = ENGINE.evidence(exchange(body(choice(None, None), model="other")))
    assert "model_mismatch" in found.problems
    assert found.model == "other"
