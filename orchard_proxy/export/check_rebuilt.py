"""One rule over everything: the samples of a rollout are what `assemble.samples` makes of its calls, in every column.

The other rules are written from the contract and ask nothing of the code that made the samples; this one asks that very
code, and so sees any column that was changed afterwards. Memory is the calls of one rollout where they stand together,
as the writer leaves them, and a few bytes for each sample; rows in another order cost memory, not the verdict.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from math import isnan
from typing import Any

import msgspec
import numpy as np

from orchard_proxy.assemble import masks, samples
from orchard_proxy.errors import BrokenPromptError
from orchard_proxy.export import rows
from orchard_proxy.export.check_rows import Rollouts
from orchard_proxy.export.report import Findings, Place, Row, Rule
from orchard_proxy.schema.columns import SAMPLES, Column, Kind
from orchard_proxy.schema.records import Call

_NOT_OURS = {"advantages"}
"""Filled by a trainer."""
_SHOWN = {Kind.STR, Kind.INT32, Kind.INT64, Kind.FLOAT64}
_UNREADABLE = '{"_invalid"'
"""What stands where a client sent no JSON; what a sample says then cannot be told from the calls."""

_Marks = dict[str, Any]


class Rebuilt:
    """Builds the samples of each rollout again, and compares."""

    def __init__(self, rollouts: Rollouts, calls_of: Iterable[str], findings: Findings) -> None:
        self._rollouts = rollouts
        self._findings = findings
        self._left = Counter(calls_of)
        self._calls: dict[str, list[Row]] = {}
        self._expected: dict[str, _Marks] = {}
        self._skipped: set[str] = set()
        """Rollouts that cannot be built again: other rules say why."""

    def add_call(self, row: Row) -> None:
        """Take one call; with the last one of a rollout its samples are built."""
        rollout_id = row["rollout_id"]
        self._calls.setdefault(rollout_id, []).append(row)
        self._left[rollout_id] -= 1
        if not self._left[rollout_id]:
            self._build(rollout_id, self._calls.pop(rollout_id))

    def _build(self, rollout_id: str, call_rows: list[Row]) -> None:
        try:
            rollout = rows.rollout_of(self._rollouts.rows[rollout_id])
            calls = [rows.call_of(row) for row in call_rows]
            if not _can_be_built(calls):
                self._skipped.add(rollout_id)
                return
            built, _ = samples.build(rollout, calls)
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError, BrokenPromptError):
            self._skipped.add(rollout_id)
            return
        unsaid = any(_says_no_json(row) for row in call_rows)
        for sample in built:
            self._expected[sample.sample_id] = _marks(rows.sample_row(sample, rollout), unsaid=unsaid)

    def add_sample(self, row: Row, place: Place) -> None:
        """Compare one sample."""
        if row["rollout_id"] in self._skipped or row["rollout_id"] not in self._rollouts.rows:
            return
        expected = self._expected.pop(row["sample_id"], None)
        if expected is None:
            self._findings.add(Rule.REBUILT, place, "its rollout's calls make no such sample, or it stands here twice")
            return
        try:
            have = _marks(row, unsaid=False)
        except (TypeError, ValueError):  # nulls and odd lengths are reported by the rules for them
            return
        for name, mark in expected.items():
            if have[name] != mark:
                shown = f" but {mark!r}" if not isinstance(mark, bytes) else ""
                mine = f"{name} is {have[name]!r}, which" if shown else f"{name}"
                self._findings.add(Rule.REBUILT, place, f"{mine} is not what its calls make{shown}")

    def check_missing(self, file: str) -> None:
        """Report the samples that the calls make and that no row was."""
        for sample_id in self._expected:
            self._findings.add(
                Rule.REBUILT, Place("samples", file, sample_id), "its calls make it, but it is not there"
            )


def _can_be_built(calls: list[Call]) -> bool:
    """Say whether the parents are such that walking them ends: earlier calls of the rollout with trusted ids."""
    known: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: call.commit_seq):
        if call.parent_call_id is not None:
            parent = known.get(call.parent_call_id)
            choices = parent.choices if parent is not None else []
            chosen = [choice for choice in choices if choice.index == call.parent_choice]
            if parent is None or not chosen or call.prompt is None or not masks.has_ids(parent, chosen[0]):
                return False
        if call.call_id in known:
            return False
        known[call.call_id] = call
    return True


def _says_no_json(row: Row) -> bool:
    texts = [row["messages"], *(choice["message"] for choice in row["choices"])]
    return any(text.startswith(_UNREADABLE) for text in texts)


def _marks(row: Row, *, unsaid: bool) -> _Marks:
    """Return for each column its value, or a digest of it where it may be long."""
    return {
        column.name: _mark(column, row[column.name])
        for column in SAMPLES
        if column.name not in _NOT_OURS and not (unsaid and column.name == "messages")
    }


def _mark(column: Column, value: Any) -> Any:
    if isinstance(value, float) and isnan(value):
        return "nan"
    if column.kind in _SHOWN:
        return None if value is None else str(value) if isinstance(value, str) else value
    if column.kind is Kind.LOGPROBS:
        numbers = np.frombuffer(value, np.float32)
        value = np.where(np.isnan(numbers), np.float32("nan"), numbers).tobytes()
    return hashlib.blake2b(msgspec.msgpack.encode(value, order="deterministic"), digest_size=8).digest()
