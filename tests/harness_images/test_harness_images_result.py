"""Outcomes: what was written decides, the exit code only explains."""

import json

import pytest
from manifest_kit import REQUEST, manifest_with

from harness_images import manifest, result
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.launch import HarnessError
from orchard_proxy.schema.sandbox import ExecResult

TEXT = ""
PATTERN = "[result.success]\nmatches = '^DONE'"
FILE_JSON = '[result]\nfrom = "file_json"\npath = "{home}/r.json"\nanswer = "/info/answer"\ndetail = "/info/status"'
SUBMITTED = FILE_JSON + '\n[result.success]\npointer = "/info/status"\nequals = ["Submitted"]'
STDOUT_JSON = (
    '[result]\nfrom = "stdout_json"\nanswer = "/result"\n[result.success]\npointer = "/is_error"\nequals = [false]'
)


def read(rest, *, written=None, **run):
    described = manifest.parse(manifest_with(rest=rest))
    plan = manifest.plan(described, REQUEST, install="", mounts=[], args={})
    fields = {"exit_code": 0, "duration_s": 1.0} | run
    return result.read(described.result, plan, ExecResult(**fields), written)


def info(**fields):
    return json.dumps({"info": fields}).encode()


@pytest.mark.parametrize(
    ("rest", "given", "completed", "answer", "detail"),
    [
        pytest.param(TEXT, {"stdout": b" 42\n"}, True, "42", "", id="text"),
        pytest.param(TEXT, {"stdout": b"42", "exit_code": 3}, True, "42", "", id="exit-codes-lie"),
        pytest.param(TEXT, {}, False, None, "it wrote nothing; it exited with 0", id="a-stub-that-exits-with-0"),
        pytest.param(TEXT, {"exit_code": 1, "stderr": b"x\nboom\n"}, False, None, "boom", id="the-last-error-line"),
        pytest.param(TEXT, {"exit_code": None, "signal": 9}, False, None, "ended by signal 9", id="signal"),
        pytest.param(TEXT, {"stdout": b"42", "timed_out": True}, False, "42", "out of time after 1 s", id="timeout"),
        pytest.param(PATTERN, {"stdout": b"log\nDONE 3"}, True, "log\nDONE 3", "", id="pattern-on-any-line"),
        pytest.param(PATTERN, {"stdout": b"failed"}, False, "failed", "does not match '^DONE'", id="pattern-missed"),
        pytest.param(
            SUBMITTED, {"written": info(status="Submitted", answer="ok\n")}, True, "ok", "Submitted", id="file"
        ),
        pytest.param(
            SUBMITTED,
            {"written": info(status="LimitsExceeded", answer="")},
            False,
            "",
            "LimitsExceeded",
            id="not-submitted",
        ),
        pytest.param(SUBMITTED, {"written": info(status="")}, False, None, "/info/status is empty", id="unfinished"),
        pytest.param(SUBMITTED, {}, False, None, "it wrote no /home/agent/r.json", id="no-file"),
        pytest.param(SUBMITTED, {"written": b'{"info'}, False, None, "r.json is not JSON", id="half-a-file"),
        pytest.param(SUBMITTED, {"written": b"[]"}, False, None, "/info/status is empty", id="another-shape"),
        pytest.param(
            SUBMITTED,
            {"written": info(status="Submitted", answer="x"), "timed_out": True, "exit_code": None},
            False,
            "x",
            "out of time",
            id="submitted-but-hung-on",
        ),
        pytest.param(FILE_JSON, {"written": info(answer=7)}, True, "7", "", id="an-answer-is-enough"),
        pytest.param(
            FILE_JSON, {"written": info(answer=None)}, False, None, "nothing at /info/answer", id="null-is-none"
        ),
        pytest.param(FILE_JSON, {"written": info(answer={"a": 1})}, True, '{"a":1}', "", id="an-object-as-json"),
        pytest.param(STDOUT_JSON, {"stdout": b'{"is_error":false,"result":"hi"}'}, True, "hi", "", id="stdout-json"),
        pytest.param(
            STDOUT_JSON, {"stdout": b'warning\n{"is_error":false,"result":"hi"}\n'}, True, "hi", "", id="last-json-line"
        ),
        pytest.param(
            STDOUT_JSON, {"stdout": b'{"is_error":true,"result":"x"}'}, False, "x", "/is_error is true", id="error"
        ),
        pytest.param(STDOUT_JSON, {"stdout": b'{"is_error":0}'}, False, None, "/is_error is 0", id="0-is-not-false"),
        pytest.param(
            STDOUT_JSON, {"stdout": b"{..}", "stdout_bytes": 9999}, False, None, "middle was left out", id="too-much"
        ),
    ],
)
def test_outcome(rest, given, completed, answer, detail):
    outcome = read(rest, **given)
    assert (outcome.completed, outcome.answer) == (completed, answer)
    assert detail in outcome.detail if detail else outcome.detail == ""


def test_a_detail_stays_short():
    assert len(read(TEXT, stderr=b"x" * 10_000).detail) <= result.MOST_DETAIL


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        pytest.param("", (True, {"a/b": [1, {"~": None}], "": 3}), id="all"),
        pytest.param("/a~1b/0", (True, 1), id="escaped-slash"),
        pytest.param("/a~1b/1/~0", (True, None), id="a-null-that-is-there"),
        pytest.param("/a~1b/-1/~0", (True, None), id="last"),
        pytest.param("/", (True, 3), id="empty-key"),
        pytest.param("/a~1b/2", (False, None), id="beyond-the-end"),
        pytest.param("/a~1b/x", (False, None), id="no-index"),
        pytest.param("/a~1b/0/x", (False, None), id="into-a-number"),
    ],
)
def test_pointers(pointer, found):
    assert result.resolve({"a/b": [1, {"~": None}], "": 3}, pointer) == found


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b"[" * 100_000, id="nested too deep"),
        pytest.param(b'{"info": {"answer": 1, "status": 1' + b"1" * 5000 + b"}}", id="a monstrous number"),
    ],
)
def test_json_that_nobody_can_read_is_the_agents_failure(written):
    with pytest.raises(HarnessError) as caught:
        read(FILE_JSON, written=written)
    failure = caught.value.failure
    assert (failure.code, failure.blame, failure.phase) == ("bad_result", Blame.AGENT, Phase.RUN)
