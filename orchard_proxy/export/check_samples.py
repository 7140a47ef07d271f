"""Rules over `samples`: the arrays, the turns, and that both say what the calls say."""

from collections.abc import Iterator
from math import isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchard_proxy.export.check_calls import Calls, has_ids
from orchard_proxy.export.check_rows import Rollouts, check_row, check_spans, n_tokens
from orchard_proxy.export.check_totals import Totals
from orchard_proxy.export.prompts import PromptError
from orchard_proxy.export.report import Findings, Place, Row, Rule
from orchard_proxy.export.showing import shown_reason
from orchard_proxy.schema.enums import BranchReason, IdsGrade, LogprobsGrade

LOGPROB_TOLERANCE = 1e-6
"""How far above 0 a log-probability may lie: float32 rounding of a sure token."""

_Finding = tuple[Rule, str]


class _Arrays(NamedTuple):
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32]


class Samples:
    """Checks the rows of `samples` one by one."""

    def __init__(self, rollouts: Rollouts, calls: Calls, totals: Totals, findings: Findings) -> None:
        self._rollouts = rollouts
        self._calls = calls
        self._totals = totals
        self._findings = findings

    def add(self, row: Row, place: Place) -> None:
        """Check one sample."""
        if not check_row(row, place, self._findings):
            return
        check_spans(row["policy_versions"], n_tokens(row["token_ids"]), place, self._findings)
        for rule, detail in self._breaches(row):
            self._findings.add(rule, place, detail)
        self._totals.add(row, place)

    def _breaches(self, row: Row) -> Iterator[_Finding]:
        yield from self._check_rollout(row)
        lengths = [len(row["token_ids"]) // 4, len(row["loss_mask"]), len(row["logprobs"]) // 4]
        lengths += [] if row["advantages"] is None else [len(row["advantages"]) // 4]
        if len(set(lengths)) > 1:
            yield Rule.LENGTHS, f"ids, mask, logprobs (and advantages) have lengths {lengths}"
            return
        arrays = _Arrays(
            np.frombuffer(row["token_ids"], np.int32),
            np.frombuffer(row["loss_mask"], np.int8),
            np.frombuffer(row["logprobs"], np.float32),
        )
        yield from _check_arrays(arrays)
        misplaced = list(_check_spans(row["turns"], len(arrays.ids)))
        yield from misplaced
        missing = list(self._check_calls(row))
        yield from missing
        if not misplaced and not missing:
            yield from self._check_turns(row, arrays)

    def _check_rollout(self, row: Row) -> Iterator[_Finding]:
        rollout = self._rollouts.rows.get(row["rollout_id"])
        if rollout is None:
            yield Rule.FOREIGN_KEY, f"there is no rollout {row['rollout_id']}"
            return
        for name in ("group_id", "task_id", "reward", "failure"):
            if not _equal(row[name], rollout[name]):
                yield Rule.ROLLOUT_COPY, f"{name} is {row[name]}, its rollout's is {rollout[name]}"

    def _check_calls(self, row: Row) -> Iterator[_Finding]:
        if not row["turns"]:
            yield Rule.TURN_PATH, "it has no turns"
        for turn in row["turns"]:
            call = self._calls.rows.get(turn["call_id"])
            if call is None or call["rollout_id"] != row["rollout_id"]:
                yield Rule.FOREIGN_KEY, f"there is no call {turn['call_id']} in its rollout"
            elif self._calls.choice(turn["call_id"], turn["choice"]) is None:
                yield Rule.FOREIGN_KEY, f"call {turn['call_id']} has no choice {turn['choice']}"

    def _check_turns(self, row: Row, arrays: _Arrays) -> Iterator[_Finding]:
        targets = np.zeros(len(arrays.mask), bool)
        for turn in row["turns"]:
            choice = self._calls.choice(turn["call_id"], turn["choice"])
            assert choice is not None
            yield from self._check_reason(row, turn, choice)
            yield from _check_turn(turn, choice, arrays, targets)
        wrong = np.flatnonzero((arrays.mask == 1) != targets)
        if len(wrong):
            yield Rule.MASK_TURNS, f"mask is {arrays.mask[wrong[0]]} at token {wrong[0]}, its turns say otherwise"
        yield from self._check_path(row)

    def _check_reason(self, row: Row, turn: Row, choice: Row) -> Iterator[_Finding]:
        rollout = self._rollouts.rows.get(row["rollout_id"], {"failure": None})
        shown = shown_reason(rollout, self._calls.rows[turn["call_id"]], choice)
        where = f"choice {turn['choice']} of call {turn['call_id']}"
        if turn["trained"] and (turn["masked_reason"] is not None or shown is not None):
            yield Rule.TRAINED_ALLOWED, f"{where} is trained, though it is {turn['masked_reason'] or shown}"
        elif not turn["trained"] and turn["masked_reason"] != shown:
            yield Rule.MASKED_REASON, f"{where} is masked as {turn['masked_reason']}, its call shows {shown}"
        if turn["trained"] and (_better(row, choice, "ids_grade") or _better(row, choice, "logprobs_grade")):
            yield Rule.GRADES, f"trains {where}, whose grades are {choice['ids_grade']}, {choice['logprobs_grade']}"

    def _check_path(self, row: Row) -> Iterator[_Finding]:
        leaf = row["turns"][-1]
        choice = self._calls.choice(leaf["call_id"], leaf["choice"])
        assert choice is not None
        joined = has_ids(self._calls.rows[leaf["call_id"]], choice)
        if joined == (row["branch_reason"] == BranchReason.NO_IDS):
            yield Rule.BRANCH_REASON, f"branch_reason is {row['branch_reason']}, its leaf has ids: {joined}"
        path = self._path(leaf) if joined else [(leaf["call_id"], leaf["choice"])]
        if [(turn["call_id"], turn["choice"]) for turn in row["turns"]] != path:
            yield Rule.TURN_PATH, f"its turns are not the path of {len(path)} calls to {leaf['call_id']}"
        try:
            whole = (self._calls.prompts.prompt_ids(leaf["call_id"]) or b"") + choice["token_ids"] if joined else b""
        except PromptError:  # reported for the call
            return
        if row["token_ids"] != whole:
            yield Rule.PATH_IDS, f"its tokens are not prompt and choice of its leaf {leaf['call_id']}"

    def _path(self, leaf: Row) -> list[tuple[str, int]]:
        steps: dict[tuple[str, int], None] = {(leaf["call_id"], leaf["choice"]): None}
        call = self._calls.rows.get(leaf["call_id"])
        while call is not None and call["parent_call_id"] is not None:
            step = (call["parent_call_id"], call["parent_choice"])
            if step in steps:  # parents in a circle are reported for the call
                break
            steps[step] = None
            call = self._calls.rows.get(step[0])
        return list(steps)[::-1]


def _check_arrays(arrays: _Arrays) -> Iterator[_Finding]:
    if (arrays.ids < 0).any():
        yield Rule.SAMPLE_IDS, f"token {np.flatnonzero(arrays.ids < 0)[0]} is negative"
    if not np.isin(arrays.mask, (0, 1)).all():
        yield Rule.MASK_VALUES, f"the mask has values {np.unique(arrays.mask).tolist()}"
    target, finite = arrays.mask == 1, np.isfinite(arrays.logprobs)
    wrong = np.flatnonzero(target & (~finite | (arrays.logprobs > LOGPROB_TOLERANCE)))
    if len(wrong):
        yield Rule.LOGPROB_TARGET, f"logprob is {arrays.logprobs[wrong[0]]} at target {wrong[0]}"
    wrong = np.flatnonzero(~target & ~np.isnan(arrays.logprobs))
    if len(wrong):
        yield Rule.LOGPROB_MASKED, f"logprob is {arrays.logprobs[wrong[0]]} at masked token {wrong[0]}"


def _check_spans(turns: list[Row], length: int) -> Iterator[_Finding]:
    last = 0
    for turn in turns:
        start, end = turn["start"], turn["end"]
        if not 0 <= start <= end <= length:
            yield Rule.TURN_RANGE, f"turn [{start}, {end}) does not lie within {length} tokens"
        elif start < last:
            yield Rule.TURN_ORDER, f"turn [{start}, {end}) begins before the end {last} of the one before"
        last = max(last, end)


def _check_turn(turn: Row, choice: Row, arrays: _Arrays, targets: npt.NDArray[np.bool_]) -> Iterator[_Finding]:
    span = slice(turn["start"], turn["end"])
    if turn["end"] > turn["start"] and arrays.ids[span].tobytes() != choice["token_ids"]:
        yield Rule.TURN_IDS, f"tokens [{span.start}, {span.stop}) are not those of call {turn['call_id']}"
    if not turn["trained"]:
        return
    logprobs = np.frombuffer(choice["logprobs"], np.float32)
    if len(logprobs) != turn["end"] - turn["start"]:
        yield Rule.TRAINED_ALLOWED, f"call {turn['call_id']} has {len(logprobs)} logprobs for the turn"
        return
    targets[span] = np.isfinite(logprobs)
    trained = arrays.mask[span] == 1
    if arrays.logprobs[span][trained].tobytes() != logprobs[trained].tobytes():
        yield Rule.LOGPROB_COPY, f"logprobs [{span.start}, {span.stop}) are not those of call {turn['call_id']}"


def _better(row: Row, choice: Row, name: str) -> bool:
    order: tuple[str, ...] = (
        (IdsGrade.NONE, IdsGrade.PINNED, IdsGrade.ENGINE)
        if name == "ids_grade"
        else (LogprobsGrade.NONE, LogprobsGrade.RAW, LogprobsGrade.PROCESSED)
    )
    known = row[name] in order and choice[name] in order
    return known and order.index(row[name]) > order.index(choice[name])


def _equal(left: object, right: object) -> bool:
    both_nan = isinstance(left, float) and isinstance(right, float) and isnan(left) and isnan(right)
    return both_nan or left == right
