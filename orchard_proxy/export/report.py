"""What `orchard validate` finds: the rules by name, and each breach with its table, file and row."""

from enum import Enum
from typing import Any, NamedTuple

import msgspec

KEPT_BREACHES = 10_000
"""Beyond so many, breaches are counted but not kept: a file of garbage must not fill the memory."""

Row = dict[str, Any]


class Rule(Enum):
    """Every rule that an export keeps. The value says it in words."""

    FILE_MISSING = "every file of the manifest is there"
    FILE_OUTSIDE = "every file of the manifest lies in the folder of the export"
    FILE_UNLISTED = "every file is in the manifest"
    FILE_HASH = "every file has the size and sha256 of the manifest"
    FILE_UNREADABLE = "every Parquet file can be read to its end"
    FILE_ROWS = "every file has the number of rows of the manifest, and the tables add up to its counts"
    FOOTER = "the footer keys orchard.* are those of the manifest"
    SCHEMA = "the columns, types and nullability are the declared ones"

    UNIQUE_ID = "rollout_id, call_id, sample_id, commit_seq and reward names are unique"
    FOREIGN_KEY = "every rollout and call that a row names exists, in the same rollout"
    NULL = "columns that are declared not null hold no null"
    ENUM = "every value of a closed vocabulary is in it"
    JSON = "JSON columns hold valid JSON"
    SPANS = "policy version spans lie within their tokens"

    FINISHED = "a rollout has an end if and only if it no longer runs"
    ROLLOUT_COUNTS = "a rollout counts its calls and sampled tokens right"

    TIMES = "the duration of a call is its end minus its begin"
    CHOICE_INDEX = "the choices of a call whose evidence is not rejected have different indexes"
    CHOICE_LENGTHS = "a choice has as many logprobs as ids, or none"
    CHOICE_COUNT = "a choice with trusted ids sampled as many tokens as it has ids"
    CALL_IDS = "token ids of a call are not negative"
    USAGE = "ids that are not rejected are as many as the engine counted"
    PROMPT_LENGTH = "a known prompt is as long as stated, and an unknown one has no ids"
    PROMPT_BASE = "a prompt shares no more than its base has, and the base was committed before"
    PROMPT_CYCLE = "prompt references do not run in a circle"
    PARENT = "the parent has the choice, trusted ids, and was committed before"
    PARENT_PREFIX = "a prompt starts with its parent's prompt and choice"
    PARENT_LONGEST = "the parent is the longest earlier prefix, among equals the one committed first"

    SAMPLE_ID = "a sample is named by its rollout and its branch, counted from 0"
    ROLLOUT_COPY = "group, task, reward and failure of a sample are its rollout's"
    LENGTHS = "token_ids, loss_mask, logprobs (and advantages) have one length"
    SAMPLE_IDS = "token ids of a sample are not negative"
    MASK_VALUES = "the mask is 0 or 1"
    LOGPROB_TARGET = "the logprob of a target is finite and not positive"
    LOGPROB_MASKED = "the logprob is NaN where the mask is 0"
    TURN_RANGE = "turns lie within the sample"
    TURN_ORDER = "turns are in order and do not overlap"
    TURN_PATH = "the turns are the path from the root to the leaf"
    TURN_IDS = "the tokens of a turn are those of its call's choice"
    PATH_IDS = "the tokens of a sample are its leaf's prompt and choice"
    BRANCH_REASON = "a sample is no_ids where its leaf has no trusted ids, and there only"
    GRADES = "a sample's grades are no better than those of what it trains"
    MASK_TURNS = "targets lie in trained turns only, and are all tokens there that have a logprob"
    LOGPROB_COPY = "logprobs of targets are the call's, bit for bit"
    TRAINED_ALLOWED = "what is trained ended well, reached the client, and has trusted ids and logprobs"
    MASKED_REASON = "a masked turn names the reason that its call shows"

    REBUILT = "a sample is, in every column, what its rollout's calls make of it"

    TRAINED_ONCE = "a choice is trained in at most one sample"
    TRAINED_FIRST = "a choice is trained in the first sample that it is part of"
    ACCOUNTED = "every choice with sampled tokens is trained once or masked with a reason"
    ACCOUNTING = "sampled = trained + masked, as the manifest states it"


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """One row, or one file, that breaks a rule."""

    rule: str
    table: str | None
    file: str
    row: str | None
    """Key of the row: rollout_id, call_id or sample_id."""
    detail: str

    def line(self) -> str:
        """Render for a person."""
        where = " ".join(part for part in (self.table, self.file, self.row) if part)
        return f"{where}: {self.rule}: {self.detail}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over an export."""

    valid: bool
    total_breaches: int
    breaches: list[Breach]
    counts: dict[str, int]
    invariant: str
    warnings: list[str] = []
    """What breaks no rule, but whoever trains on it should know."""


class Place(NamedTuple):
    """Where a row lies."""

    table: str
    file: str
    row: str | None = None


class Findings:
    """Collects breaches."""

    def __init__(self) -> None:
        self.total = 0
        self.kept: list[Breach] = []

    def add(self, rule: Rule, place: Place | str, detail: str) -> None:
        """Take one breach; `place` is a row's, or a file's path."""
        self.total += 1
        if len(self.kept) < KEPT_BREACHES:
            where = Place("", place) if isinstance(place, str) else place
            self.kept.append(
                Breach(rule=rule.name.lower(), table=where.table or None, file=where.file, row=where.row, detail=detail)
            )
