"""What a harness's output means: the answer, and whether the run was completed. Pure.

Exit codes lie (facts: a stub that does nothing exits 0, a tool that recovered exits 1), so they only ever explain a
failure. Completed means: in time, and what was written says so.
"""

import re
from typing import Any

import msgspec

from harness_images.fields import Result
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.launch import HarnessError, HarnessResult, LaunchPlan
from orchard_proxy.schema.sandbox import ExecResult

MOST_DETAIL = 500
"""Characters: a detail goes into a row, a log line and a table."""


class _NothingError(Exception):
    """There is no outcome to be read; the message says why."""


def read(result: Result, plan: LaunchPlan, run: ExecResult, written: bytes | None) -> HarnessResult:
    """Read the outcome from the exec and, where the plan names a file, from its content.

    Raises HarnessError `bad_result`, blame agent, where that is nested too deep or holds a monstrous number.
    """
    try:
        text = _text(plan, run, written)
        outcome = (
            _from_json(result, _parsed(plan, run, text))
            if plan.result_from.endswith("_json")
            else _from_text(result, text)
        )
    except (RecursionError, OverflowError, ValueError) as error:
        raise HarnessError(
            "bad_result",
            f"what it wrote is JSON that nobody can read: {error}; {_ending(run)}",
            blame=Blame.AGENT,
            phase=Phase.RUN,
        ) from error
    except _NothingError as nothing:
        return HarnessResult(completed=False, answer=None, detail=_short(f"{nothing}; {_ending(run)}"))
    if run.timed_out:
        return HarnessResult(completed=False, answer=outcome.answer, detail=_ending(run))
    if not outcome.completed:
        detail = "; ".join(filter(None, [outcome.detail, _ending(run)]))
        return HarnessResult(completed=False, answer=outcome.answer, detail=_short(detail))
    return outcome


def _text(plan: LaunchPlan, run: ExecResult, written: bytes | None) -> str:
    if not plan.result_from.startswith("file"):
        return run.stdout.decode(errors="replace")
    if written is None:
        raise _NothingError(f"it wrote no {plan.result_path}")
    return written.decode(errors="replace")


def _from_text(result: Result, text: str) -> HarnessResult:
    answer = text.strip()
    pattern = result.success.matches
    if not answer:
        raise _NothingError("it wrote nothing")
    if pattern and not re.search(pattern, text, re.MULTILINE):
        return HarnessResult(completed=False, answer=answer, detail=f"its output does not match {pattern!r}")
    return HarnessResult(completed=True, answer=answer)


def _from_json(result: Result, document: Any) -> HarnessResult:
    found, answer = resolve(document, result.answer)
    said = _as_text(resolve(document, result.detail)[1]) if result.detail else ""
    success = result.success
    if success.pointer:
        value = resolve(document, success.pointer)[1]
        completed = any(_same(value, wanted) for wanted in success.equals)
        why = said or f"{success.pointer} is {_as_text(value) or 'empty'}"
    else:
        completed = found and answer not in (None, "")
        why = said or f"there is nothing at {result.answer or 'the answer'}"
    text = None if answer is None else _as_text(answer).strip()
    return HarnessResult(completed=completed, answer=text, detail=_short(said if completed else why))


def _parsed(plan: LaunchPlan, run: ExecResult, text: str) -> Any:
    """Return the JSON document; on stdout the last line that is one, when all of it is not."""
    candidates = [text]
    if plan.result_from == "stdout_json":
        candidates += [line for line in reversed(text.splitlines()) if line.lstrip().startswith("{")]
    monstrous: Exception | None = None
    for candidate in candidates:
        try:
            return msgspec.json.decode(candidate)
        except (RecursionError, msgspec.ValidationError) as error:  # too deep; a number out of all ranges
            monstrous = error
        except msgspec.DecodeError:
            continue
    cut = " (its middle was left out: too long)" if run.stdout_bytes > len(run.stdout) else ""
    place = plan.result_path if plan.result_from == "file_json" else f"stdout{cut}"
    if monstrous is not None:
        raise monstrous
    raise _NothingError(f"{place} is not JSON")


def resolve(document: Any, pointer: str) -> tuple[bool, Any]:
    """Follow a JSON pointer (RFC 6901); "" is the whole document. Return whether it leads somewhere, and the value."""
    here = document
    for word in pointer.split("/")[1:]:
        key = word.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and key in here:
            here = here[key]
        elif isinstance(here, list) and (key == "-1" or key.isdecimal()) and -len(here) <= int(key) < len(here):
            here = here[int(key)]  # -1, the last one, is ours: event lists end with the answer
        else:
            return False, None
    return True, here


def _same(value: Any, wanted: str | int | bool) -> bool:
    return type(value) is type(wanted) and value == wanted


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _ending(run: ExecResult) -> str:
    if run.timed_out:
        how = f"it ran out of time after {run.duration_s:.0f} s"
    elif run.signal is not None:
        how = f"it was ended by signal {run.signal}"
    else:
        how = f"it exited with {run.exit_code}"
    last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2].strip()
    return f"{how}: {last}" if last else how


def _short(detail: str) -> str:
    return detail if len(detail) <= MOST_DETAIL else detail[: MOST_DETAIL - 1] + "…"
