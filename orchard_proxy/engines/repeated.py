"""Members written twice in one object: readers differ in which of the two they take, so such evidence says nothing.

Cheap by counting: as often as a key is spelt in the text, so often the decoded answer must have it. Only where that
does not come out is the text decoded once more, by a reader that sees every member.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

_KEYS = (
    *("choices", "usage", "index", "finish_reason", "token_ids", "prompt_token_ids", "logprobs", "content"),
    *("prompt_tokens", "completion_tokens", "__verbose", "tokens"),
)
_SPELT = tuple((key, f'"{key}"'.encode()) for key in _KEYS)
_WATCHED = frozenset((*_KEYS, "logprob", "token", "id", "prompt"))
_LETTER_ESCAPED = re.compile(rb"\\u00[4-7]")
"""How a key could be spelt otherwise."""


class _RepeatedError(Exception):
    """A watched member is there twice."""


def has_repeats(data: bytes, source: dict[str, Any]) -> bool:
    """Say whether an object of an answer (or chunk) has a member twice that evidence is read from."""
    return _may_repeat(data, source) and is_repeated(data)


def is_repeated(data: bytes) -> bool:
    """Say the same of any JSON, by reading every member."""
    try:
        json.loads(data.decode("utf-8-sig", "replace"), object_pairs_hook=_look)
    except _RepeatedError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _may_repeat(data: bytes, source: dict[str, Any]) -> bool:
    if _LETTER_ESCAPED.search(data) or data.count(b'"logprob"') > data.count(b'"token"'):
        return True
    objects = list(_objects(source))
    return any(data.count(spelt) > sum(key in found for found in objects) for key, spelt in _SPELT)


def _objects(source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of an answer that have such keys."""
    for item in (source, source.get("usage"), source.get("__verbose"), *_items(source.get("choices"))):
        if isinstance(item, dict):
            yield item
            yield from _inner(item)


def _inner(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("message", "delta", "logprobs"):
        found = choice.get(key)
        if isinstance(found, dict):
            yield found
            yield from (call for call in _items(found.get("tool_calls")) if isinstance(call, dict))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _look(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen and key in _WATCHED:
            raise _RepeatedError
        seen.add(key)
