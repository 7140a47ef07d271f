"""Whether a sampled token may be trained, and the named reason when it may not.

One reason per token. When several hold, the first of this order is named: how the call itself ended (its outcome,
`late`, `uncertain`), then what is known of it (`evidence_rejected`, `no_ids`, `no_logprobs`), then what its rollout
says (`infra`). The nearer the cause is to the token, the more it helps whoever looks for it.
"""

import math
from array import array

from orchard_proxy.schema import packed
from orchard_proxy.schema.enums import Blame, Delivery, IdsGrade, LogprobsGrade, MaskedReason, Outcome
from orchard_proxy.schema.records import Call, Choice, Rollout

_BY_OUTCOME = {
    Outcome.CLIENT_GONE: MaskedReason.CLIENT_GONE,
    Outcome.UPSTREAM_CUT: MaskedReason.UPSTREAM_CUT,
    Outcome.ENGINE_ERROR: MaskedReason.ENGINE_ERROR,
    Outcome.CRASHED: MaskedReason.CRASHED,
}
FAILED = frozenset({Outcome.UPSTREAM_CUT, Outcome.ENGINE_ERROR, Outcome.CRASHED})
"""Nobody has the whole answer of such a call. It makes no row of its own, so that a retry continues the clean path."""


def knows_ids(choice: Choice) -> bool:
    """Say whether the choice has token ids that count."""
    return bool(choice.token_ids) and choice.ids_grade is not IdsGrade.NONE


def has_ids(call: Call, choice: Choice) -> bool:
    """Say whether the choice's tokens may take part in the forest."""
    return call.prompt is not None and not call.evidence_rejected and knows_ids(choice)


def sampled_tokens(choice: Choice) -> int:
    """Return how many tokens were sampled, as far as anybody knows."""
    return max(choice.sampled_tokens, packed.count(choice.token_ids))


def masked_reason(rollout: Rollout, call: Call, choice: Choice) -> MaskedReason | None:
    """Return why the choice's tokens must not be trained; None when they may."""
    if call.outcome in _BY_OUTCOME:
        return _BY_OUTCOME[call.outcome]
    if call.late:
        return MaskedReason.LATE
    if call.delivery is not Delivery.CONFIRMED:
        return MaskedReason.UNCERTAIN
    return _reason_of_evidence(call, choice) or _reason_of_rollout(rollout)


def _reason_of_evidence(call: Call, choice: Choice) -> MaskedReason | None:
    if call.evidence_rejected:
        return MaskedReason.EVIDENCE_REJECTED
    if not has_ids(call, choice):
        return MaskedReason.NO_IDS
    if choice.logprobs_grade is LogprobsGrade.NONE or len(choice.logprobs) != len(choice.token_ids):
        return MaskedReason.NO_LOGPROBS
    return None


def _reason_of_rollout(rollout: Rollout) -> MaskedReason | None:
    return MaskedReason.INFRA if rollout.failure is not None and rollout.failure.blame is Blame.INFRA else None


def target_mask(choice: Choice) -> bytes:
    """Return int8 per token of a trainable choice: 0 where the engine gave no finite log-probability."""
    values = array("f", packed.unpack_floats(choice.logprobs))
    if math.isfinite(sum(values)):
        return b"\x01" * len(values)
    return bytes(math.isfinite(value) for value in values)
