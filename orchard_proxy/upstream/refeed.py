"""Score recorded ids again on the engine that sampled them: two ways to ask, told apart by what comes back.

Not a door for harness calls (`upstream.client`), and it does not go through the proxy: a proof that asks the recorder
would prove nothing. The verdict is arithmetic and lives in `assemble.proof`.

Invariant: a score comes from computing the context afresh. The engine's cache is flushed by another prompt first. What
is read from a cache afterwards is what this very proof computed (answers share long prefixes, so give them in order of
their contexts); an engine that read more than that is an error, not a proof.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from orchard_proxy.errors import UpstreamError

FLUSH_TOKENS = 16
FORCE_BIAS = 200.0
"""Added to a logit, it makes the id certain to be sampled; the log-probability that llama.cpp reports stays raw."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=900)


class Engine:
    """An engine's base URL and the connections to it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url.rstrip("/").removesuffix("/v1")

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the JSON of an answer; None for a body that is not JSON."""
        try:
            async with self._session.post(self.url + path, json=body, timeout=_TIMEOUT) as response:
                return response.status, _json(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or type(error).__name__
            message = f"The engine at {self.url} cannot be reached: {said}. Is --upstream right?"
            raise UpstreamError(message, "engine_unreachable") from error

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object of an answer with status 200, else raise UpstreamError with what the engine said."""
        status, answer = await self.post(path, body)
        if status != 200 or not isinstance(answer, dict):
            message = f"The engine refused POST {path}: HTTP {status} {str(answer)[:300]}"
            raise UpstreamError(message, "engine_refused")
        return answer


class Scorer(Protocol):
    """One way to have an engine score given ids."""

    name: str
    bound: float
    """Largest difference that its arithmetic explains, in nats."""
    hint: str
    """What to look at when the bound does not hold."""

    async def score(self, model: str | None, context: list[int], ids: list[int], start: int = 0) -> list[float]:
        """Return the log-probabilities of `ids[start:]` after `context`. Raises UpstreamError."""
        ...


class PromptLogprobs:
    """vLLM's wire shape (tiny too): all ids in one request, as a prompt with `prompt_logprobs`."""

    name = "vllm"
    bound = 1e-4
    hint = "Has the engine other weights by now, or does it compute in less than float32 (then give --bound)?"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def score(self, model: str | None, context: list[int], ids: list[int], start: int = 0) -> list[float]:
        """Score after another prompt went through, in one request."""
        await self._engine.ask("/v1/completions", _completion(model, _flush(context)))
        prompt = context + ids
        entries = _prompt_logprobs(await self._engine.ask("/v1/completions", _completion(model, prompt)))
        if entries is None or len(entries) != len(prompt):
            raise _unscored("The engine gave no prompt_logprobs for a prompt of token ids.")
        first = len(context) + start
        return [_logprob_of(entry, token) for entry, token in zip(entries[first:], prompt[first:], strict=True)]


class ForcedTokens:
    """llama.cpp's native route: one request a token, which a logit bias forces to be the recorded one."""

    name = "llamacpp"
    bound = 1e-3
    hint = (
        "Has the engine other weights by now, or does it run with n_ubatch over 16? "
        "Then llama.cpp computes a prompt by other kernels than a generated token, up to 0.5 apart."
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: list[int] = []
        """What slot 0 may hold: the last prompt of ours, computed after the flush."""

    async def score(self, model: str | None, context: list[int], ids: list[int], start: int = 0) -> list[float]:  # noqa: ARG002 (llama.cpp serves one model)
        """Score token by token on slot 0, each request building on the last."""
        if not self._held:
            await self._forced(_flush(context), 0, cached=False)
        return [await self._one(context + ids[:at], ids[at]) for at in range(start, len(ids))]

    async def _one(self, prompt: list[int], token: int) -> float:
        own = _shared(self._held, prompt)
        answer = await self._forced(prompt, token, cached=own > 0)
        if _reused(answer) > own:  # llama.cpp can bring back a slot's past from RAM: the very state to be checked
            answer = await self._forced(prompt, token, cached=False)
            own = 0
        if _reused(answer) > own:
            raise _unscored(f"llama.cpp read {_reused(answer)} tokens from its cache though it was told not to.")
        entries = answer.get("completion_probabilities")
        if not isinstance(entries, list) or len(entries) != 1 or entries[0].get("id") != token:
            raise _unscored(f"llama.cpp would not sample token {token} where it was recorded: {str(entries)[:200]}")
        return float(entries[0]["logprob"])

    async def _forced(self, prompt: list[int], token: int, *, cached: bool) -> dict[str, Any]:
        answer = await self._engine.ask("/completion", _forced(prompt, token, cached=cached))
        self._held = prompt
        return answer


async def detect(engine: Engine, model: str | None, context: list[int]) -> Scorer:
    """Find the way in which this engine scores given ids. Raises UpstreamError when there is none."""
    few = _flush(context)
    vllm_status, answer = await engine.post("/v1/completions", _completion(model, few))
    entries = _prompt_logprobs(answer)
    if entries is not None and len(entries) == len(few):
        return PromptLogprobs(engine)
    llama_status, answer = await engine.post("/completion", _forced(few, few[0], cached=False))
    if isinstance(answer, dict) and answer.get("completion_probabilities"):
        return ForcedTokens(engine)
    raise _unscored(
        f"The engine at {engine.url} scores no given ids: POST /v1/completions with prompt_logprobs gave HTTP "
        f"{vllm_status} without them, POST /completion with n_probs gave HTTP {llama_status} without probabilities. "
        "A re-feed needs vLLM, `orchard policy tiny` or llama.cpp; give the engine's own URL, not the proxy's."
    )


def _completion(model: str | None, prompt: list[int]) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}


def _forced(prompt: list[int], token: int, *, cached: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": 1,
        "logit_bias": [[token, FORCE_BIAS]],
        "n_probs": 1,
        "temperature": 1.0,
        "cache_prompt": cached,
        "id_slot": 0,
        "return_tokens": True,
    }


def _flush(context: Sequence[int]) -> list[int]:
    """Return another prompt of ids that the engine knows: the context's end, backwards."""
    return list(reversed(context[-FLUSH_TOKENS:]))


def _prompt_logprobs(answer: Any) -> list[Any] | None:
    if not isinstance(answer, dict):
        return None
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    entries = first.get("prompt_logprobs") or answer.get("prompt_logprobs")
    return entries if isinstance(entries, list) else None


def _logprob_of(entry: Any, token: int) -> float:
    try:
        return float(entry[str(token)]["logprob"])
    except (TypeError, KeyError) as error:
        raise _unscored(f"The engine's prompt_logprobs lack the prompt's own token {token}.") from error


def _unscored(message: str) -> UpstreamError:
    return UpstreamError(message, "engine_scores_nothing")


def _shared(held: list[int], prompt: list[int]) -> int:
    if prompt[: len(held)] == held:  # all but once an answer
        return len(held)
    return next((at for at, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), len(prompt))


def _reused(answer: dict[str, Any]) -> int:
    return int((answer.get("timings") or {}).get("cache_n", 0))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)  # not msgspec: engines write NaN and Infinity
    except ValueError:
        return None
