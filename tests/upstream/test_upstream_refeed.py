"""Scoring given ids: against the real tiny server, and against engines made up to misbehave in one way each."""

import contextlib

import aiohttp
import pytest
from aiohttp import web

from orchard_proxy.assemble import proof
from orchard_proxy.errors import UpstreamError
from orchard_proxy.policy import tiny_server
from orchard_proxy.upstream import refeed


@contextlib.asynccontextmanager
async def engine_of(routes):
    """Serve handlers of (path → async function of the JSON body) as an engine."""
    app = web.Application()
    for path, handler in routes.items():

        async def handle(request, handler=handler):
            return web.json_response(await handler(await request.json()))

        app.router.add_post(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield refeed.Engine(session, f"http://127.0.0.1:{port}/v1/")
    finally:
        await runner.cleanup()


class Llama:
    """llama.cpp's route as far as a re-feed uses it. A token's logprob tells how the slot computed its context."""

    def __init__(self, *, ram: list[int] | None = None, deaf: bool = False, stubborn: bool = False) -> None:
        self.slot: list[int] = []
        self.ram = ram or []
        """A past prompt that a RAM cache brings back."""
        self.deaf = deaf
        """Reads its cache even when told not to."""
        self.stubborn = stubborn
        self.asked: list[dict] = []

    async def completion(self, body):
        self.asked.append(body)
        prompt, [[token, bias]] = body["prompt"], body["logit_bias"]
        assert (body["n_predict"], body["id_slot"], bias > 100) == (1, 0, True)
        held = [self.slot, self.ram] if body["cache_prompt"] else []
        reused = max((refeed._shared(past, prompt) for past in held), default=0)
        if self.deaf:
            reused = max(reused, len(prompt) - 1)
        self.slot = prompt
        entry = {"id": token + self.stubborn, "logprob": -token / 10 - len(prompt)}
        return {"completion_probabilities": [entry], "timings": {"cache_n": min(reused, len(prompt) - 1)}}


@contextlib.asynccontextmanager
async def tiny():
    async with tiny_server.running(tiny_server.TinyOptions()) as url, aiohttp.ClientSession() as session:
        yield refeed.Engine(session, url), session


async def said_by_tiny(engine, **more):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 20}
    answer = await engine.ask(
        "/v1/chat/completions", {**body, "return_token_ids": True, "logprobs": True, "top_logprobs": 0, **more}
    )
    [choice] = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return answer["prompt_token_ids"], choice["token_ids"], logprobs


async def test_tiny_scores_its_own_tokens_alike_and_a_changed_one_not():
    async with tiny() as (engine, _):
        prompt, ids, logprobs = await said_by_tiny(engine, seed=3)
        scorer = await refeed.detect(engine, "tiny", prompt)
        assert (scorer.name, scorer.bound) == ("vllm", 1e-4)
        same = proof.compare(logprobs, await scorer.score("tiny", prompt, ids))
        changed = [*ids[:4], ids[4] + 1, *ids[5:]]
        control = proof.compare(logprobs[4:], await scorer.score("tiny", prompt, changed, 4))
    assert same.tokens == len(ids)
    assert proof.holds([same], control, scorer.bound)


async def test_tiny_scores_from_a_start():
    async with tiny() as (engine, _):
        prompt, ids, _ = await said_by_tiny(engine)
        scorer = refeed.PromptLogprobs(engine)
        assert await scorer.score("tiny", prompt, ids, 7) == (await scorer.score("tiny", prompt, ids))[7:]


async def test_an_unknown_model_is_told_in_the_engines_words():
    async with tiny() as (engine, _):
        with pytest.raises(UpstreamError, match=r"other.* does not exist"):
            await refeed.PromptLogprobs(engine).score("other", [1, 2], [3])


async def test_llama_is_flushed_first_and_then_reuses_only_what_the_proof_computed():
    llama = Llama()
    async with engine_of({"/completion": llama.completion}) as engine:
        scorer = await refeed.detect(engine, "any", [1, 2, 3])
        assert scorer.name == "llamacpp"
        llama.asked.clear()
        first = await scorer.score(None, [1, 2, 3], [4, 5])
        second = await scorer.score(None, [1, 2, 9], [4])
    assert first == pytest.approx([-0.4 - 3, -0.5 - 4])
    assert second == pytest.approx([-0.4 - 3])
    assert [ask["prompt"] for ask in llama.asked] == [[3, 2, 1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 9]]
    assert [ask["cache_prompt"] for ask in llama.asked] == [False, False, True, True]


async def test_a_past_that_llama_brings_back_from_ram_is_computed_afresh():
    llama = Llama(ram=[1, 2, 9, 4, 7, 7])
    async with engine_of({"/completion": llama.completion}) as engine:
        scorer = refeed.ForcedTokens(engine)
        await scorer.score(None, [1, 2, 3], [4])
        llama.asked.clear()
        await scorer.score(None, [1, 2, 9, 4, 7, 7], [5])
    assert [ask["cache_prompt"] for ask in llama.asked] == [True, False]


@pytest.mark.parametrize(
    ("llama", "message"),
    [(Llama(deaf=True), "from its cache"), (Llama(stubborn=True), "would not sample token 4")],
    ids=["reads its cache", "samples another token"],
)
async def test_a_llama_that_proves_nothing_is_an_error(llama, message):
    async with engine_of({"/completion": llama.completion}) as engine:
        with pytest.raises(UpstreamError, match=message):
            await refeed.ForcedTokens(engine).score(None, [1, 2, 3], [4])


async def text_only(_body):
    return {"choices": [{"text": "hello"}]}


async def half(body):
    entries = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
    return {"choices": [{"prompt_logprobs": entries[:-1]}]}


async def others(body):
    return {"choices": [{"prompt_logprobs": [None, *({"99999": {"logprob": -1.0}} for _ in body["prompt"][1:])]}]}


@pytest.mark.parametrize(
    "routes",
    [{}, {"/v1/completions": text_only, "/completion": text_only}, {"/v1/completions": half}],
    ids=["no route", "text only", "too few entries"],
)
async def test_an_engine_that_scores_nothing_is_told_apart_by_what_comes_back(routes):
    async with engine_of(routes) as engine:
        with pytest.raises(UpstreamError, match="scores no given ids"):
            await refeed.detect(engine, None, [1, 2, 3])


@pytest.mark.parametrize(
    ("handler", "message"), [(half, "no prompt_logprobs"), (others, "lack the prompt's own token")]
)
async def test_prompt_logprobs_that_are_not_of_the_prompt(handler, message):
    async with engine_of({"/v1/completions": handler}) as engine:
        with pytest.raises(UpstreamError, match=message):
            await refeed.PromptLogprobs(engine).score(None, [1, 2], [3])


async def test_an_absent_engine_is_one_sentence():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(UpstreamError, match="cannot be reached"):
            await refeed.detect(refeed.Engine(session, "http://127.0.0.1:9"), None, [1])
