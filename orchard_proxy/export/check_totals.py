"""Rules over all samples together: what is trained how often, and `sampled = trained + masked`."""

from collections import Counter
from typing import NamedTuple

from orchard_proxy.export import manifest
from orchard_proxy.export.check_calls import Calls
from orchard_proxy.export.check_rows import Seen, n_tokens, sampled
from orchard_proxy.export.manifest import Manifest
from orchard_proxy.export.report import Findings, Place, Row, Rule
from orchard_proxy.export.showing import ENDED_BADLY
from orchard_proxy.schema.enums import MaskedReason
from orchard_proxy.schema.records import Accounting


class _Use(NamedTuple):
    """One sample that a choice is part of."""

    branch: int
    place: Place
    trained: bool
    reason: str | None
    targets: int


class Totals:
    """Remembers in which samples each choice stands."""

    def __init__(self, calls: Calls, findings: Findings) -> None:
        self._calls = calls
        self._findings = findings
        self._uses: dict[tuple[str, int], list[_Use]] = {}
        self._branches: dict[str, dict[int, Place]] = {}
        self._seen = Seen()

    def add(self, row: Row, place: Place) -> None:
        """Take one sample."""
        self._seen.check("sample_id", row["sample_id"], self._findings, place)
        if row["sample_id"] != f"{row['rollout_id']}-{row['branch']}":
            self._findings.add(Rule.SAMPLE_ID, place, f"it is branch {row['branch']} of {row['rollout_id']}")
        self._branches.setdefault(row["rollout_id"], {})[row["branch"]] = place
        for turn in row["turns"]:
            targets = sum(row["loss_mask"][max(turn["start"], 0) : max(turn["end"], 0)]) if turn["trained"] else 0
            use = _Use(row["branch"], place, turn["trained"], turn["masked_reason"], targets)
            self._uses.setdefault((turn["call_id"], turn["choice"]), []).append(use)

    def check(self, stated: Manifest) -> Accounting:
        """Check what only the whole shows; return the accounting as the rows give it."""
        self._check_branches()
        total, trained, masked = 0, 0, Counter[str]()
        for call in self._calls.rows.values():
            for choice in call["choices"]:
                parts = self._account(call, choice)
                total += sampled(choice)
                trained += parts.pop("trained", 0)
                masked.update(parts)
        found = Accounting(sampled=total, trained=trained, masked={name: n for name, n in sorted(masked.items()) if n})
        if found != stated.accounting or not stated.accounting.holds or stated.invariant != found.line():
            detail = f"states {stated.invariant} ({stated.accounting}), the rows give {found.line()}"
            self._findings.add(Rule.ACCOUNTING, manifest.NAME, detail)
        return found

    def _check_branches(self) -> None:
        for places in self._branches.values():
            for number, (branch, place) in enumerate(sorted(places.items())):
                if branch != number:
                    self._findings.add(Rule.SAMPLE_ID, place, f"its branch is {branch}, though branch {number} is free")
                    break

    def _account(self, call: Row, choice: Row) -> dict[str, int]:
        """Return the choice's tokens as trained and masked; report what breaks the rules."""
        uses = sorted(self._uses.get((call["call_id"], choice["index"]), []), key=lambda use: use.branch)
        total, where = sampled(choice), f"choice {choice['index']} of call {call['call_id']}"
        trained = [use for use in uses if use.trained]
        if len(trained) > 1:
            self._findings.add(Rule.TRAINED_ONCE, trained[1].place, f"{where} is trained in {len(trained)} samples")
        if trained and not uses[0].trained:
            self._findings.add(Rule.TRAINED_FIRST, trained[0].place, f"{where} stands in branch {uses[0].branch} too")
        if trained:
            known = n_tokens(choice["token_ids"])
            targets = sum(use.targets for use in trained)
            return {"trained": targets, MaskedReason.NO_LOGPROBS: known - targets, MaskedReason.NO_IDS: total - known}
        reasons = {use.reason for use in uses} or {ENDED_BADLY.get(call["outcome"])}
        reason = reasons.pop()
        if reasons or reason is None:
            self._report_unaccounted(call, total, where)
            return {}
        return {reason: total}

    def _report_unaccounted(self, call: Row, total: int, where: str) -> None:
        if total:
            self._findings.add(
                Rule.ACCOUNTED,
                self._calls.place(call["call_id"]),
                f"the {total} tokens of {where} are not accounted for",
            )
