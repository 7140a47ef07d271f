"""Finding out what a policy server is, by what comes back and never by its status alone.

A plan without I/O: it yields requests and is sent their answers. At most two tokens are generated in all: the same
prompt at temperature 1 and 2, one token each. Log-probabilities that do not change with the temperature are raw. A
server that refuses our fields is asked once more without them.
"""

from collections.abc import Generator
from typing import Any

import msgspec

from orchard_proxy.engines.base import SideRequest
from orchard_proxy.engines.evidence import read_ids
from orchard_proxy.schema.packed import Int32s
from orchard_proxy.wire import jsonbytes

PATH = "/v1/chat/completions"
PROMPT = "Name any animal, any colour or any city."
"""Many answers are likely, so that the first token's log-probability moves with the temperature."""

_NOT_OF_FIELDS = (401, 403, 408, 429)
"""Refusals that say nothing of the fields asked for."""
_FLAT = 0.02
"""Below this a log-probability says nothing of the temperature: the model is too sure."""
_SAME = 0.02
"""Prefill with and without a cached prefix differs by less; temperature 2 moves an unsure token by much more."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """The answer to one request of the plan."""

    status: int
    body: bytes


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is. `engine` is a name in the registry, None when it does not answer as any."""

    engine: str | None
    logprobs_mode: str = "none"
    """`raw`, `processed` or `none`."""
    notes: list[str] = []
    """Sentences for a person."""


def probe(model: str | None) -> Generator[SideRequest, ProbeAnswer, ProbeResult]:
    """Yield requests, take `ProbeAnswer`s, return the `ProbeResult`."""
    first = yield _request(model, temperature=1)
    if 400 <= first.status <= 501 and first.status not in _NOT_OF_FIELDS:
        bare = yield _bare(model)
        refused = f"it refuses the fields that ask for token ids (HTTP {first.status})"
        return _text_only(bare, refused)
    engine = _engine_of(_choice(first))
    if engine is None:
        return _text_only(first, "it answers without token ids")
    second = yield _request(model, temperature=2)
    mode, note = _mode(_top(_choice(first)), _top(_choice(second)))
    return ProbeResult(engine=engine, logprobs_mode=mode, notes=[note])


def n_vocab(models: bytes) -> int | None:
    """Return the vocabulary's size where an answer to GET /v1/models tells it."""
    try:
        body = jsonbytes.loads(models)
        size = body["data"][0]["meta"]["n_vocab"]
    except (ValueError, LookupError, TypeError):
        return None
    return size if type(size) is int and size > 0 else None


def _bare(model: str | None, **more: Any) -> SideRequest:
    named = {} if model is None else {"model": model}
    body = {**named, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, **more}
    return SideRequest(path=PATH, body=jsonbytes.dumps(body))


def _request(model: str | None, *, temperature: int) -> SideRequest:
    """Ask for all that any engine may give; `verbose` and `return_tokens` are llama.cpp's."""
    ids = {"return_token_ids": True, "verbose": True, "return_tokens": True}
    return _bare(model, temperature=temperature, logprobs=True, top_logprobs=1, **ids)


def _choice(answer: ProbeAnswer) -> dict[str, Any]:
    """Return the first choice, with the server's report beside it; empty when the answer is none."""
    try:
        body = jsonbytes.loads(answer.body)
    except ValueError:
        return {}
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return {}
    return {**choices[0], "__verbose": body.get("__verbose")}


def _engine_of(choice: dict[str, Any]) -> str | None:
    if _are_ids(choice.get("token_ids")):
        return "vllm"
    report = choice.get("__verbose")
    if isinstance(report, dict) and _are_ids(report.get("tokens")):
        return "llamacpp"
    entries = _entries(choice)
    return "llamacpp" if _are_ids([entry.get("id") for entry in entries]) else None


def _are_ids(values: Any) -> bool:
    return bool(values) and isinstance(read_ids(values), Int32s)


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _top(choice: dict[str, Any]) -> float | None:
    """Return the log-probability of the likeliest first token."""
    for entry in _entries(choice)[:1]:
        alternatives = entry.get("top_logprobs")
        first = [a for a in alternatives if isinstance(a, dict)] if isinstance(alternatives, list) else []
        values = [value for value in (a.get("logprob") for a in first) if isinstance(value, int | float)]
        return max(values, default=None)
    return None


def _mode(at_one: float | None, at_two: float | None) -> tuple[str, str]:
    if at_one is None and at_two is None:
        return "none", "it gives no log-probabilities"
    if at_one is None or at_two is None:
        return "raw", "log-probabilities came at one temperature only; taken as raw"
    if abs(at_one) < _FLAT and abs(at_two) < _FLAT:
        return "raw", "the model is too sure for the temperature to show; taken as raw"
    if abs(at_one - at_two) <= _SAME:
        return "raw", "log-probabilities do not change with the temperature"
    return "processed", "log-probabilities change with the temperature"


def _text_only(answer: ProbeAnswer, why: str) -> ProbeResult:
    if not _choice(answer):
        return ProbeResult(engine=None, notes=[f"no chat completion came back (HTTP {answer.status})"])
    return ProbeResult(engine="openai", notes=[f"text only: {why}"])
