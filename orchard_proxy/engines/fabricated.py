"""Ids that no model sampled: placeholders such as `[0]` beside an answer that says nothing.

Not a judge of quality: a model that stops at once did sample its stop token, and that is evidence like any other. The
invariant: only ids that the rest of the answer contradicts, or that nothing in it backs, are called fabricated.
"""

from collections.abc import Sequence
from typing import Any

from orchard_proxy.engines.evidence import entry_member
from orchard_proxy.schema.records import Usage
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat import AnswerChoice, decode

_SAID = ("content", "reasoning_content", "tool_calls", "function_call", "refusal")
_HIDDEN_TEXT = ("<", "[", "token_id:")
"""Tokens that look like this may be special ones, which engines leave out of the text."""


def is_fabricated(
    said: AnswerChoice, ids: Sequence[Any], entries: Sequence[Any] | None, usage: Usage, request: bytes
) -> bool:
    """Say whether ids stand beside an empty message that they cannot come from."""
    if usage.completion_tokens == 0:
        return True
    if not _is_empty(said):
        return False
    if not entries:
        return usage.completion_tokens is None or set(ids) == {0}
    values = entry_member(entries, "logprob")
    if set(ids) == {0} and all(value in (0, None) for value in values):
        return True
    return _should_have_text(said, entries) and not _may_hide_text(request)


def _is_empty(said: AnswerChoice) -> bool:
    message = jsonbytes.loads(bytes(said.message))
    return not any(message.get(key) for key in _SAID)


def _should_have_text(said: AnswerChoice, entries: Sequence[Any]) -> bool:
    """Say whether some token besides a last stop token is plain text, and no stop string cut it."""
    if said.stop_reason is not None:
        return False
    tokens = entry_member(entries, "token")
    tokens = tokens if said.finish_reason == "length" else tokens[:-1]
    return any(isinstance(token, str) and _is_plain(token) for token in tokens)


def _is_plain(token: str) -> bool:
    text = token.strip()
    return bool(text) and "\ufffd" not in text and not text.startswith(_HIDDEN_TEXT)


def _may_hide_text(request: bytes) -> bool:
    """Say whether the request lets an engine keep sampled text out of the message."""
    asked = decode(request)
    return asked.has_tools or asked.has("stop") or asked.value("include_reasoning") is False
