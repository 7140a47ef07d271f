"""An exchange read once: what was said, and beside it the raw token arrays, choice by choice.

Not a judge: values stay as the engine wrote them, right or wrong; `evidence` decides. The invariant: everything the
engine sent for a choice is there in order, also from events that carry ids and no text.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.evidence import is_context_overflow
from orchard_proxy.wire import jsonbytes, sse
from orchard_proxy.wire.chat import Answer, StreamFold, read_answer


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


def read(exchange: Exchange) -> Reading:
    """Read an exchange. Never raises; an answer that is none gives no choices and a named problem."""
    status = exchange.status
    if status is None:
        return Reading(problems=["no_answer"])
    if not 200 <= status < 300:
        overflow = ["context_overflow"] if is_context_overflow(status, exchange.answer) else []
        return Reading(problems=[f"http_{status}", *overflow])
    if _is_stream(exchange):
        return _read_stream(exchange.answer)
    return _read_body(exchange.answer)


def _is_stream(exchange: Exchange) -> bool:
    return "event-stream" in exchange.content_type.lower() or exchange.answer.lstrip().startswith(b"data:")


def _read_body(answer: bytes) -> Reading:
    if not answer.strip():
        return Reading(problems=["empty_answer"])
    try:
        body = jsonbytes.loads(answer)
    except ValueError:
        return Reading(problems=["not_json"])
    if not isinstance(body, dict):
        return Reading(problems=["not_an_answer"])
    said = read_answer(body)
    reading = Reading(answer=said, counts_all=True, tokens={}, prompts=[], problems=[])
    _take(reading, body)
    verbose = body.get("__verbose")
    reading.verbose = verbose if isinstance(verbose, dict) else {}
    if said.error is not None:
        reading.problems.append("error_in_body")
    elif not said.choices:
        reading.problems.append("no_choices")
    return reading


def _read_stream(answer: bytes) -> Reading:
    fold = StreamFold()
    reading = Reading(tokens={}, prompts=[], problems=[])
    done = False
    for event in _events(answer):
        if sse.is_done(event):
            done = True
        elif event.data is not None:
            _add_chunk(reading, fold, event.data)
    reading.answer = fold.answer()
    if reading.answer.error is not None:
        reading.problems.append("error_in_stream")
    elif not reading.answer.choices:
        reading.problems.append("no_choices")
    if not done:
        reading.problems.append("terminated_without_done")
    return reading


def _events(answer: bytes) -> Iterator[sse.SseEvent]:
    parser = sse.SseParser()
    yield from parser.feed(answer)
    yield from parser.close()


def _add_chunk(reading: Reading, fold: StreamFold, data: bytes) -> None:
    try:
        chunk = jsonbytes.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        if data.strip() and "event_not_json" not in reading.problems:
            reading.problems.append("event_not_json")
        return
    fold.add(chunk)
    _take(reading, chunk)
    if isinstance(chunk.get("usage"), dict):
        reading.counts_all = not chunk.get("choices")


def _take(reading: Reading, source: dict[str, Any]) -> None:
    """Take the token arrays of a body or of one chunk."""
    if source.get("prompt_token_ids") is not None:
        reading.prompts.append(source["prompt_token_ids"])
    choices = source.get("choices")
    found = [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
    for position, choice in enumerate(found):
        index = choice.get("index")
        tokens = reading.tokens.setdefault(index if type(index) is int else position, Tokens())
        tokens.add(choice)
        timings = source.get("timings")
        if len(found) == 1 and isinstance(timings, dict) and type(timings.get("predicted_n")) is int:
            tokens.sampled = timings["predicted_n"]
