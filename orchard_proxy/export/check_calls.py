"""Rules over `calls`: each row by itself, then what its references say once all calls are known.

Kept in memory of each call: its token ids and a few words; the messages are dropped once they were checked.
"""

import hashlib
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from orchard_proxy.export.check_rows import Rollouts, Seen, check_row, check_spans, n_tokens
from orchard_proxy.export.prompts import PromptError, PromptIndex
from orchard_proxy.export.report import Findings, Place, Row, Rule
from orchard_proxy.schema.enums import IdsGrade
from orchard_proxy.schema.packed import Int32s

_Node = tuple[str | None, int | None]
_NOWHERE: _Node = (None, None)
TIME_TOLERANCE_S = 1e-5
_DROPPED = ("messages", "tools", "sampling")


class Calls:
    """The rows of `calls`."""

    def __init__(self, rollouts: Rollouts, findings: Findings) -> None:
        self.rows: dict[str, Row] = {}
        self.prompts = PromptIndex()
        self._places: dict[str, Place] = {}
        self._rollouts = rollouts
        self._findings = findings
        self._seen = Seen()

    def add(self, row: Row, place: Place) -> None:
        """Check one call by itself and remember it."""
        if not check_row(row, place, self._findings):
            return
        self._seen.check("call_id", row["call_id"], self._findings, place)
        self._seen.check("commit_seq", row["commit_seq"], self._findings, place)
        if row["rollout_id"] not in self._rollouts.rows:
            self._findings.add(Rule.FOREIGN_KEY, place, f"there is no rollout {row['rollout_id']}")
        for rule, detail in _by_itself(row):
            self._findings.add(rule, place, detail)
        for choice in row["choices"]:
            check_spans(choice["versions"], n_tokens(choice["token_ids"]), place, self._findings)
        self._rollouts.count(row)
        kept = {name: value for name, value in row.items() if name not in _DROPPED}
        self.rows[row["call_id"]], self._places[row["call_id"]] = kept, place
        self.prompts.add(row)

    def choice(self, call_id: str, index: int) -> Row | None:
        """Return a choice by its index; None when there is none."""
        choices = self.rows[call_id]["choices"] if call_id in self.rows else []
        return next((choice for choice in choices if choice["index"] == index), None)

    def place(self, call_id: str) -> Place:
        """Return where a call's row lies."""
        return self._places[call_id]

    def check_references(self) -> None:
        """Check prompts and parents, one rollout after the other, each in the order of commit."""
        in_order = sorted(self.rows.values(), key=lambda row: (row["rollout_id"], row["commit_seq"]))
        for _, rows in groupby(in_order, key=lambda row: row["rollout_id"]):
            ends = _Ends()
            for row in rows:
                self._check_base(row)
                self._check_prompt(row, ends)

    def _check_base(self, row: Row) -> None:
        base = row["prompt_base_call_id"]
        detail = self._not_before(base, row) if base is not None else None
        if detail is not None:
            rule = Rule.FOREIGN_KEY if base not in self.rows else Rule.PROMPT_BASE
            self._findings.add(rule, self._places[row["call_id"]], f"its prompt builds on {detail}")

    def _check_prompt(self, row: Row, ends: "_Ends") -> None:
        place = self._places[row["call_id"]]
        try:
            prompt = self.prompts.prompt_ids(row["call_id"])
        except PromptError as error:
            rule = Rule.PROMPT_CYCLE if error.circular else Rule.PROMPT_BASE
            self._findings.add(rule, place, str(error))
            return
        if row["parent_call_id"] is not None:
            for rule, detail in self._check_parent(row, prompt):
                self._findings.add(rule, place, detail)
        if prompt is None or row["evidence_rejected"]:
            return
        longest = ends.longest(prompt)
        if longest != (row["parent_call_id"], row["parent_choice"]):
            self._findings.add(Rule.PARENT_LONGEST, place, f"the longest prefix is {longest[0]}, choice {longest[1]}")
        for choice in row["choices"]:
            if has_ids(row, choice):
                ends.add((row["call_id"], choice["index"]), prompt + choice["token_ids"])

    def _check_parent(self, row: Row, prompt: Int32s | None) -> Iterator[tuple[Rule, str]]:
        parent_id, index = row["parent_call_id"], row["parent_choice"]
        detail = self._not_before(parent_id, row)
        if detail is not None:
            yield (Rule.FOREIGN_KEY if parent_id not in self.rows else Rule.PARENT), f"its parent is {detail}"
            return
        choice = self.choice(parent_id, index) if index is not None else None
        if choice is None or not has_ids(self.rows[parent_id], choice) or prompt is None:
            yield Rule.PARENT, f"choice {index} of its parent {parent_id}, or its own prompt, has no trusted ids"
        elif not prompt.startswith(self._prefix(parent_id, choice)):
            yield Rule.PARENT_PREFIX, f"its prompt does not start with prompt and choice {index} of {parent_id}"

    def _prefix(self, call_id: str, choice: Row) -> Int32s:
        try:
            return (self.prompts.prompt_ids(call_id) or b"") + bytes(choice["token_ids"])
        except PromptError:  # reported for the parent's own row
            return b""

    def _not_before(self, other_id: str, row: Row) -> str | None:
        """Say what is wrong with a reference to an earlier call; None when nothing is."""
        other = self.rows.get(other_id)
        if other is None:
            return f"{other_id}, which is not in calls"
        if other["rollout_id"] != row["rollout_id"]:
            return f"{other_id} of another rollout, {other['rollout_id']}"
        if other["commit_seq"] >= row["commit_seq"]:
            return f"{other_id}, which was not committed before it"
        return None


class _Ends:
    """Digests of the token sequences that a later prompt may extend, by length, with the call and choice of each."""

    def __init__(self) -> None:
        self._nodes: dict[int, dict[bytes, _Node]] = {}

    def add(self, node: _Node, sequence: bytes) -> None:
        digest = hashlib.blake2b(sequence, digest_size=16).digest()
        self._nodes.setdefault(len(sequence), {}).setdefault(digest, node)

    def longest(self, prompt: bytes) -> _Node:
        """Return the longest sequence that the prompt starts with, among equals the first; (None, None) without one."""
        state, done, found = hashlib.blake2b(digest_size=16), 0, _NOWHERE
        for length in sorted(length for length in self._nodes if length <= len(prompt)):
            state.update(memoryview(prompt)[done:length])
            done = length
            found = self._nodes[length].get(state.digest(), found)
        return found


def has_ids(call: Row, choice: Row) -> bool:
    """Say whether a choice has ids that may be joined and trained."""
    trusted = call["prompt_known"] and not call["evidence_rejected"]
    return trusted and bool(choice["token_ids"]) and choice["ids_grade"] != IdsGrade.NONE


def _by_itself(row: Row) -> Iterator[tuple[Rule, str]]:
    indexes = [choice["index"] for choice in row["choices"]]
    if len(set(indexes)) != len(indexes) and not row["evidence_rejected"]:
        yield Rule.CHOICE_INDEX, f"its choices are numbered {indexes}"
    for choice in row["choices"]:
        yield from _choice(row, choice)
    if _negative(row["prompt_new_ids"]):
        yield Rule.CALL_IDS, "a prompt id is negative"
    stored = row["prompt_shared"] + n_tokens(row["prompt_new_ids"])
    if row["prompt_known"] and row["prompt_tokens"] != stored:
        yield Rule.PROMPT_LENGTH, f"states {row['prompt_tokens']} prompt tokens, its reference has {stored}"
    if not row["prompt_known"] and (stored or row["prompt_base_call_id"] is not None):
        yield Rule.PROMPT_LENGTH, "its prompt is not known, but it has a reference"
    yield from _usage(row)
    if abs((row["ended_at"] - row["begun_at"]) / 1e6 - row["duration_s"]) > TIME_TOLERANCE_S:
        yield Rule.TIMES, f"its duration is {row['duration_s']} s, from {row['begun_at']} to {row['ended_at']}"
    if (row["parent_call_id"] is None) != (row["parent_choice"] is None):
        yield Rule.PARENT, f"choice {row['parent_choice']} of parent {row['parent_call_id']} is half a reference"
    if row["prompt_shared"] < 0 or (row["prompt_shared"] and row["prompt_base_call_id"] is None):
        yield Rule.PROMPT_BASE, f"shares {row['prompt_shared']} tokens with {row['prompt_base_call_id']}"


def _choice(row: Row, choice: Row) -> Iterator[tuple[Rule, str]]:
    n_ids, n_logprobs = n_tokens(choice["token_ids"]), n_tokens(choice["logprobs"])
    if n_logprobs not in (0, n_ids) and has_ids(row, choice) and choice["logprobs_grade"] != "none":
        yield Rule.CHOICE_LENGTHS, f"choice {choice['index']} has {n_ids} ids and {n_logprobs} logprobs"
    if has_ids(row, choice) and choice["sampled_tokens"] != n_ids:
        yield Rule.CHOICE_COUNT, f"choice {choice['index']} has {n_ids} ids of {choice['sampled_tokens']} tokens"
    if _negative(choice["token_ids"]):
        yield Rule.CALL_IDS, f"an id of choice {choice['index']} is negative"


def _usage(row: Row) -> Iterator[tuple[Rule, str]]:
    if row["evidence_rejected"]:
        return
    stated = row["usage_prompt_tokens"]
    if row["prompt_known"] and stated not in (None, row["prompt_tokens"]):
        yield Rule.USAGE, f"the engine counted {stated} prompt tokens, there are {row['prompt_tokens']}"
    only = row["choices"][0] if len(row["choices"]) == 1 else None
    stated = row["usage_completion_tokens"]
    if only and has_ids(row, only) and stated not in (None, n_tokens(only["token_ids"])):
        yield Rule.USAGE, f"the engine counted {stated} sampled tokens, there are {n_tokens(only['token_ids'])}"


def _negative(ids: Int32s) -> bool:
    return bool((np.frombuffer(ids, np.int32) < 0).any())
