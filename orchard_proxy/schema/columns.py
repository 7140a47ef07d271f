"""The one list of columns. SQL tables, Arrow schemas and docs/columns.md are rendered from it.

Add a column here and nowhere else. `SCHEMA_VERSION` is (major, minor): a new nullable column raises minor; anything
that an old reader would misread raises major, and a reader refuses a newer major.
"""

from enum import StrEnum

import msgspec

SCHEMA_VERSION = (1, 0)


class Kind(StrEnum):
    """The type of a column, independent of the store."""

    STR = "string"
    INT64 = "int64"
    INT32 = "int32"
    FLOAT64 = "float64"
    BOOL = "bool"
    TIME = "timestamp[us, UTC]"
    JSON = "json string"
    STRS = "list<string>"
    IDS = "list<int32>"
    MASK = "list<int8>"
    LOGPROBS = "list<float32>"
    STRUCT = "struct"
    STRUCTS = "list<struct>"


LIMITS: dict[Kind, tuple[int, int]] = {
    Kind.INT32: (-(2**31), 2**31 - 1),
    Kind.INT64: (-(2**63), 2**63 - 1),
    Kind.TIME: (-62_135_596_800_000_000, 253_402_300_799_999_999),
}
"""Least and largest number that a column of the kind holds; times are those that a calendar has, years 1 to 9999."""


class Column(msgspec.Struct, frozen=True):
    """One column: name, kind, what it means, whether it may be null."""

    name: str
    kind: Kind
    doc: str
    nullable: bool = False
    indexed: bool = False
    """SQL builds an index on it."""
    fields: tuple["Column", ...] = ()
    """Members of STRUCT and STRUCTS."""

    def fit(self, value: int) -> int | None:
        """Return the number if the column holds it, else null where that is allowed, else the nearest it holds."""
        least, most = LIMITS[self.kind]
        if least <= value <= most:
            return value
        return None if self.nullable else min(max(value, least), most)


def _null(name: str, kind: Kind, doc: str, *, indexed: bool = False) -> Column:
    return Column(name, kind, doc, nullable=True, indexed=indexed)


FAILURE_FIELDS = (
    Column("code", Kind.STR, "machine-readable code"),
    Column("blame", Kind.STR, "agent | task | infra | policy | client"),
    Column("phase", Kind.STR, "create | setup | launch | run | grade | finish"),
    Column("retryable", Kind.BOOL, "whether another attempt may succeed"),
    Column("message", Kind.STR, "one sentence for a person"),
)
FAILURE = Column("failure", Kind.STRUCT, "why it failed; null when it did not", nullable=True, fields=FAILURE_FIELDS)

VERSION_FIELDS = (
    Column("version", Kind.STR, "weight version"),
    Column("start", Kind.INT32, "first token"),
    Column("end", Kind.INT32, "one past the last token"),
)

ROLLOUTS = (
    Column("rollout_id", Kind.STR, "the rollout", indexed=True),
    _null("group_id", Kind.STR, "shared by the attempts that are compared (GRPO group)", indexed=True),
    _null("task_id", Kind.STR, "the task", indexed=True),
    Column("attempt", Kind.INT32, "attempt at the task, from 1"),
    _null("run_id", Kind.STR, "the `orchard run` it belongs to", indexed=True),
    _null("harness", Kind.STR, "name of the harness"),
    _null("harness_version", Kind.STR, "its version"),
    _null("image_digest", Kind.STR, "digest of the image it ran in"),
    _null("model", Kind.STR, "model asked for"),
    Column("status", Kind.STR, "running | completed | failed | aborted", indexed=True),
    _null("reward", Kind.FLOAT64, "scalar reward, last writer wins"),
    Column(
        "rewards",
        Kind.STRUCTS,
        "named rewards, last value of each name",
        fields=(
            Column("name", Kind.STR, "name"),
            Column("value", Kind.FLOAT64, "value"),
            Column("set_at", Kind.TIME, "when it was set"),
            Column("version", Kind.INT32, "finish version that set it"),
        ),
    ),
    Column("reward_version", Kind.INT32, "how many times finish was called"),
    FAILURE,
    Column("calls", Kind.INT32, "number of calls"),
    Column("sampled_tokens", Kind.INT64, "tokens sampled in all calls"),
    Column("started_at", Kind.TIME, "when the rollout was created"),
    _null("finished_at", Kind.TIME, "when it was finished"),
    Column("implicit", Kind.BOOL, "made by the first call under --open"),
    Column("metadata", Kind.JSON, "the caller's JSON object"),
)

CHOICE_FIELDS = (
    Column("index", Kind.INT32, "index as the engine numbers it"),
    Column("token_ids", Kind.IDS, "ids as sampled, stop token included; empty when not known"),
    Column("logprobs", Kind.LOGPROBS, "parallel to token_ids; empty when not known"),
    Column("sampled_tokens", Kind.INT32, "tokens sampled, known even where the ids are not"),
    _null("finish_reason", Kind.STR, "as the engine said it"),
    _null("stop_reason", Kind.STR, "matched stop string or id, JSON"),
    Column("message", Kind.JSON, "assistant message"),
    Column("ids_grade", Kind.STR, "engine | pinned | none"),
    Column("logprobs_grade", Kind.STR, "processed | raw | none"),
    Column("versions", Kind.STRUCTS, "policy versions by token span", fields=VERSION_FIELDS),
    Column("problems", Kind.STRS, "named faults of the evidence"),
)

CALLS = (
    Column("call_id", Kind.STR, "the call, 32 hex digits", indexed=True),
    Column("rollout_id", Kind.STR, "its rollout", indexed=True),
    Column("seq", Kind.INT32, "order of arrival in the rollout"),
    Column("commit_seq", Kind.INT64, "order of commit in the journal", indexed=True),
    Column("dialect", Kind.STR, "wire API of the harness"),
    Column("engine", Kind.STR, "kind of policy server"),
    Column("stream", Kind.BOOL, "whether the client asked for a stream"),
    _null("model", Kind.STR, "model that answered"),
    Column(
        "outcome", Kind.STR, "complete | length | client_gone | upstream_cut | engine_error | crashed", indexed=True
    ),
    Column("delivery", Kind.STR, "confirmed | uncertain | none"),
    Column("late", Kind.BOOL, "in flight when the rollout was finished"),
    FAILURE,
    Column("begun_at", Kind.TIME, "when the request was read"),
    Column("ended_at", Kind.TIME, "when the call was committed"),
    _null("ttft_s", Kind.FLOAT64, "seconds to the engine's first body byte"),
    Column("duration_s", Kind.FLOAT64, "seconds from request to commit"),
    _null("parent_call_id", Kind.STR, "the call that this one extends by exact token prefix"),
    _null("parent_choice", Kind.INT32, "which of its choices"),
    Column("prompt_known", Kind.BOOL, "whether the prompt ids are known"),
    _null(
        "prompt_base_call_id",
        Kind.STR,
        "prompt = the first prompt_shared tokens of this call, then the new ids",
    ),
    _null("prompt_base_choice", Kind.INT32, "choice of the base that the shared tokens run through"),
    Column("prompt_shared", Kind.INT32, "tokens shared with the base"),
    Column("prompt_new_ids", Kind.IDS, "the prompt's tokens after the shared ones"),
    _null("prompt_tokens", Kind.INT32, "length of the prompt"),
    Column("choices", Kind.STRUCTS, "the sampled answers", fields=CHOICE_FIELDS),
    _null("usage_prompt_tokens", Kind.INT32, "as the engine counted"),
    _null("usage_completion_tokens", Kind.INT32, "as the engine counted"),
    Column("sampling", Kind.JSON, "sampling parameters as requested"),
    Column("messages", Kind.JSON, "request messages as the client sent them"),
    Column("tools", Kind.JSON, "request tools, or null"),
    Column("edits", Kind.STRS, "what the proxy changed on the way"),
    Column("problems", Kind.STRS, "named faults of the evidence"),
    Column("evidence_rejected", Kind.BOOL, "the evidence contradicts itself"),
    _null("http_status", Kind.INT32, "the engine's status"),
)

TURN_FIELDS = (
    Column("call_id", Kind.STR, "the call"),
    Column("choice", Kind.INT32, "its choice"),
    Column("start", Kind.INT32, "first sampled token in this sample"),
    Column("end", Kind.INT32, "one past the last"),
    _null("finish_reason", Kind.STR, "as the engine said it"),
    Column("trained", Kind.BOOL, "whether this sample trains these tokens"),
    _null("masked_reason", Kind.STR, "why no sample trains them; null when one does"),
)

SAMPLES = (
    Column("sample_id", Kind.STR, "rollout id and branch number"),
    Column("rollout_id", Kind.STR, "the rollout"),
    _null("group_id", Kind.STR, "its group"),
    _null("task_id", Kind.STR, "its task"),
    Column("branch", Kind.INT32, "number of the leaf in commit order, from 0"),
    Column(
        "branch_reason",
        Kind.STR,
        "why it is a row of its own: main (the first) | choice (n > 1) | fork (leaves an earlier row) "
        "| root (extends no call) | no_ids",
    ),
    Column("token_ids", Kind.IDS, "prompt and sampled tokens of the path, length T"),
    Column("loss_mask", Kind.MASK, "1 = a target, length T"),
    Column("logprobs", Kind.LOGPROBS, "of the sampled tokens; NaN where the mask is 0; length T"),
    _null("advantages", Kind.LOGPROBS, "per token, filled by a trainer"),
    _null("reward", Kind.FLOAT64, "the rollout's reward"),
    Column("turns", Kind.STRUCTS, "spans of sampled tokens", fields=TURN_FIELDS),
    Column("messages", Kind.JSON, "chat form: the leaf's request messages and its answer"),
    Column("tools", Kind.JSON, "tools of the leaf's request, or null"),
    Column("ids_grade", Kind.STR, "engine | pinned | none"),
    Column("logprobs_grade", Kind.STR, "processed | raw | none"),
    Column("policy_versions", Kind.STRUCTS, "policy versions by token span", fields=VERSION_FIELDS),
    Column("problems", Kind.STRS, "named faults of the evidence on the path"),
    FAILURE,
)

TABLES = {"rollouts": ROLLOUTS, "calls": CALLS, "samples": SAMPLES}
