import json

import msgspec
import pytest
from derive_kit import request_body, vllm_answer

from orchard_proxy.record.open_call import OpenCall, read
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.enums import Delivery, Outcome
from orchard_proxy.schema.frames import BeginFrame, Edit, EditFrame, EndFrame, EvidenceFrame, FrameType, HeadFrame
from orchard_proxy.schema.packed import pack_ids

START = Position("w0-000001.orj", 36)


def opened(body: bytes = b"", *, answer: bytes = b"", edit: EditFrame | None = None, dialect: str = "chat") -> OpenCall:
    begin = BeginFrame(
        rollout_id="r",
        seq=3,
        begun_us=1_000_000,
        dialect=dialect,
        path="/v1/chat/completions",
        headers={},
        body=body or request_body("q"),
    )
    one = OpenCall.of(b"c" * 16, START, msgspec.msgpack.encode(begin))
    one.add(FrameType.EDIT, msgspec.msgpack.encode(edit or an_edit()))
    head = HeadFrame(status=200, headers={"content-type": "application/json"}, received_us=1_500_000)
    one.add(FrameType.HEAD, msgspec.msgpack.encode(head))
    for at, part in enumerate((answer[:5], answer[5:]) if answer else ()):
        one.add(FrameType.CHUNK, (2_000_000 + at).to_bytes(8, "little") + part)
    return one


def an_edit(**over) -> EditFrame:
    known = {"engine": "vllm", "engine_url": "", "edits": [], "upstream_stream": False, "logprobs_mode": "processed"}
    return EditFrame(**{**known, **over})


def ended(outcome: Outcome = Outcome.COMPLETE, **over) -> EndFrame:
    return EndFrame(outcome=outcome, ended_us=3_000_000, **over)


def test_times_are_seconds_from_the_request():
    call = read(opened(answer=vllm_answer([1], [2])), ended(), 0).call
    assert (call.ttft_s, call.duration_s, call.begun_us, call.ended_us) == (1.0, 2.0, 1_000_000, 3_000_000)


def test_without_an_answer_there_is_no_first_byte():
    assert read(opened(), ended(Outcome.ENGINE_ERROR), 0).call.ttft_s is None


def test_a_crashed_call_ends_with_its_last_sign_of_life():
    one = opened(answer=vllm_answer([1], [2]))
    call = read(one, one.crashed(), 0).call
    assert (call.outcome, call.ended_us, call.delivery) == ("crashed", 2_000_001, "none")


@pytest.mark.parametrize("outcome", list(Outcome))
def test_nobody_has_the_answer_of_a_call_whose_client_or_server_is_gone(outcome):
    expected = Delivery.NONE if outcome in {Outcome.CLIENT_GONE, Outcome.CRASHED} else Delivery.UNCERTAIN
    assert read(opened(), ended(outcome), 0).call.delivery is expected


def test_edits_of_begin_and_end_are_named():
    edit = an_edit(edits=[Edit(name="return_token_ids"), Edit(name="include_reasoning", detail="true")])
    call = read(opened(edit=edit), ended(edits=[Edit(name="keep_alive", detail="2")]), 0).call
    assert call.edits == ["return_token_ids", "include_reasoning: true", "keep_alive: 2"]


def test_messages_with_unknown_roles_and_fields_are_kept_as_sent():
    messages = '[{"role":"critic","content":null,"refusal":null,"annotations":[],"audio":null,"x":1.50}]'
    call = read(opened(b'{"model":"m","messages":' + messages.encode() + b"}"), ended(), 0).call
    assert bytes(call.messages).decode() == messages


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"[1]", id="not-an-object"),
        pytest.param(b'{"messages":"x","tools":3,"stream":"yes","n":0,"model":7}', id="odd-types"),
        pytest.param(b'{"messages":[NaN]}', id="nan"),
    ],
)
def test_a_request_that_is_none_is_still_a_call(body):
    one = opened(answer=vllm_answer([1], [2]))
    one.begin = msgspec.structs.replace(one.begin, body=body)
    call = read(one, ended(), 0).call
    assert (call.seq, call.rollout_id) == (3, "r")
    assert "derive_failed" not in call.problems


def test_evidence_from_beside_the_generation_reaches_the_engine():
    answer = {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    one = opened(answer=json.dumps(answer).encode(), edit=an_edit(engine="llamacpp"))
    side = EvidenceFrame(path="/tokenize", request=b"{}", status=200, answer=b'{"tokens":[5,6]}')
    one.add(FrameType.EVIDENCE, msgspec.msgpack.encode(side))
    assert one.side == [side]
    assert read(one, ended(), 0).evidence.prompt_ids == pack_ids([5, 6])


def test_two_choices_of_one_index_are_refused():
    answer = json.loads(vllm_answer([1, 2], [3], [4]))
    answer["choices"][1]["index"] = 0
    call = read(opened(answer=json.dumps(answer).encode()), ended(), 0).call
    assert call.evidence_rejected or len(call.choices) == 1
