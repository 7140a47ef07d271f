"""What a row of `calls` shows about whether its tokens may be trained.

Written from the contract and not from `assemble.masks`, on purpose: a check that asks the code that it checks proves
nothing.
"""

from orchard_proxy.export.report import Row
from orchard_proxy.schema.enums import Blame, Delivery, IdsGrade, LogprobsGrade, MaskedReason, Outcome

ENDED_BADLY = {
    Outcome.CLIENT_GONE: MaskedReason.CLIENT_GONE,
    Outcome.UPSTREAM_CUT: MaskedReason.UPSTREAM_CUT,
    Outcome.ENGINE_ERROR: MaskedReason.ENGINE_ERROR,
    Outcome.CRASHED: MaskedReason.CRASHED,
}


def shown_reason(rollout: Row, call: Row, choice: Row) -> str | None:
    """Return why a choice must be masked, the cause nearest to the token first; None when it may be trained."""
    failure = rollout["failure"]
    no_ids = not call["prompt_known"] or not choice["token_ids"] or choice["ids_grade"] == IdsGrade.NONE
    no_logprobs = choice["logprobs_grade"] == LogprobsGrade.NONE or len(choice["logprobs"]) != len(choice["token_ids"])
    shown = {
        ENDED_BADLY.get(call["outcome"]): call["outcome"] in ENDED_BADLY,
        MaskedReason.LATE: call["late"],
        MaskedReason.UNCERTAIN: call["delivery"] != Delivery.CONFIRMED,
        MaskedReason.EVIDENCE_REJECTED: call["evidence_rejected"],
        MaskedReason.NO_IDS: no_ids,
        MaskedReason.NO_LOGPROBS: no_logprobs,
        MaskedReason.INFRA: failure is not None and failure["blame"] == Blame.INFRA,
    }
    return next((reason for reason, holds in shown.items() if holds), None)
