"""From the calls of a rollout to training rows, masks and the accounting of every sampled token.

Not the forest's placement: parents are read from the calls. Invariants: a sampled token is a target in at most one
sample; `sampled = trained + sum of masked by reason`; loss_mask is 1 exactly where logprobs is not NaN.

A row is the path from a root to a leaf. A choice is a leaf until a call extends it. A call that failed (cut, engine
error, crash) makes no row and does not end its parent's, so that a retry continues the path as if the failure had not
been; its tokens are counted as masked. A call without trusted ids cannot be joined: each of its choices is a row with
empty arrays that keeps the messages.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from orchard_proxy.assemble import masks
from orchard_proxy.assemble.forest import Node
from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.schema import packed
from orchard_proxy.schema.enums import BranchReason, IdsGrade, LogprobsGrade, MaskedReason
from orchard_proxy.schema.records import Accounting, Call, Choice, Rollout, Sample, Turn, VersionSpan

_NAN = struct.pack("<f", float("nan"))
_IDS_ORDER = (IdsGrade.NONE, IdsGrade.PINNED, IdsGrade.ENGINE)
_LOGPROBS_ORDER = (LogprobsGrade.NONE, LogprobsGrade.RAW, LogprobsGrade.PROCESSED)


def build(rollout: Rollout, calls: Iterable[Call]) -> tuple[list[Sample], Accounting]:
    """Return the rollout's samples in commit order of their leaves, and the accounting of all its sampled tokens."""
    ordered = sorted(calls, key=lambda call: call.commit_seq)
    builder = _Builder(rollout, ordered)
    samples = [builder.sample(branch, leaf) for branch, leaf in enumerate(_leaves(ordered))]
    return samples, account(rollout, ordered)


def account(rollout: Rollout, calls: Iterable[Call]) -> Accounting:
    """Count every sampled token once: trained, or masked by one reason."""
    sampled, trained, masked = 0, 0, Counter[str]()
    for call in calls:
        for choice in call.choices:
            total = masks.sampled_tokens(choice)
            sampled += total
            reason = masks.masked_reason(rollout, call, choice)
            if reason is not None:
                masked[str(reason)] += total
                continue
            targets, known = sum(masks.target_mask(choice)), packed.count(choice.token_ids)
            trained += targets
            masked[str(MaskedReason.NO_LOGPROBS)] += known - targets
            masked[str(MaskedReason.NO_IDS)] += total - known
    return Accounting(sampled=sampled, trained=trained, masked={name: count for name, count in masked.items() if count})


class _Leaf(NamedTuple):
    """What one row is made of: a choice, joined to the forest or not."""

    call: Call
    choice: Choice
    joined: bool


def _leaves(ordered: list[Call]) -> list[_Leaf]:
    """Return the rows to be, in commit order."""
    carried: set[Node] = set()
    found: list[list[_Leaf]] = []
    for call in reversed(ordered):
        leaves, carries = _leaves_of(call, carried)
        found.append(leaves)
        if carries and call.parent_call_id is not None and call.parent_choice is not None:
            carried.add(Node(call.parent_call_id, call.parent_choice))
    return [leaf for leaves in reversed(found) for leaf in leaves]


def _leaves_of(call: Call, carried: set[Node]) -> tuple[list[_Leaf], bool]:
    """Return the call's leaves, and whether any row runs through the call."""
    failed = call.outcome in masks.FAILED
    leaves, carries = [], False
    for choice in call.choices:
        joined = masks.has_ids(call, choice)
        extended = Node(call.call_id, choice.index) in carried
        if not extended and not failed:
            leaves.append(_Leaf(call, choice, joined))
        carries = carries or extended or (joined and not failed)
    return leaves, carries


class _Builder:
    """Makes rows one after the other; remembers which nodes earlier rows have."""

    def __init__(self, rollout: Rollout, calls: list[Call]) -> None:
        self._rollout = rollout
        self._calls = {call.call_id: call for call in calls}
        self._prompts = PromptResolver(calls)
        self._seen: set[Node] = set()

    def sample(self, branch: int, leaf: _Leaf) -> Sample:
        """Build one row; the sampled tokens that no earlier row has are this row's to train."""
        steps = self._path(leaf) if leaf.joined else [leaf]
        reason = self._reason(branch, leaf, steps)
        row = _Arrays(self._prompts.prompt_ids(leaf.call) + leaf.choice.token_ids if leaf.joined else b"")
        turns = [self._turn(row, step) for step in steps]
        self._seen.update(_node(step) for step in steps)
        ids_grade, logprobs_grade = _grades(steps, turns)
        return Sample(
            sample_id=f"{self._rollout.rollout_id}-{branch}",
            rollout_id=self._rollout.rollout_id,
            group_id=self._rollout.group_id,
            branch=branch,
            branch_reason=reason,
            token_ids=row.token_ids,
            loss_mask=bytes(row.mask),
            logprobs=bytes(row.logprobs),
            reward=self._rollout.reward,
            turns=turns,
            messages=_conversation(leaf.call.messages, leaf.choice.message),
            tools=leaf.call.tools,
            ids_grade=ids_grade,
            logprobs_grade=logprobs_grade,
            versions=list(_versions(steps, turns)),
            problems=_problems(steps),
        )

    def _path(self, leaf: _Leaf) -> list[_Leaf]:
        """Return the choices from the root to the leaf."""
        steps = [leaf]
        call = leaf.call
        while call.parent_call_id is not None:
            parent = self._calls[call.parent_call_id]
            choice = next(choice for choice in parent.choices if choice.index == call.parent_choice)
            steps.append(_Leaf(parent, choice, joined=True))
            call = parent
        return steps[::-1]

    def _reason(self, branch: int, leaf: _Leaf, steps: list[_Leaf]) -> BranchReason:
        """Say where the row leaves the earlier ones: at its first node that none of them has."""
        if not leaf.joined:
            return BranchReason.NO_IDS
        if branch == 0:
            return BranchReason.MAIN
        first = next(step for step in steps if _node(step) not in self._seen)
        if any(Node(first.call.call_id, choice.index) in self._seen for choice in first.call.choices):
            return BranchReason.CHOICE
        return BranchReason.ROOT if first is steps[0] else BranchReason.FORK

    def _turn(self, row: "_Arrays", step: _Leaf) -> Turn:
        start = self._prompts.length(step.call) if step.joined else 0
        end = start + packed.count(step.choice.token_ids) if step.joined else 0
        reason = masks.masked_reason(self._rollout, step.call, step.choice)
        trained = reason is None and _node(step) not in self._seen
        if trained:
            row.train(start, step.choice)
        return Turn(
            call_id=step.call.call_id,
            choice=step.choice.index,
            start=start,
            end=end,
            finish_reason=step.choice.finish_reason,
            trained=trained,
            masked_reason=reason,
        )


class _Arrays:
    """The parallel arrays of one row."""

    def __init__(self, token_ids: packed.Int32s) -> None:
        self.token_ids = token_ids
        self.mask = bytearray(packed.count(token_ids))
        self.logprobs = bytearray(_NAN * packed.count(token_ids))

    def train(self, start: int, choice: Choice) -> None:
        """Make the choice's tokens targets, except those without a log-probability."""
        targets = masks.target_mask(choice)
        at = start * packed.ITEM_BYTES
        self.mask[start : start + len(targets)] = targets
        self.logprobs[at : at + len(choice.logprobs)] = choice.logprobs
        for index, target in enumerate(targets) if 0 in targets else ():
            if not target:
                hole = at + index * packed.ITEM_BYTES
                self.logprobs[hole : hole + packed.ITEM_BYTES] = _NAN


def _node(step: _Leaf) -> Node:
    return Node(step.call.call_id, step.choice.index)


def _grades(steps: list[_Leaf], turns: list[Turn]) -> tuple[IdsGrade, LogprobsGrade]:
    """Return the weakest grades among the turns that the row trains; of its leaf when it trains none."""
    trained = [step.choice for step, turn in zip(steps, turns, strict=True) if turn.trained]
    choices = trained or [steps[-1].choice]
    if not steps[-1].joined:
        return IdsGrade.NONE, LogprobsGrade.NONE
    ids = min((choice.ids_grade for choice in choices), key=_IDS_ORDER.index)
    return ids, min((choice.logprobs_grade for choice in choices), key=_LOGPROBS_ORDER.index)


def _versions(steps: list[_Leaf], turns: list[Turn]) -> Iterator[VersionSpan]:
    for step, turn in zip(steps, turns, strict=True):
        if step.joined:
            for span in step.choice.versions:
                yield VersionSpan(version=span.version, start=turn.start + span.start, end=turn.start + span.end)


def _problems(steps: list[_Leaf]) -> list[str]:
    named = (name for step in steps for name in (*step.call.problems, *step.choice.problems))
    return list(dict.fromkeys(named))


def _conversation(messages: msgspec.Raw, answer: msgspec.Raw) -> msgspec.Raw:
    """Append the answer to the request's messages without re-spelling either."""
    sent, said = bytes(messages).strip(), bytes(answer).strip()
    inner = sent[1:-1].strip() if sent[:1] == b"[" and sent[-1:] == b"]" else b""
    parts = [part for part in (inner, said) if part and part != b"null"]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
