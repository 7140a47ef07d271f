"""Records as rows, and rows as records.

The only place that knows how a struct of `schema.records` lies in the columns of `schema.columns`: names that
differ, members that are flattened, and the few columns that are copied from the rollout. Reading is the inverse of
writing, except for JSON that had to be repaired (see `jsontext`).
"""

from functools import cache
from typing import Any, TypeVar

import msgspec

from orchard_proxy.export.jsontext import json_text
from orchard_proxy.schema.columns import CALLS, CHOICE_FIELDS, LIMITS, ROLLOUTS, SAMPLES, TURN_FIELDS, Column, Kind
from orchard_proxy.schema.packed import count
from orchard_proxy.schema.records import Call, Choice, PromptRef, Rollout, Sample, Usage

_Record = TypeVar("_Record", bound=msgspec.Struct)
_REWARD_FIELDS = next(column.fields for column in ROLLOUTS if column.name == "rewards")


def rollout_row(rollout: Rollout, calls: list[Call]) -> dict[str, Any]:
    """Return the row of a rollout; `calls` are counted into it."""
    special = {
        "rewards": [_row(_REWARD_FIELDS, entry, {"set_at": entry.set_us}) for entry in rollout.rewards],
        "failure": _members(rollout.failure),
        "calls": len(calls),
        "sampled_tokens": sum(_sampled(choice) for call in calls for choice in call.choices),
        "started_at": rollout.started_us,
        "finished_at": rollout.finished_us,
    }
    return _row(ROLLOUTS, rollout, special)


def call_row(call: Call) -> dict[str, Any]:
    """Return the row of a call."""
    ref = call.prompt or PromptRef()
    special = {
        "failure": _members(call.failure),
        "begun_at": call.begun_us,
        "ended_at": call.ended_us,
        "prompt_known": call.prompt is not None,
        "prompt_base_call_id": ref.base_call_id,
        "prompt_base_choice": ref.base_choice,
        "prompt_shared": ref.shared_tokens,
        "prompt_new_ids": ref.new_ids,
        "choices": [_choice_row(choice) for choice in call.choices],
        "usage_prompt_tokens": call.usage.prompt_tokens,
        "usage_completion_tokens": call.usage.completion_tokens,
    }
    return _row(CALLS, call, special)


def sample_row(sample: Sample, rollout: Rollout) -> dict[str, Any]:
    """Return the row of a sample; task and failure are its rollout's."""
    special = {
        "task_id": rollout.task_id,
        "failure": _members(rollout.failure),
        "advantages": None,
        "turns": [_row(TURN_FIELDS, turn, {}) for turn in sample.turns],
        "policy_versions": [_members(span) for span in sample.versions],
    }
    return _row(SAMPLES, sample, special)


def rollout_of(row: dict[str, Any]) -> Rollout:
    """Return the rollout of a row."""
    rewards = [entry | {"set_us": entry["set_at"]} for entry in row["rewards"]]
    return _struct(row, Rollout, rewards=rewards, started_us=row["started_at"], finished_us=row["finished_at"])


def call_of(row: dict[str, Any]) -> Call:
    """Return the call of a row."""
    ref = PromptRef(
        base_call_id=row["prompt_base_call_id"],
        base_choice=row["prompt_base_choice"],
        shared_tokens=row["prompt_shared"],
        new_ids=row["prompt_new_ids"],
    )
    return _struct(
        row,
        Call,
        begun_us=row["begun_at"],
        ended_us=row["ended_at"],
        prompt=ref if row["prompt_known"] else None,
        usage=Usage(prompt_tokens=row["usage_prompt_tokens"], completion_tokens=row["usage_completion_tokens"]),
        choices=[_struct(choice, Choice) for choice in row["choices"]],
    )


def sample_of(row: dict[str, Any]) -> Sample:
    """Return the sample of a row."""
    return _struct(row, Sample, versions=row["policy_versions"])


def _choice_row(choice: Choice) -> dict[str, Any]:
    return _row(CHOICE_FIELDS, choice, {"versions": [_members(span) for span in choice.versions]})


def _sampled(choice: Choice) -> int:
    # An engine that does not count still sampled every id that it returned.
    return max(choice.sampled_tokens, count(choice.token_ids))


def _members(record: msgspec.Struct | None) -> Any:
    return None if record is None else msgspec.structs.asdict(record)


def _row(columns: tuple[Column, ...], record: msgspec.Struct, special: dict[str, Any]) -> dict[str, Any]:
    return {
        column.name: _value(column, special[column.name] if column.name in special else getattr(record, column.name))
        for column in columns
    }


def _value(column: Column, value: Any) -> Any:
    if column.kind is Kind.JSON:
        return json_text(value)
    if column.kind in LIMITS and value is not None:
        return column.fit(value)  # the deriver did this too and named it; one odd number must not stop an export
    return value


def _struct(row: dict[str, Any], kind: type[_Record], **special: Any) -> _Record:
    raw = _raw_names(kind)
    names = [field.name for field in msgspec.structs.fields(kind) if field.name in row]
    values = {name: msgspec.Raw(row[name].encode()) if name in raw else row[name] for name in names}
    return msgspec.convert(values | special, kind)


@cache
def _raw_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type is msgspec.Raw)
