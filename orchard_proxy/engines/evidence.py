"""Checks of token evidence that every engine shares.

Not a repair shop: a value is taken as it is or refused by name. The invariant: nothing here fills, cuts, clamps or
re-orders ids or log-probabilities, and nothing raises for anything that an engine may send.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from orchard_proxy.schema.packed import ITEM_BYTES, Float32s, Int32s, count, pack_floats, pack_ids
from orchard_proxy.schema.records import Usage
from orchard_proxy.wire import jsonbytes

SENTINEL = -9999.0
"""vLLM writes this where it has no finite log-probability; no real one is as small."""
NOISE = 1e-6
"""A log-probability of 1 may come out this much above zero in float32."""

_OVERFLOW = re.compile(
    rb"context_length_exceeded|exceed_context_size|(prompt|input) is too long|longer than the (maximum )?model length"
    rb"|(exceed|long|larg|great|maximum|limit|fit)[^\"]{0,80}context[ _](length|size|window)"
    rb"|context[ _](length|size|window)[^\"]{0,80}(exceed|limit|too (long|small))"
    rb"|max_new_tokens` must be <=|inputs` must have less than"
)
"""What vLLM, llama.cpp, SGLang, TGI and the large APIs say, in lower case."""


class Refused(msgspec.Struct, frozen=True):
    """Evidence that was looked at and not taken."""

    problem: str


def read_ids(values: Any, n_vocab: int | None = None) -> Int32s | Refused:
    """Pack token ids: whole numbers from 0 to below the vocabulary's size, or 2**24 where that is not known."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return Refused("id_not_int")
    try:
        packed = pack_ids(values)
    except OverflowError:
        return Refused("id_out_of_range")
    # A highest byte that is not 0 is a sign, or beyond any vocabulary there is: told without a loop.
    beyond = packed[ITEM_BYTES - 1 :: ITEM_BYTES].strip(b"\0")
    if beyond or (n_vocab is not None and max(values, default=0) >= n_vocab):
        return Refused("id_out_of_range")
    return packed


def read_logprobs(values: Sequence[Any]) -> Float32s | Refused:
    """Pack log-probabilities: finite numbers, not above zero, not a sentinel."""
    for value in values:
        problem = _logprob_problem(value)
        if problem:
            return Refused(problem)
    return pack_floats(values)


def entry_member(entries: Sequence[Any], key: str) -> list[Any]:
    """Return one member of each logprobs entry; None where the entry is no object or lacks it."""
    return [entry.get(key) if isinstance(entry, dict) else None for entry in entries]


def contradicts_entries(ids: Sequence[int], entries: Sequence[Any]) -> bool:
    """Say whether entries name other ids than `ids`: as `id`, or as a token spelt `token_id:N`. Equal lengths."""
    return any(named is not None and named != given for given, named in zip(ids, entry_ids(entries), strict=True))


def entry_ids(entries: Sequence[Any]) -> list[int | None]:
    """Return the id that each logprobs entry names, None where it names none."""
    return [_entry_id(entry) if isinstance(entry, dict) else None for entry in entries]


def is_subsequence(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Say whether `part` is `whole` with some elements left out."""
    rest = iter(whole)
    return all(item in rest for item in part)


def usage_problem(prompt: Int32s | None, usage: Usage) -> str | None:
    """Name the contradiction between prompt ids and the engine's own count."""
    if prompt is None or usage.prompt_tokens is None or count(prompt) == usage.prompt_tokens:
        return None
    return "prompt_usage_mismatch"


def model_problems(request: bytes, answered: str | None) -> list[str]:
    """Name another model than the one asked for; a longer name of the same (a dated snapshot) is the same."""
    raw = (jsonbytes.members(request) or {}).get("model")
    asked = None if raw is None else jsonbytes.loads(bytes(raw))
    if not isinstance(asked, str) or not answered or answered.startswith(asked):
        return []
    return ["model_mismatch"]


def is_context_overflow(status: int, answer: bytes) -> bool:
    """Say whether an error answer means: the prompt does not fit the model's context."""
    return status in (400, 413, 422) and _OVERFLOW.search(answer.lower()) is not None


def _logprob_problem(value: Any) -> str | None:
    kind = type(value)
    if kind is not float and kind is not int:
        return "logprob_null" if value is None else "logprob_not_number"
    if SENTINEL < value <= NOISE:
        return None
    if value != value:  # noqa: PLR0124 - NaN is the one number that is not itself
        return "logprob_nan"
    if value in (float("inf"), float("-inf")):
        return "logprob_plus_inf" if value > 0 else "logprob_minus_inf"
    return "logprob_positive" if value > 0 else "logprob_sentinel"


def _entry_id(entry: dict[str, Any]) -> int | None:
    named = entry.get("id")
    if type(named) is int:
        return named
    token = entry.get("token")
    if isinstance(token, str) and token.startswith("token_id:"):
        digits = token.removeprefix("token_id:")
        return int(digits) if digits.isascii() and digits.isdigit() else -1
    return None
