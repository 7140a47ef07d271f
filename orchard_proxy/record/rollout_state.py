"""What the deriver keeps of a rollout while its calls come in, and the rollout's own record.

A cache over the catalog: a state that was dropped is built again from the catalog's calls, and then places and stores
the next call exactly as the dropped one would have. Invariant: so the catalog does not depend on when the deriver was
stopped, or on how much memory it had.
"""

from typing import Any

import msgspec

from orchard_proxy.assemble import masks
from orchard_proxy.assemble.forest import Forest, Sampled
from orchard_proxy.assemble.prefix import Recent
from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.record import stored
from orchard_proxy.record.open_call import ReadCall
from orchard_proxy.record.stored import SharedText
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.frames import FinishFrame, RolloutFrame
from orchard_proxy.schema.packed import Int32s
from orchard_proxy.schema.records import Call, RewardEntry, Rollout

KEEP_TEXTS = 3
"""As many as the forest keeps prompts: the main chain and two sub-agents."""
_CLOSING_BRACKET = 1
"""A longer conversation shares everything of a shorter one but the bracket that ends it."""
_FIXED_COST_BYTES = 2_000


class RolloutState:
    """One rollout: its record, its forest, its recent texts, its totals."""

    def __init__(self, rollout: Rollout, calls: int = 0, sampled_tokens: int = 0) -> None:
        self.rollout = rollout
        self.calls = calls
        self.sampled_tokens = sampled_tokens
        self._forest = Forest()
        self._texts: Recent[str] = Recent(KEEP_TEXTS)

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held."""
        return self._forest.size_bytes + self._texts.size_bytes + _FIXED_COST_BYTES

    def row(self) -> dict[str, Any]:
        """Return the rollout's row."""
        return stored.rollout_row(self.rollout, calls=self.calls, sampled_tokens=self.sampled_tokens)

    def restore(self, calls: list[Call]) -> None:
        """Take in calls that are in the catalog already, in commit order."""
        prompts = PromptResolver()
        for call in calls:
            prompts.add(call)
            self._text(call)
            if call.prompt is not None:
                self._hang(call, prompts.prompt_ids(call))

    def place(self, read: ReadCall) -> tuple[Call, SharedText]:
        """Place the next call in the forest; return it whole, and how its messages are stored."""
        call = read.call
        if read.evidence.prompt_ids is not None:
            call = self._hang(call, read.evidence.prompt_ids)
        self.calls += 1
        self.sampled_tokens += sum(map(masks.sampled_tokens, call.choices))
        if self.rollout.model is None and call.model is not None:
            self.rollout = msgspec.structs.replace(self.rollout, model=call.model)
        return call, self._text(call)

    def _hang(self, call: Call, prompt_ids: Int32s) -> Call:
        if call.evidence_rejected:
            return msgspec.structs.replace(call, prompt=self._forest.refer(call.call_id, prompt_ids))
        known = [choice for choice in call.choices if masks.knows_ids(choice)]
        nodes = [Sampled(choice.index, choice.token_ids) for choice in known]
        placement = self._forest.add(call.call_id, prompt_ids, nodes)
        return msgspec.structs.replace(
            call,
            prompt=placement.prompt,
            parent_call_id=placement.parent.call_id if placement.parent else None,
            parent_choice=placement.parent.choice if placement.parent else None,
        )

    def _text(self, call: Call) -> SharedText:
        messages = bytes(call.messages)
        match = self._texts.best(messages)
        self._texts.add(call.call_id, messages, slack=_CLOSING_BRACKET)
        return SharedText() if match is None else SharedText(match.key, match.shared)


def created(frame: RolloutFrame, known: Rollout | None) -> Rollout:
    """Return the rollout that a ROLLOUT frame makes; calls or a finish may have named it before."""
    base = known or Rollout(rollout_id=frame.rollout_id)
    return msgspec.structs.replace(
        base,
        group_id=frame.group_id,
        task_id=frame.task_id,
        attempt=frame.attempt,
        run_id=frame.run_id,
        harness=frame.harness,
        harness_version=frame.harness_version,
        image_digest=frame.image_digest,
        model=frame.model or base.model,
        started_us=frame.created_us,
        implicit=frame.implicit,
        metadata=_merged(msgspec.Raw(bytes(frame.metadata)), base.metadata),
    )


def finished(frame: FinishFrame, known: Rollout) -> Rollout:
    """Return the rollout after a FINISH frame: the last writer wins, named rewards and metadata merge by name.

    A finish that says nothing of the reward or the status leaves the one before it. `finished_us` stays that of the
    first.
    """
    rewards = {entry.name: entry for entry in known.rewards}
    for name, value in frame.rewards.items():
        rewards[name] = RewardEntry(name=name, value=value, set_us=frame.finished_us, version=frame.version)
    before = RolloutStatus.COMPLETED if known.status is RolloutStatus.RUNNING else known.status
    status = before if frame.status is None else RolloutStatus(frame.status)
    kept = known.failure if status is known.status else None
    return msgspec.structs.replace(
        known,
        status=status,
        reward=frame.reward if frame.reward is not None else known.reward,
        rewards=list(rewards.values()),
        reward_version=frame.version,
        failure=frame.failure or kept,
        finished_us=known.finished_us if known.finished_us is not None else frame.finished_us,
        metadata=_merged(known.metadata, msgspec.Raw(bytes(frame.metadata))),
    )


def _merged(old: msgspec.Raw, new: msgspec.Raw) -> msgspec.Raw:
    """Merge two JSON objects by their top-level keys; what is no object changes nothing."""
    try:
        added = msgspec.json.decode(new, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return old
    if not added:
        return old
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(old, type=dict[str, msgspec.Raw]) | added))
    except msgspec.DecodeError:
        return new
