import json

import pytest
from fakes import twins

from orchard_proxy.engines.probe import PATH, ProbeAnswer, n_vocab, probe

REFUSED = ProbeAnswer(422, b'{"detail":"Unexpected fields in the request: {\'return_token_ids\'}"}')
TEXT = ProbeAnswer(
    200, b'{"choices":[{"finish_reason":"stop","index":0,"message":{"content":"The","role":"assistant"}}]}'
)
UNKNOWN_MODEL = ProbeAnswer(404, b'{"error":{"message":"The model `x` does not exist.","code":404}}')


def play(answers, model="smol"):
    """Run the plan; return its result and the bodies it sent."""
    plan, sent = probe(model), []
    answers = iter(answers)
    request = next(plan)
    while True:
        assert request.path == PATH
        sent.append(json.loads(request.body))
        try:
            request = plan.send(next(answers))
        except StopIteration as stop:
            return stop.value, sent


def entry(logprob, **more):
    return {"token": "A", "logprob": -5.0, "top_logprobs": [{"token": "B", "logprob": logprob}], **more}


def answer(*, choice=None, entries=None, **top):
    logprobs = None if entries is None else {"content": entries}
    one = {"index": 0, "message": {"content": "A"}, "logprobs": logprobs, **(choice or {})}
    return ProbeAnswer(200, json.dumps({"choices": [one], **top}).encode())


def vllm(logprob):
    return answer(choice={"token_ids": [5]}, entries=[entry(logprob)], prompt_token_ids=[1])


def llamacpp(logprob):
    return answer(entries=[entry(logprob, id=5)])


@pytest.mark.parametrize(("make", "name"), [(vllm, "vllm"), (llamacpp, "llamacpp")])
@pytest.mark.parametrize(
    ("at_one", "at_two", "mode"),
    [(-1.25, -1.25, "raw"), (-1.25, -1.2500123, "raw"), (-1.25, -2.5, "processed"), (-0.7, -1.4, "processed")],
)
def test_the_engine_and_what_its_logprobs_are_of(make, name, at_one, at_two, mode):
    found, sent = play([make(at_one), make(at_two)])
    assert (found.engine, found.logprobs_mode) == (name, mode)
    assert [body["temperature"] for body in sent] == [1, 2]
    assert sent[0] | {"temperature": 2} == sent[1]


def test_at_most_two_tokens_are_generated_and_all_is_asked_for():
    _, sent = play([vllm(-1), vllm(-2)])
    assert [body["max_tokens"] for body in sent] == [1, 1]
    asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 1, "model": "smol"}
    assert asked.items() <= sent[0].items()
    assert "stream" not in sent[0]


def test_no_model_is_named_where_none_is_known():
    _, sent = play([TEXT], model=None)
    assert "model" not in sent[0]


def test_llamacpp_is_known_by_its_report_even_without_an_entry():
    report = answer(entries=None, __verbose={"tokens": [5]})
    found, _ = play([report, report])
    assert (found.engine, found.logprobs_mode) == ("llamacpp", "none")


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_a_server_that_refuses_our_fields_is_asked_bare(status):
    found, sent = play([ProbeAnswer(status, b"{}"), TEXT])
    assert (found.engine, found.logprobs_mode) == ("openai", "none")
    assert set(sent[1]) == {"model", "messages", "max_tokens"}


def test_refused_fields_as_captured():
    found, _ = play([REFUSED, TEXT])
    assert found.engine == "openai"
    assert "422" in found.notes[0]


@pytest.mark.parametrize(
    "given",
    [
        TEXT,
        answer(entries=[]),
        answer(entries=[entry(-1.0)]),
        answer(choice={"token_ids": []}),
        answer(choice={"token_ids": None}),
        answer(choice={"token_ids": ["5"]}),
        answer(choice={"token_ids": "5"}),
        answer(entries=[entry(-1.0, id="5")]),
        answer(entries=[entry(-1.0, id=None)]),
        answer(choice={"logprobs": "yes"}),
        answer(__verbose={"tokens": []}),
        answer(__verbose=True),
    ],
)
def test_a_200_without_ids_is_text(given):
    found, sent = play([given])
    assert (found.engine, len(sent)) == ("openai", 1)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[null]}',
        b'{"choices":{}}',
        b'{"error":{"message":"no"}}',
    ],
)
def test_what_is_no_chat_completion_is_no_engine(given):
    found, _ = play([ProbeAnswer(200, given)])
    assert found.engine is None
    assert found.notes


@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_a_server_that_does_not_serve_us_is_not_asked_again(status):
    found, sent = play([ProbeAnswer(status, b"{}")])
    assert (found.engine, len(sent)) == (None, 1)


def test_a_model_that_does_not_exist():
    found, _ = play([UNKNOWN_MODEL, UNKNOWN_MODEL])
    assert found.engine is None
    assert "404" in found.notes[0]


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        (vllm(-0.0001), vllm(-0.01), "raw"),
        (vllm(-1.0), ProbeAnswer(500, b""), "raw"),
        (answer(choice={"token_ids": [5]}), answer(choice={"token_ids": [5]}), "none"),
        (answer(choice={"token_ids": [5]}, entries=[{"top_logprobs": [None, {"logprob": "x"}]}]), TEXT, "none"),
    ],
    ids=["too sure", "second failed", "no logprobs", "odd logprobs"],
)
def test_doubt_is_never_called_processed(first, second, mode):
    assert play([first, second])[0].logprobs_mode == mode


@pytest.mark.parametrize(("engine", "name"), [("vllm", "i_max1"), ("llamacpp", "i_max1")])
def test_captured_answers_are_known(engine, name):
    captured = next(t for t in twins.load(engine) if t.name == name).instr_body
    found, _ = play([ProbeAnswer(200, captured)] * 2)
    assert (found.engine, found.logprobs_mode) == (engine, "raw" if engine == "llamacpp" else "none")


@pytest.mark.parametrize(
    ("models", "size"),
    [
        (b'{"data":[{"id":"m","meta":{"n_vocab":49152}}]}', 49152),
        (b'{"data":[{"id":"m"}]}', None),
        (b'{"data":[{"meta":{"n_vocab":"x"}}]}', None),
        (b'{"data":[{"meta":{"n_vocab":0}}]}', None),
        (b'{"data":[]}', None),
        (b"[]", None),
        (b"<html>", None),
    ],
)
def test_n_vocab(models, size):
    assert n_vocab(models) == size
