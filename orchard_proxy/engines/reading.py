"""An exchange read once: what was said, and beside it the raw token arrays, choice by choice.

Not a judge: values stay as the engine wrote them, right or wrong; `evidence` decides. The invariant: everything the
engine sent for a choice is there in order, also from events that carry ids and no text.
"""

import itertools
from typing import Any

import msgspec
from msgspec.structs import replace

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.evidence import is_context_overflow
from orchard_proxy.engines.repeated import has_repeats
from orchard_proxy.wire import jsonbytes, sse
from orchard_proxy.wire.chat import Answer, ChatRequest, ChoiceNumbers, StreamFold, decode, read_answer, read_usage


class Tokens(msgspec.Struct, kw_only=True):
    """Raw token arrays of one choice. Grows while a stream is read."""

    ids: list[Any] | None = None
    """`token_ids`; None when never given."""
    entries: list[Any] | None = None
    """`logprobs.content`; None when never given."""
    sampled: int | None = None
    """Tokens sampled as llama.cpp's timings count them for this choice."""
    malformed: bool = False
    """A token array was there and was no array."""

    def add(self, choice: dict[str, Any]) -> None:
        """Take what one answer choice or stream choice carries."""
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
        self.ids = self._joined(self.ids, choice.get("token_ids"))
        self.entries = self._joined(self.entries, content)

    def _joined(self, have: list[Any] | None, more: Any) -> list[Any] | None:
        if more is None:
            return have
        if not isinstance(more, list):
            self.malformed = True
            return have
        if have is None:
            return more
        have.extend(more)
        return have


class Reading(msgspec.Struct, kw_only=True):
    """What an exchange says."""

    answer: Answer = Answer()
    tokens: dict[int, Tokens] = {}
    prompts: list[Any] = []
    """Every `prompt_token_ids` seen that is not null."""
    counts_all: bool = False
    """The usage is of the whole answer, not a running count inside a stream."""
    verbose: dict[str, Any] = {}
    """llama.cpp's report of a whole answer."""
    problems: list[str] = []
    contradictions: list[str] = []
    """Problems that leave nothing to believe: the answer contradicts itself, or the request."""


def read(exchange: Exchange) -> Reading:
    """Read an exchange. Never raises; an answer that is none gives no choices and a named problem."""
    status = exchange.status
    if status is None:
        return Reading(problems=["no_answer"])
    if not 200 <= status < 300:
        overflow = ["context_overflow"] if is_context_overflow(status, exchange.answer) else []
        return Reading(problems=[f"http_{status}", *overflow])
    numbers = ChoiceNumbers(asked_choices(exchange.request))
    reading = StreamReader(numbers).read(exchange.answer) if _is_stream(exchange) else _read_body(exchange, numbers)
    return _settled(reading, numbers)


def asked_choices(request: bytes) -> int | None:
    """Return how many choices a request asks for, read as leniently as engines do; None when that is not known."""
    asked = decode(request)
    return max(_whole(asked, "n"), _whole(asked, "n_cmpl")) if asked.ok else None


def _whole(asked: ChatRequest, key: str) -> int:
    """Return a whole number that a member means: vLLM takes "2" for it, and what is none is refused or ignored."""
    value = asked.value(key)
    try:
        return max(int(value), 1)
    except (TypeError, ValueError, OverflowError):
        return 1


def _settled(reading: Reading, numbers: ChoiceNumbers) -> Reading:
    """Give every choice its final number."""
    final = numbers.settled()
    reading.contradictions = [*numbers.problems, *reading.contradictions]
    if final:
        renamed = [replace(said, index=final.get(said.index, said.index)) for said in reading.answer.choices]
        reading.answer = replace(reading.answer, choices=sorted(renamed, key=lambda said: said.index))
        reading.tokens = {final.get(number, number): tokens for number, tokens in reading.tokens.items()}
    return reading


def _is_stream(exchange: Exchange) -> bool:
    return "event-stream" in exchange.content_type.lower() or exchange.answer.lstrip().startswith(b"data:")


def _read_body(exchange: Exchange, numbers: ChoiceNumbers) -> Reading:
    answer = exchange.answer
    if not answer.strip():
        return Reading(problems=["empty_answer"])
    try:
        body = jsonbytes.loads(answer)
    except ValueError:
        return Reading(problems=["not_json"])
    if not isinstance(body, dict):
        return Reading(problems=["not_an_answer"])
    contradictions = _contradictions(answer, body)
    body = numbers.numbered(body)
    said = read_answer(body)
    reading = Reading(answer=said, counts_all=True, tokens={}, prompts=[], problems=[], contradictions=contradictions)
    _take(reading, body)
    verbose = body.get("__verbose")
    reading.verbose = verbose if isinstance(verbose, dict) else {}
    if said.error is not None:
        reading.problems.append("error_in_body")
    elif not said.choices:
        reading.problems.append("no_choices")
    return reading


class StreamReader:
    """Read a stream, event by event."""

    def __init__(self, numbers: ChoiceNumbers) -> None:
        self._numbers = numbers
        self._fold = StreamFold()
        self._reading = Reading(tokens={}, prompts=[], problems=[], contradictions=[])
        self._finished: dict[int, str] = {}
        self._done = False

    def read(self, answer: bytes) -> Reading:
        """Return what the whole stream says."""
        reading = self._reading
        parser = sse.SseParser()
        for event in itertools.chain(parser.feed(answer), parser.close()):
            if sse.is_done(event):
                self._done = True
            elif event.data is not None:
                self._add(event.data)
        reading.answer = self._fold.answer()
        if reading.answer.error is not None:
            reading.problems.append("error_in_stream")
        elif not reading.answer.choices:
            reading.problems.append("no_choices")
        if not self._done:
            reading.problems.append("terminated_without_done")
        return reading

    def _add(self, data: bytes) -> None:
        try:
            chunk = jsonbytes.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            if data.strip():
                _note(self._reading.problems, "event_not_json")
            return
        for problem in _contradictions(data, chunk):
            _note(self._reading.contradictions, problem)
        chunk = self._numbers.numbered(chunk)
        for choice in _choices(chunk):
            self._watch(choice)
        self._fold.add(chunk)
        _take(self._reading, chunk)
        if isinstance(chunk.get("usage"), dict):
            self._reading.counts_all = not chunk.get("choices")

    def _watch(self, choice: dict[str, Any]) -> None:
        """Name what comes when all has been said."""
        finish, before = choice.get("finish_reason"), self._finished.get(choice["index"])
        says = _says_something(choice)
        if self._done and (says or finish):
            _note(self._reading.contradictions, "output_after_done")
        elif before is not None and says:
            _note(self._reading.contradictions, "output_after_finish")
        if isinstance(finish, str) and finish and finish != self._finished.setdefault(choice["index"], finish):
            _note(self._reading.contradictions, "finish_reason_conflict")


def _says_something(choice: dict[str, Any]) -> bool:
    """Say whether a stream choice adds to what was sampled."""
    delta, logprobs = choice.get("delta"), choice.get("logprobs")
    said = isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role")
    entries = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
    return said or bool(entries) or bool(choice.get("token_ids"))


def _contradictions(data: bytes, source: dict[str, Any]) -> list[str]:
    """Name what makes a body or a chunk unbelievable by itself."""
    found = ["member_repeated"] if has_repeats(data, source) else []
    return [*found, "usage_malformed"] if _is_malformed_usage(source.get("usage")) else found


def _is_malformed_usage(usage: Any) -> bool:
    if usage is None:
        return False
    if not isinstance(usage, dict):
        return True
    counts = read_usage(usage)
    return any(usage.get(key) is not None and getattr(counts, key) is None for key in counts.__struct_fields__)


def _note(problems: list[str], problem: str) -> None:
    if problem not in problems:
        problems.append(problem)


def _choices(source: dict[str, Any]) -> list[dict[str, Any]]:
    choices = source.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def _take(reading: Reading, source: dict[str, Any]) -> None:
    """Take the token arrays of a body or of one chunk, whose choices are numbered."""
    if source.get("prompt_token_ids") is not None:
        reading.prompts.append(source["prompt_token_ids"])
    found = _choices(source)
    for choice in found:
        tokens = reading.tokens.setdefault(choice["index"], Tokens())
        tokens.add(choice)
        timings = source.get("timings")
        if len(found) == 1 and isinstance(timings, dict):
            sampled = read_usage({"completion_tokens": timings.get("predicted_n")}).completion_tokens
            tokens.sampled = tokens.sampled if sampled is None else sampled
