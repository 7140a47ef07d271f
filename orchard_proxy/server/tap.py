"""What a stream says as it passes, and what the client may have of it now. Pure: bytes in, bytes out.

Invariant: the event with which the last choice finishes, and everything behind it, is held back until the caller has
committed the call. So no client ever sees an end that is not on disk.
"""

import json
from typing import Any

import msgspec

from orchard_proxy.engines.base import Engine, Prepared
from orchard_proxy.schema.enums import Blame, Outcome, Phase
from orchard_proxy.schema.records import Failure
from orchard_proxy.wire import sse

_NO_ANSWER = "The policy server answered 200 with something that is not a chat completion. Check what listens there."
_ERROR_EVENT = "error_in_stream"
_NO_ERROR = (b"null", b"{}", b'""', b"false", b"[]")
_ABORTED = {"abort": Outcome.UPSTREAM_CUT, "error": Outcome.ENGINE_ERROR}


class Verdict(msgspec.Struct, frozen=True):
    """How a call ended. `refuse` is what the client gets instead, when the answer is none and nothing is sent yet."""

    outcome: Outcome
    failure: Failure | None = None
    refuse: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | None = None
    object: str | None = None

    @property
    def is_error(self) -> bool:
        """Say whether it is an error, in either of the shapes in use. An empty error member says nothing."""
        named = self.error is not None and bytes(self.error) not in _NO_ERROR
        return named or (self.object == "error" and not self.choices)


_decoder = msgspec.json.Decoder(_Answer)


def peek(data: bytes) -> _Answer | None:
    """Read what decides about the outcome. None: not a JSON object."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return _peek_leniently(data)


def _peek_leniently(data: bytes) -> _Answer | None:
    """Read NaN literals and odd types that the fast decoder refuses."""
    try:
        parsed: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    error, kind = parsed.get("error"), parsed.get("object")
    choices = parsed.get("choices")
    return _Answer(
        choices=[_lenient_choice(item) for item in choices] if isinstance(choices, list) else msgspec.UNSET,
        error=msgspec.Raw(msgspec.json.encode(str(error))) if error else None,
        object=kind if isinstance(kind, str) else None,
    )


def _lenient_choice(item: Any) -> _Choice:
    if not isinstance(item, dict):
        return _Choice()
    index, reason = item.get("index"), item.get("finish_reason")
    return _Choice(index if isinstance(index, int) else 0, reason if isinstance(reason, str) else None)


def failed(code: str, message: str, *, retryable: bool = True) -> Failure:
    """Name a fault of the policy server."""
    return Failure(code=code, blame=Blame.POLICY, phase=Phase.RUN, retryable=retryable, message=message)


def judge_finish(reasons: list[str | None]) -> Verdict:
    """Turn the finish reasons of all choices into one outcome; the worst decides."""
    for reason in reasons:
        if reason in _ABORTED:
            return Verdict(_ABORTED[reason], failed(f"finish_{reason}", f"the engine ended a choice with {reason!r}"))
    if not all(reasons):
        return Verdict(Outcome.UPSTREAM_CUT, failed("finish_missing", "a choice has no finish_reason"))
    return Verdict(Outcome.LENGTH if "length" in reasons else Outcome.COMPLETE)


def judge_body(status: int, body: bytes) -> Verdict:
    """Judge a whole answer. An error status passes to the client as it is; a 200 that is no answer is refused."""
    if 300 <= status < 400:
        refuse = "The policy server redirects. Give --upstream the address it redirects to."
        return Verdict(Outcome.ENGINE_ERROR, failed(f"http_{status}", _excerpt(body), retryable=False), refuse)
    if status != 200:
        retryable = status >= 500 or status == 429
        return Verdict(Outcome.ENGINE_ERROR, failed(f"http_{status}", _excerpt(body), retryable=retryable))
    answer = peek(body)
    if answer is not None and answer.is_error:
        return Verdict(Outcome.ENGINE_ERROR, failed("error_in_200", _excerpt(body)))
    if answer is None or not answer.choices:
        return Verdict(Outcome.ENGINE_ERROR, failed("not_an_answer", _excerpt(body)), _NO_ANSWER)
    return judge_finish([choice.finish_reason for choice in answer.choices])


def _excerpt(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")


def _is_torn(event: sse.SseEvent) -> bool:
    """Say whether an event that no blank line ended is half an event."""
    return bool(event.data) and not sse.is_done(event) and peek(event.data or b"") is None


class StreamTap:
    """Follow one engine stream."""

    def __init__(self, engine: Engine, prepared: Prepared, choices: int) -> None:
        self._engine = engine
        self._prepared = prepared
        self._expected = max(choices, 1)
        self._parser = sse.SseParser()
        self._finished: dict[int, str] = {}
        self._failure: Failure | None = None
        self._held: list[bytes] = []
        self._holding = False
        self._events = 0
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes of the engine; return those that the client may have now."""
        return self._pass(self._parser.feed(chunk))

    def close(self) -> None:
        """Take the end of the stream. A last event without its blank line counts if it is whole, else nobody has it."""
        whole = [event for event in self._parser.close() if not _is_torn(event)]
        self._held.append(self._pass(whole))

    @property
    def held(self) -> bytes:
        """What the client gets once the call is committed."""
        return b"".join(self._held)

    def verdict(self) -> Verdict:
        """Say how the stream ended, as far as it went."""
        if self._failure is not None:
            refuse = None if self._failure.code == _ERROR_EVENT else _NO_ANSWER
            return Verdict(Outcome.ENGINE_ERROR, self._failure, refuse)
        if not self.finished:
            code = "stream_incomplete" if self._events else "empty_stream"
            early = f"the engine's stream ended early: {len(self._finished)} of {self._expected} choices finished"
            return Verdict(Outcome.UPSTREAM_CUT, failed(code, early), early)
        return judge_finish(list(self._finished.values()))

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish_reason."""
        return len(self._finished) >= self._expected

    def _pass(self, events: list[sse.SseEvent]) -> bytes:
        out: list[bytes] = []
        for event in events:
            copy = self._copy(event)
            (self._held if self._holding else out).append(copy)
        return b"".join(out)

    def _copy(self, event: sse.SseEvent) -> bytes:
        if event.data is None or not event.data.strip():  # Nothing is dispatched for an event without data.
            return event.raw
        if sse.is_done(event):
            self.done = self._holding = True
            return event.raw
        self._events += 1
        self._note(event)
        stripped = self._engine.strip_event(event.data, self._prepared)
        if stripped is None:
            return b""
        return event.raw if stripped == event.data else event.replaced(stripped)

    def _note(self, event: sse.SseEvent) -> None:
        assert event.data is not None
        answer = peek(event.data)
        if answer is None:
            self._fail(failed("garbage_in_stream", _excerpt(event.data)))
            self._holding = self._holding or self._events == 1  # Not even a stream: the client may still be told so.
            return
        if answer.is_error or event.event == "error":
            self._fail(failed(_ERROR_EVENT, _excerpt(event.data)))
            self._holding = True
        for choice in answer.choices or ():
            if choice.finish_reason:  # Some servers print "" where others print null.
                self._finished.setdefault(choice.index, choice.finish_reason)
        self._holding = self._holding or self.finished

    def _fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
