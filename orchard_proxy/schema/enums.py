"""The closed vocabularies of the record. A value that is not here does not exist."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended, seen from the proxy."""

    COMPLETE = "complete"
    LENGTH = "length"
    CLIENT_GONE = "client_gone"
    UPSTREAM_CUT = "upstream_cut"
    ENGINE_ERROR = "engine_error"
    CRASHED = "crashed"


class Delivery(StrEnum):
    """Whether the client has the whole answer."""

    CONFIRMED = "confirmed"
    UNCERTAIN = "uncertain"
    NONE = "none"


class IdsGrade(StrEnum):
    """Where the token ids of a call come from."""

    ENGINE = "engine"
    PINNED = "pinned"
    NONE = "none"


class LogprobsGrade(StrEnum):
    """What the log-probabilities are of: the sampling distribution, the bare model, or nothing."""

    PROCESSED = "processed"
    RAW = "raw"
    NONE = "none"


class MaskedReason(StrEnum):
    """Why sampled tokens are not trained. `sampled = trained + sum(masked by reason)`."""

    CLIENT_GONE = "client_gone"
    UPSTREAM_CUT = "upstream_cut"
    ENGINE_ERROR = "engine_error"
    CRASHED = "crashed"
    UNCERTAIN = "uncertain"
    LATE = "late"
    NO_IDS = "no_ids"
    NO_LOGPROBS = "no_logprobs"
    EVIDENCE_REJECTED = "evidence_rejected"
    AUXILIARY = "auxiliary"
    STALE = "stale"
    INFRA = "infra"


class BranchReason(StrEnum):
    """Why a sample is a row of its own."""

    MAIN = "main"
    """The first leaf of the rollout."""
    CHOICE = "choice"
    """Another choice of the same call (n > 1)."""
    FORK = "fork"
    """Shares a sampled prefix with an earlier leaf, then goes another way."""
    ROOT = "root"
    """Its prompt extends no recorded call."""
    NO_IDS = "no_ids"
    """The call has no trusted token ids, so it cannot be joined to any other."""


class RolloutStatus(StrEnum):
    """State of a rollout. Only `running` accepts calls."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


class Blame(StrEnum):
    """Who caused a failure."""

    AGENT = "agent"
    TASK = "task"
    INFRA = "infra"
    POLICY = "policy"
    CLIENT = "client"


class Phase(StrEnum):
    """Where in a rollout a failure happened."""

    CREATE = "create"
    SETUP = "setup"
    LAUNCH = "launch"
    RUN = "run"
    GRADE = "grade"
    FINISH = "finish"


class UpstreamStream(StrEnum):
    """Whether a streaming client gets the engine's own stream or one that we make from a whole answer."""

    AUTO = "auto"
    """The engine's own, unless its streams lack token ids."""
    ON = "on"
    """Always the engine's own; what it lacks is graded."""
    OFF = "off"
    """Always made by us from one whole answer."""
