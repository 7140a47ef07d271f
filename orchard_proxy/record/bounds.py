"""What a record says, made to fit the columns that it will stand in.

An engine, a client or an older Orchard may have written a number that no column holds, or half a surrogate pair that
no store takes. One such value must not stop the derivation of all the others, nor an export: a number becomes null
where its column may be null and the nearest number that fits where not, a half pair becomes its escape as readable
text, and the record says `number_out_of_range`. Invariant: what comes out can be encoded, stored and exported.
"""

from enum import Enum
from typing import TypeVar

import msgspec

from orchard_proxy.schema.columns import CALLS, CHOICE_FIELDS, LIMITS, ROLLOUTS, Column, Kind
from orchard_proxy.schema.records import Call, CallEvidence, Choice, RewardEntry, Rollout

PROBLEM = "number_out_of_range"

_Record = TypeVar("_Record", bound=msgspec.Struct)
_USAGE = tuple(
    msgspec.structs.replace(column, name=column.name.removeprefix("usage_"))
    for column in CALLS
    if column.name.startswith("usage_")
)
_REWARDS = next(column.fields for column in ROLLOUTS if column.name == "rewards")


def evidence(read: CallEvidence) -> CallEvidence:
    """Return evidence that fits. One choice with a number that does not makes all of it rejected."""
    fitted = [_fit(choice, CHOICE_FIELDS) for choice in read.choices]
    usage, odd_usage = _fit(read.usage, _USAGE)
    wrong = any(odd for _, odd in fitted)
    return msgspec.structs.replace(
        read,
        choices=[_named(choice) if odd else choice for choice, odd in fitted],
        usage=usage,
        model=_text(read.model),
        problems=[*read.problems, PROBLEM] if wrong or odd_usage else read.problems,
        rejected=read.rejected or wrong,
    )


def call(whole: Call) -> Call:
    """Return a call whose own numbers and texts fit; its choices and usage come from `evidence`."""
    fitted, odd = _fit(whole, CALLS)
    return msgspec.structs.replace(fitted, problems=[*fitted.problems, PROBLEM]) if odd else fitted


def rollout(whole: Rollout) -> tuple[Rollout, list[str]]:
    """Return a rollout that fits, and the names of the numbers that did not."""
    fitted, odd = _fit(whole, ROLLOUTS)
    rewards: list[RewardEntry] = []
    for entry in fitted.rewards:
        fits, wrong = _fit(entry, _REWARDS)
        rewards.append(fits)
        odd += [f"rewards.{entry.name}.{name}" for name in wrong]
    return msgspec.structs.replace(fitted, rewards=rewards), odd


def _named(choice: Choice) -> Choice:
    return msgspec.structs.replace(choice, problems=[*choice.problems, PROBLEM])


def _fit(record: _Record, columns: tuple[Column, ...]) -> tuple[_Record, list[str]]:
    """Return the record with every value that does not fit replaced, and the names of the numbers among them."""
    changed: dict[str, object] = {}
    numbers = []
    for column in columns:
        name = f"{column.name.removesuffix('_at')}_us" if column.kind is Kind.TIME else column.name
        value = getattr(record, name, None)
        if isinstance(value, str) and not isinstance(value, Enum) and (clean := _text(value)) != value:
            changed[name] = clean
        elif column.kind in LIMITS and isinstance(value, int) and (fits := column.fit(value)) != value:
            changed[name] = fits
            numbers.append(name)
    return (msgspec.structs.replace(record, **changed) if changed else record), numbers


def _text(value: str | None) -> str | None:
    if value is None or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode()
