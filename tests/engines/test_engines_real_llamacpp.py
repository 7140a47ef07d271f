"""What we believe of llama.cpp, asked of the real server: SmolLM2-135M in a process of its own.

Skipped only where the model cannot be had (no package index and no cache).
"""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from engine_answers import ids, logprobs
from fakes import twins

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.llamacpp import LlamaCpp
from orchard_proxy.engines.probe import ProbeAnswer, n_vocab, probe
from orchard_proxy.policy import fetch
from orchard_proxy.schema.enums import IdsGrade, UpstreamStream
from orchard_proxy.schema.frames import EvidenceFrame
from orchard_proxy.schema.packed import count
from orchard_proxy.wire import chat

ENGINE = LlamaCpp()
PATH = "/v1/chat/completions"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
EMOJI = [{"role": "user", "content": "Repeat exactly: \U0001f984\U0001f984 \u674e \u2603\ufe0f"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
BASE = {"messages": FRANCE, "max_tokens": 24, "temperature": 0, "seed": 1}


class Server:
    def __init__(self, port: str) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers["Content-Type"]

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    try:
        model = fetch.fetch()
    except fetch.FetchError as error:
        pytest.skip(f"no model: {error}")
    port_file = tmp_path_factory.mktemp("smollm2") / "port"
    command = [sys.executable, "-c", "from orchard_proxy.cli.main import main; main()", "policy", "smollm2"]
    options = ["--model", str(model), "--port", "0", "--port-file", str(port_file)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        yield Server(port_file.read_text().strip())
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def call(server, body: dict, mode=UpstreamStream.AUTO):
    """Do as the relay does; return what was prepared, the engine's answer, the evidence."""
    request = chat.decode(json.dumps(body).encode())
    prepared = ENGINE.prepare(request, mode)
    frames, plan, answer = [], ENGINE.side(request), None
    while True:
        try:
            wanted = next(plan) if answer is None else plan.send(answer)
        except StopIteration:
            break
        status, answer, _ = server.post(wanted.path, wanted.body)
        frames.append(EvidenceFrame(path=wanted.path, request=wanted.body, status=status, answer=answer))
    status, answer, kind = server.post(PATH, prepared.body)
    exchange = Exchange(
        request=request.body, status=status, content_type=kind, answer=answer, side=frames, logprobs_mode="raw"
    )
    return prepared, answer, ENGINE.evidence(exchange)


SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}

REQUESTS = {
    "plain": {},
    "a stop string": {"stop": ["France"]},
    "a stop string over tokens": {"stop": ["of Fra"]},
    "a stop string first": {"stop": ["The"]},
    "emoji": {"messages": EMOJI, "max_tokens": 32},
    "tools": {"tools": TOOLS},
    "tools required": {"tools": TOOLS, "tool_choice": "required"},
    "json": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "one token": {"max_tokens": 1},
    "logprobs": {"logprobs": True},
    "logprobs of three": {"logprobs": True, "top_logprobs": 3},
    "logprobs of none": {"logprobs": True, "top_logprobs": 0},
    "logprobs as a number": {"logprobs": 2},
    "logprobs false": {"logprobs": False},
    "n_probs": {"n_probs": 4},
    "a report": {"verbose": True},
    "a report with ids": {"verbose": True, "return_tokens": True},
    "a report with logprobs": {"verbose": True, "logprobs": True, "top_logprobs": 2},
    "sampled": {"temperature": 0.9, "seed": 11},
}


@pytest.mark.parametrize("more", REQUESTS.values(), ids=REQUESTS)
def test_every_id_is_known_and_the_client_sees_the_plain_answer(server, more):
    body = BASE | more
    sent = json.dumps(body).encode()
    server.post(PATH, sent)  # a cold prompt cache may give another text
    status, plain, _ = server.post(PATH, sent)
    prepared, answer, found = call(server, body)
    assert status == 200
    assert mask_runs(ENGINE.strip_body(answer, prepared)) == mask_runs(plain)
    assert (found.problems, found.rejected) == ([], False)
    one = found.choices[0]
    assert one.ids_grade == IdsGrade.ENGINE
    assert len(ids(one)) == found.usage.completion_tokens == one.sampled_tokens
    assert count(found.prompt_ids) == found.usage.prompt_tokens
    assert len(logprobs(one)) == len(ids(one)) or one.problems == ["logprobs_incomplete"]


@pytest.mark.parametrize(
    ("more", "alternatives"),
    [({"logprobs": True}, 20), ({"logprobs": True, "top_logprobs": 2}, 2), ({"logprobs": 3}, 3), ({"n_probs": 4}, 4)],
)
def test_the_client_gets_as_many_alternatives_as_it_asked_for(server, more, alternatives):
    prepared, answer, _ = call(server, BASE | more)
    shown = json.loads(ENGINE.strip_body(answer, prepared))["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in shown} == {alternatives}


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_two_choices(server, seed):
    _, _, found = call(server, BASE | {"n": 2, "temperature": 0.8, "seed": seed})
    assert not found.rejected
    assert len(found.choices) == 2
    for one in found.choices:
        text = json.loads(bytes(one.message))["content"]
        assert ids(one) or (one.problems == ["ids_incomplete"] and not text.isascii())
    assert found.choices[0].problems == []


def begun(*texts: str, **more) -> dict:
    said = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return {"messages": [*FRANCE, {"role": "assistant", "content": said, **more}]}


STREAMS = {
    "plain": {},
    "a beginning": begun("The capital of"),
    "a beginning in parts": begun("The cap", "ital of"),
    "a beginning with white space": begun("The capital is \u00e9 \n"),
    "an empty beginning": begun(""),
    "a beginning and usage": begun("The capital of") | {"stream_options": {"include_usage": True}},
    "a beginning and logprobs": begun("The capital of") | {"logprobs": True, "top_logprobs": 2},
    "a beginning and a stop string": begun("The capital") | {"stop": ["Paris"]},
    "a report": {"verbose": True},
    "a report and ids": {"verbose": True, "return_tokens": True},
    "a report and usage": {"verbose": True, "stream_options": {"include_usage": True}},
    "a report and logprobs": {"verbose": True, "logprobs": True, "top_logprobs": 1},
    "a report of a beginning": begun("The capital of") | {"verbose": True},
}


@pytest.mark.parametrize("more", STREAMS.values(), ids=STREAMS)
def test_the_stream_that_we_make_is_the_engines_own(server, more):
    sent = json.dumps(BASE | {"stream": True, "max_tokens": 6} | more).encode()
    server.post(PATH, sent)  # a cold prompt cache may give another text
    _, plain, _ = server.post(PATH, sent)
    request = chat.decode(sent)
    prepared, answer, found = call(server, json.loads(sent))
    made = b"".join(chat.synthesise(ENGINE.strip_body(answer, prepared), request, source=answer))
    assert mask_runs(made) == mask_runs(plain)
    assert (found.problems, found.rejected, len(ids(found.choices[0]))) == ([], False, found.usage.completion_tokens)


def mask_runs(stream: bytes) -> bytes:
    """Hide also which slot served it."""
    return re.sub(rb'"id_slot":\d+', b'"id_slot":0', twins.mask(stream))


REFUSED = {
    "top_logprobs alone": {"top_logprobs": 1},
    "top_logprobs 0 alone": {"top_logprobs": 0},
    "logprobs a word": {"logprobs": "abc"},
    "tools, stream and logprobs": {"tools": TOOLS, "stream": True, "logprobs": True},
    "stream a word": {"stream": "yes"},
    "stream a number": {"stream": 1},
    "include_usage a word": {"stream": True, "stream_options": {"include_usage": "x"}},
    "verbose a word": {"verbose": "x"},
    "n_probs a word": {"n_probs": "a"},
    "n of none": {"n": 0},
    "max_tokens negative": {"max_tokens": -5},
}


@pytest.mark.parametrize("more", REFUSED.values(), ids=REFUSED)
def test_what_the_engine_refuses_it_refuses_through_us(server, more):
    status, plain, _ = server.post(PATH, json.dumps(BASE | more).encode())
    prepared, answer, found = call(server, BASE | more)
    assert status >= 400
    assert ENGINE.strip_body(answer, prepared) == plain
    assert (found.choices, found.problems[0]) == ([], f"http_{status}")


def test_a_prompt_that_does_not_fit(server):
    _, _, found = call(server, BASE | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert found.problems == ["http_400", "context_overflow"]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"n": 2}], ids=["plain", "tools", "n=2"])
def test_the_engines_own_stream_is_graded_for_what_it_lacks(server, more):
    prepared, _, found = call(server, BASE | {"stream": True} | more, UpstreamStream.ON)
    assert prepared.stream
    assert not found.rejected
    for one in found.choices:
        assert (one.token_ids, one.problems) == (b"", ["ids_incomplete"])  # the stop token has no entry
        assert one.sampled_tokens == 8


def test_the_probe_knows_it(server):
    plan = probe(None)
    request = next(plan)
    while True:
        status, answer, _ = server.post(request.path, request.body)
        try:
            request = plan.send(ProbeAnswer(status, answer))
        except StopIteration as stop:
            found = stop.value
            break
    assert (found.engine, found.logprobs_mode) == ("llamacpp", "raw")
    assert n_vocab(server.get("/v1/models")) == 49152
