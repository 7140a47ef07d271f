"""Records as JSON for the control plane. NaN, which JSON lacks, is null. Pure."""

import json
import math
from typing import Any

import msgspec

from orchard_proxy.schema.packed import count, unpack_floats, unpack_ids
from orchard_proxy.schema.records import Call, Rollout, Sample


def rollout(record: Rollout) -> dict[str, Any]:
    """Render a rollout; times in seconds since the epoch."""
    return {
        "rollout_id": record.rollout_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "attempt": record.attempt,
        "run_id": record.run_id,
        "harness": record.harness,
        "harness_version": record.harness_version,
        "image_digest": record.image_digest,
        "model": record.model,
        "status": record.status,
        "reward": record.reward,
        "rewards": msgspec.to_builtins(record.rewards),
        "reward_version": record.reward_version,
        "failure": msgspec.to_builtins(record.failure),
        "started_s": record.started_us / 1e6,
        "finished_s": None if record.finished_us is None else record.finished_us / 1e6,
        "implicit": record.implicit,
        "metadata": _json(record.metadata),
    }


def call(record: Call) -> dict[str, Any]:
    """Render what a listing needs of a call: no token arrays."""
    return {
        "call_id": record.call_id,
        "seq": record.seq,
        "dialect": record.dialect,
        "engine": record.engine,
        "stream": record.stream,
        "model": record.model,
        "outcome": record.outcome,
        "delivery": record.delivery,
        "late": record.late,
        "failure": msgspec.to_builtins(record.failure),
        "parent_call_id": record.parent_call_id,
        "parent_choice": record.parent_choice,
        "prompt_tokens": record.prompt_tokens,
        "sampled_tokens": [choice.sampled_tokens for choice in record.choices],
        "finish_reasons": [choice.finish_reason for choice in record.choices],
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
        "edits": record.edits,
        "problems": record.problems,
        "evidence_rejected": record.evidence_rejected,
        "http_status": record.http_status,
    }


def sample(record: Sample) -> dict[str, Any]:
    """Render a sample with its arrays, all of length T."""
    return {
        "sample_id": record.sample_id,
        "rollout_id": record.rollout_id,
        "group_id": record.group_id,
        "branch": record.branch,
        "branch_reason": record.branch_reason,
        "tokens": count(record.token_ids),
        "token_ids": unpack_ids(record.token_ids),
        "loss_mask": list(record.loss_mask),
        "logprobs": [None if math.isnan(value) else value for value in unpack_floats(record.logprobs)],
        "reward": record.reward,
        "turns": msgspec.to_builtins(record.turns),
        "messages": _json(record.messages),
        "tools": _json(record.tools),
        "ids_grade": record.ids_grade,
        "logprobs_grade": record.logprobs_grade,
        "versions": msgspec.to_builtins(record.versions),
        "problems": record.problems,
    }


def _json(raw: msgspec.Raw) -> Any:
    """Read recorded JSON; what a client sent may hold NaN, or 1e999, which have no place in ours: they become text."""
    return json.loads(bytes(raw) or b"null", parse_constant=str, parse_float=_finite)


def _finite(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number
