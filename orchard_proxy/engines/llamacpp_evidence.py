"""What llama.cpp's answers prove.

Ids come from `__verbose.tokens`, which holds all of one choice, or from the logprobs entries, which may lack some: a
token in the middle of a character or of a stop string has no entry. The invariant: entries count as the ids of a choice
only where the engine's count or the shape of the entries shows that none is missing; else the choice has no ids.
"""

from collections.abc import Sequence
from typing import Any

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.evidence import entry_ids, entry_member, is_subsequence
from orchard_proxy.engines.reading import Reading, Tokens, read
from orchard_proxy.engines.repeated import is_repeated
from orchard_proxy.engines.verdict import Claim, Prompt, conclude, read_prompt
from orchard_proxy.schema.frames import EvidenceFrame
from orchard_proxy.schema.records import CallEvidence
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat import AnswerChoice


def read_evidence(exchange: Exchange) -> CallEvidence:
    """Read an exchange with a llama.cpp server."""
    reading = read(exchange)
    claims = [_claim(said, reading) for said in reading.answer.choices]
    return conclude(exchange, reading, claims, _prompt(exchange, reading), usage_is_sum=False)


def _claim(said: AnswerChoice, reading: Reading) -> Claim:
    tokens = reading.tokens.get(said.index, Tokens())
    said = _with_stop(said, reading)
    if tokens.malformed:
        return Claim(said=said, problems=["malformed_token_arrays"], contradicts=True)
    ids = reading.verbose.get("tokens")
    if ids and reading.verbose.get("index", 0) == said.index:
        return _from_report(said, ids, tokens.entries, _count(reading, tokens))
    return _from_entries(said, tokens, reading)


def _from_report(said: AnswerChoice, ids: Any, entries: list[Any] | None, counted: int | None) -> Claim:
    """Take the ids of the report; the entries only where they are one for each id."""
    if not isinstance(ids, list):
        return Claim(said=said, problems=["malformed_token_arrays"], contradicts=True)
    miscounted = counted is not None and counted != len(ids)
    problems = ["ids_usage_mismatch"] if miscounted else []
    entries = entries or []
    if len(entries) < len(ids):
        lost = is_subsequence(entry_ids(entries), ids)
        problems.append("logprobs_incomplete" if lost else "ids_token_id_mismatch")
        return Claim(said=said, ids=ids, problems=problems, contradicts=miscounted or not lost)
    return Claim(said=said, ids=ids, entries=entries, problems=problems, contradicts=miscounted)


def _from_entries(said: AnswerChoice, tokens: Tokens, reading: Reading) -> Claim:
    """Take the ids of the entries where none is missing."""
    entries = tokens.entries or []
    counted = _count(reading, tokens)
    if counted is None:
        whole = _shows_all(said, entries, reading.verbose.get("generation_settings"))
    elif counted < len(entries):
        return Claim(said=said, sampled=counted, problems=["ids_usage_mismatch"], contradicts=True)
    else:
        whole = counted == len(entries) and counted > 0
    if whole:
        return Claim(said=said, ids=entry_ids(entries), entries=entries)
    return Claim(said=said, sampled=len(entries) if counted is None else counted, problems=["ids_incomplete"])


def _count(reading: Reading, tokens: Tokens) -> int | None:
    """Return how many tokens the engine says that it sampled for this choice, where it says so."""
    alone = len(reading.answer.choices) == 1
    reported = reading.verbose.get("index", 0) if reading.verbose else None
    is_reported = type(reported) is int and tokens is reading.tokens.get(reported)
    counted = reading.answer.usage.completion_tokens if alone or is_reported else None
    return tokens.sampled if counted is None else counted


def _shows_all(said: AnswerChoice, entries: Sequence[Any], settings: Any) -> bool:
    """Say whether entries prove by themselves that none is missing.

    The engine withholds a token only in the middle of a character (its text then comes with the next entry's, so that
    entry is not ASCII) or of a stop string. So: as many entries as tokens were allowed; or no stop strings, plain ASCII
    all through, and the stop token's own empty entry last.
    """
    if not entries or not isinstance(settings, dict):
        return False
    if said.finish_reason == "length":
        return len(entries) == settings.get("n_predict")
    texts = entry_member(entries, "token")
    plain = all(isinstance(text, str) and text and text.isascii() for text in texts[:-1])
    return settings.get("stop") == [] and plain and texts[-1] == ""


def _with_stop(said: AnswerChoice, reading: Reading) -> AnswerChoice:
    """Take the stop string that matched from the report."""
    report = reading.verbose
    if said.stop_reason is not None or report.get("stop_type") != "word" or report.get("index", 0) != said.index:
        return said
    return AnswerChoice(
        index=said.index,
        message=said.message,
        finish_reason=said.finish_reason,
        stop_reason=jsonbytes.dumps(report.get("stopping_word")).decode(),
    )


def _prompt(exchange: Exchange, reading: Reading) -> Prompt:
    """Read the prompt ids from the requests beside the generation, and hold them against the answer."""
    tokens = _side_member(exchange.side, "/tokenize", "tokens")
    if any(frame.answer.count(b'"tokens"') > 1 and is_repeated(frame.answer) for frame in exchange.side):
        return Prompt(problems=["prompt_member_repeated"], contradicts=True)
    prompt = read_prompt([] if tokens is None else [tokens], exchange, reading.answer.usage)
    rendered = _side_member(exchange.side, "/apply-template", "prompt")
    reported = reading.verbose.get("prompt")
    if prompt.ids is None or not isinstance(reported, str) or reported in ("", rendered):
        return prompt
    return Prompt(ids=prompt.ids, problems=[*prompt.problems, "prompt_text_mismatch"], contradicts=True)


def _side_member(side: Sequence[EvidenceFrame], path: str, key: str) -> Any:
    for frame in reversed(side):
        if frame.path.endswith(path) and frame.status == 200 and not frame.error:
            try:
                body = jsonbytes.loads(frame.answer)
            except ValueError:
                return None
            return body.get(key) if isinstance(body, dict) else None
    return None
