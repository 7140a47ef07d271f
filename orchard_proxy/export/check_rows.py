"""Rules that hold for a row by itself, in any table, and what is remembered of rollouts."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from orchard_proxy.export.jsontext import is_valid
from orchard_proxy.export.report import Findings, Place, Row, Rule
from orchard_proxy.schema import enums
from orchard_proxy.schema.columns import TABLES, Column, Kind
from orchard_proxy.schema.packed import ITEM_BYTES

_VOCABULARIES: dict[str, type[StrEnum]] = {
    "status": enums.RolloutStatus,
    "outcome": enums.Outcome,
    "delivery": enums.Delivery,
    "ids_grade": enums.IdsGrade,
    "logprobs_grade": enums.LogprobsGrade,
    "branch_reason": enums.BranchReason,
    "masked_reason": enums.MaskedReason,
    "blame": enums.Blame,
    "phase": enums.Phase,
}


_MEMBER = Column("", Kind.STR, "a member of a list, which is never null")


class Seen:
    """Ids that were seen, to find one that comes twice."""

    def __init__(self) -> None:
        self._values: set[tuple[str, object]] = set()

    def check(self, name: str, value: object, findings: Findings, place: Place) -> None:
        """Report a value that came before."""
        if (name, value) in self._values:
            findings.add(Rule.UNIQUE_ID, place, f"{name} {value} stands in an earlier row too")
        self._values.add((name, value))


class Rollouts:
    """The rows of `rollouts`, and what calls must add up to for each."""

    def __init__(self, findings: Findings) -> None:
        self.rows: dict[str, Row] = {}
        self._places: dict[str, Place] = {}
        self._calls: dict[str, list[int]] = {}
        self._seen = Seen()
        self._findings = findings

    def add(self, row: Row, place: Place) -> None:
        """Check one rollout and remember it."""
        if not check_row(row, place, self._findings):
            return
        self._seen.check("rollout_id", row["rollout_id"], self._findings, place)
        names = [entry["name"] for entry in row["rewards"]]
        if len(set(names)) != len(names):
            self._findings.add(Rule.UNIQUE_ID, place, f"a reward name stands twice in {names}")
        if (row["status"] == enums.RolloutStatus.RUNNING) != (row["finished_at"] is None):
            self._findings.add(Rule.FINISHED, place, f"it is {row['status']} and its end is {row['finished_at']}")
        self.rows[row["rollout_id"]] = row
        self._places[row["rollout_id"]] = place

    def count(self, call: Row) -> None:
        """Count a call to its rollout."""
        self._calls.setdefault(call["rollout_id"], []).append(sum(sampled(choice) for choice in call["choices"]))

    def check_counts(self) -> None:
        """Compare what each rollout states with what was counted."""
        for rollout_id, row in self.rows.items():
            counted = self._calls.get(rollout_id, [])
            if (row["calls"], row["sampled_tokens"]) != (len(counted), sum(counted)):
                detail = (
                    f"states {row['calls']} calls with {row['sampled_tokens']} sampled tokens, "
                    f"its rows in calls are {len(counted)} with {sum(counted)}"
                )
                self._findings.add(Rule.ROLLOUT_COUNTS, self._places[rollout_id], detail)


def sampled(choice: Row) -> int:
    """Return how many tokens a choice sampled, as far as anybody knows."""
    return max(int(choice["sampled_tokens"]), n_tokens(choice["token_ids"]))


def n_tokens(packed: bytes) -> int:
    """Return the length of a packed array."""
    return len(packed) // ITEM_BYTES


def check_row(row: Row, place: Place, findings: Findings) -> bool:
    """Check nulls, closed vocabularies and JSON columns, at any depth; False when a null makes the row unreadable."""
    nulls = 0
    for column, value in _values(TABLES[place.table], row):
        if value is None:
            if not column.nullable:
                findings.add(Rule.NULL, place, f"{column.name} is null")
                nulls += 1
            continue
        words = _VOCABULARIES.get(column.name) if column.kind is Kind.STR else None
        if words is not None and value not in set(words):
            findings.add(Rule.ENUM, place, f"{column.name} is {value!r}, which is none of {', '.join(words)}")
        elif column.kind is Kind.JSON and not is_valid(value):
            findings.add(Rule.JSON, place, f"{column.name} does not hold valid JSON: {value[:60]!r}")
    return not nulls


def check_spans(spans: list[Row], length: int, place: Place, findings: Findings) -> None:
    """Check that version spans lie within [0, length) and follow one another."""
    bounds = [bound for span in spans for bound in (span["start"], span["end"])]
    if bounds != sorted(bounds) or (bounds and (bounds[0] < 0 or bounds[-1] > length)):
        findings.add(Rule.SPANS, place, f"version spans {bounds} do not lie in order within {length} tokens")


def _values(columns: tuple[Column, ...], row: Row) -> Iterator[tuple[Column, Any]]:
    for column in columns:
        value = row[column.name]
        if column.kind is Kind.STRUCTS and value is not None:
            for member in value:
                yield from _values((_MEMBER,), {"": member}) if member is None else _values(column.fields, member)
        elif column.kind is Kind.STRUCT and value is not None:
            yield from _values(column.fields, value)
        else:
            yield column, value
