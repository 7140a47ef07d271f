"""Records that cross a room: rollouts, calls and samples.

A call's prompt is stored as a reference (an earlier call, how many of its tokens are shared, the new ids), so that a
rollout of n turns costs n turns of storage, not n squared.
"""

import msgspec

from orchard_proxy.schema.enums import (
    Blame,
    BranchReason,
    Delivery,
    IdsGrade,
    LogprobsGrade,
    MaskedReason,
    Outcome,
    Phase,
    RolloutStatus,
)
from orchard_proxy.schema.packed import Float32s, Int32s


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why something failed, down to the Parquet row."""

    code: str
    blame: Blame
    phase: Phase
    retryable: bool = False
    message: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the engine stated them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens [start, end) were sampled by weights `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer of a call."""

    index: int
    token_ids: Int32s = b""
    """Ids as sampled, stop token included; empty when not known."""
    logprobs: Float32s = b""
    """Parallel to token_ids; empty when not known."""
    sampled_tokens: int = 0
    """How many tokens were sampled, known even where the ids are not."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    message: msgspec.Raw = msgspec.Raw(b"null")
    """The assistant message as a JSON object: role, content, reasoning_content, tool_calls."""
    versions: list[VersionSpan] = []
    ids_grade: IdsGrade = IdsGrade.NONE
    logprobs_grade: LogprobsGrade = LogprobsGrade.NONE
    problems: list[str] = []
    """Named reasons why evidence was rejected or is missing."""


class CallEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's answer proves: read by `engines`, used by `assemble`."""

    prompt_ids: Int32s | None = None
    """None means not known."""
    choices: list[Choice] = []
    usage: Usage = Usage()
    model: str | None = None
    system_fingerprint: str | None = None
    problems: list[str] = []
    """Problems of the prompt or of the whole answer."""
    rejected: bool = False
    """The evidence contradicts itself: kept, but not trained and not joined."""


class PromptRef(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as (base call, tokens shared with its prompt + choice, new ids)."""

    base_call_id: str | None = None
    base_choice: int | None = None
    """Choice of the base whose tokens are part of the shared prefix; None: the base's prompt alone."""
    shared_tokens: int = 0
    new_ids: Int32s = b""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model request of the harness and its answer."""

    call_id: str
    rollout_id: str
    seq: int
    commit_seq: int
    """Order of commit in the journal; the deriver counts it. "Earliest committed" means smallest."""
    dialect: str
    engine: str
    stream: bool
    model: str | None
    outcome: Outcome
    delivery: Delivery
    late: bool
    failure: Failure | None
    begun_us: int
    ended_us: int
    ttft_s: float | None
    duration_s: float
    parent_call_id: str | None
    """The call that this one extends, by exact token prefix."""
    parent_choice: int | None
    prompt: PromptRef | None
    """None when the prompt ids are not known."""
    prompt_tokens: int | None
    choices: list[Choice]
    usage: Usage
    sampling: msgspec.Raw
    """Requested sampling parameters, a JSON object."""
    messages: msgspec.Raw
    """The request's messages as the client sent them, JSON."""
    tools: msgspec.Raw
    """The request's tools, JSON, or null."""
    edits: list[str]
    problems: list[str]
    evidence_rejected: bool
    http_status: int | None


class RewardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One named reward, with when it was set."""

    name: str
    value: float
    set_us: int
    version: int


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one harness at one task."""

    rollout_id: str
    group_id: str | None = None
    task_id: str | None = None
    attempt: int = 1
    run_id: str | None = None
    harness: str | None = None
    harness_version: str | None = None
    image_digest: str | None = None
    model: str | None = None
    status: RolloutStatus = RolloutStatus.RUNNING
    reward: float | None = None
    rewards: list[RewardEntry] = []
    reward_version: int = 0
    failure: Failure | None = None
    started_us: int = 0
    finished_us: int | None = None
    implicit: bool = False
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a sample were sampled by `choice` of `call_id`."""

    call_id: str
    choice: int
    start: int
    end: int
    finish_reason: str | None
    trained: bool
    masked_reason: MaskedReason | None
    """None when trained, or when another sample trains these tokens."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training row: a root-to-leaf path of the forest. Arrays are parallel, length T."""

    sample_id: str
    rollout_id: str
    group_id: str | None
    branch: int
    branch_reason: BranchReason
    token_ids: Int32s
    loss_mask: bytes
    """int8 per token: 1 = a target."""
    logprobs: Float32s
    """NaN where the mask is 0."""
    reward: float | None
    turns: list[Turn]
    messages: msgspec.Raw
    """Request messages of the leaf plus its answer: chat form, JSON list."""
    tools: msgspec.Raw
    ids_grade: IdsGrade
    logprobs_grade: LogprobsGrade
    versions: list[VersionSpan]
    problems: list[str]


class JournalDamage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the journal that could not be read. What was recorded there is lost."""

    segment: str
    offset: int
    bytes: int


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """The invariant line: `sampled = trained + sum(masked.values())`, in tokens."""

    sampled: int
    trained: int
    masked: dict[str, int]

    @property
    def holds(self) -> bool:
        """Say whether the invariant holds."""
        return self.sampled == self.trained + sum(self.masked.values())

    def line(self) -> str:
        """Render as every export prints it."""
        parts = "".join(f" + {n} {reason}" for reason, n in sorted(self.masked.items()) if n)
        return f"sampled {self.sampled} = trained {self.trained}{parts}"
