"""What an answer says in the end: a whole body, or a stream folded together, read to the same record.

Not evidence: token ids and log-probabilities are the engines' affair. The invariant: a stream and a whole answer that
say the same give equal `Answer`s, choice by choice.
"""

from typing import Any

import msgspec
from msgspec import Raw

from orchard_proxy.schema.records import Usage
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat_message import canonical, reasoning_of, text_of
from orchard_proxy.wire.chat_tools import ToolCallFold

MOST_TOKENS = 1 << 31
"""No engine counts as many."""


class AnswerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer."""

    index: int
    message: Raw
    """The assistant message in its canonical form, a JSON object."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """Matched stop string or id as JSON text; None when not given."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine answered, whichever way it came."""

    choices: list[AnswerChoice] = []
    """In order of index."""
    usage: Usage = Usage()
    model: str | None = None
    system_fingerprint: str | None = None
    error: Raw | None = None
    """The error object that came in place of, or in the middle of, the answer."""

    @property
    def finished(self) -> bool:
        """Say whether there are choices and each has a finish reason."""
        return bool(self.choices) and all(c.finish_reason is not None for c in self.choices)


class StreamFold:
    """Fold decoded stream chunks. Odd chunks are skipped where odd; nothing raises."""

    def __init__(self) -> None:
        self._choices: dict[int, _ChoiceFold] = {}
        self._usage = Usage()
        self._model: str | None = None
        self._fingerprint: str | None = None
        self._error: Raw | None = None

    def add(self, chunk: Any) -> None:
        """Take the next chunk, as decoded from its event's data."""
        if not isinstance(chunk, dict):
            return
        self._error = self._error or read_error(chunk)
        self._model = _string(chunk.get("model")) or self._model
        self._fingerprint = _string(chunk.get("system_fingerprint")) or self._fingerprint
        if isinstance(chunk.get("usage"), dict):
            self._usage = read_usage(chunk["usage"])
        for position, choice in _objects(chunk.get("choices")):
            index = _index(choice, position)
            if index not in self._choices:
                self._choices[index] = _ChoiceFold()
            self._choices[index].add(choice)

    @property
    def finished(self) -> bool:
        """Say whether every choice seen so far has a finish reason, and there is one."""
        return bool(self._choices) and all(c.finish_reason is not None for c in self._choices.values())

    def answer(self) -> Answer:
        """Return what has been said so far."""
        return Answer(
            choices=[self._choices[index].choice(index) for index in sorted(self._choices)],
            usage=self._usage,
            model=self._model,
            system_fingerprint=self._fingerprint,
            error=self._error,
        )


def read_answer(body: Any) -> Answer:
    """Read a whole answer, decoded. Nothing raises; what is not there is absent."""
    if not isinstance(body, dict):
        return Answer()
    choices = [
        AnswerChoice(
            index=_index(choice, position),
            message=Raw(jsonbytes.dumps(canonical(choice.get("message")))),
            finish_reason=_string(choice.get("finish_reason")) or None,
            stop_reason=_stop_reason(choice.get("stop_reason")),
        )
        for position, choice in _objects(body.get("choices"))
    ]
    return Answer(
        choices=sorted(choices, key=lambda choice: choice.index),
        usage=read_usage(body.get("usage")),
        model=_string(body.get("model")),
        system_fingerprint=_string(body.get("system_fingerprint")),
        error=read_error(body),
    )


def read_usage(raw: Any) -> Usage:
    """Return the counts that are there and are counts."""
    source: dict[str, Any] = raw if isinstance(raw, dict) else {}
    return Usage(
        prompt_tokens=_count(source.get("prompt_tokens")), completion_tokens=_count(source.get("completion_tokens"))
    )


def read_error(chunk: Any) -> Raw | None:
    """Return the error that a body or chunk is, in either of the shapes in use; None when it is none."""
    if not isinstance(chunk, dict):
        return None
    if chunk.get("error"):
        return Raw(jsonbytes.dumps(chunk["error"]))
    return Raw(jsonbytes.dumps(chunk)) if chunk.get("object") == "error" else None


class _ChoiceFold:
    """The pieces of one choice."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._stop_reason: str | None = None
        self._role: str | None = None
        self._text: dict[str, list[str]] = {"content": [], "reasoning_content": [], "refusal": []}
        self._tools = ToolCallFold()
        self._legacy: dict[str, str] = {}

    def add(self, choice: dict[str, Any]) -> None:
        self.finish_reason = _string(choice.get("finish_reason")) or self.finish_reason
        self._stop_reason = _stop_reason(choice.get("stop_reason")) or self._stop_reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        self._role = self._role or _string(delta.get("role"))
        self._append("content", text_of(delta.get("content")))
        self._append("reasoning_content", reasoning_of(delta))
        self._append("refusal", delta.get("refusal"))
        for _, fragment in _objects(delta.get("tool_calls")):
            self._tools.add(fragment)
        for _, legacy in _objects([delta.get("function_call")]):
            for key in ("name", "arguments"):
                self._legacy[key] = self._legacy.get(key, "") + (_string(legacy.get(key)) or "")

    def choice(self, index: int) -> AnswerChoice:
        message: dict[str, Any] = {key: "".join(parts) for key, parts in self._text.items()}
        message |= {"role": self._role, "tool_calls": self._tools.calls(), "function_call": self._legacy}
        return AnswerChoice(
            index=index,
            message=Raw(jsonbytes.dumps(canonical(message))),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _append(self, key: str, piece: Any) -> None:
        if isinstance(piece, str) and piece:
            self._text[key].append(piece)


def _objects(raw: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(i, item) for i, item in enumerate(raw) if isinstance(item, dict)] if isinstance(raw, list) else []


def _index(choice: dict[str, Any], position: int) -> int:
    index = choice.get("index")
    return index if type(index) is int else position


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MOST_TOKENS else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _stop_reason(value: Any) -> str | None:
    return None if value is None else jsonbytes.dumps(value).decode()
