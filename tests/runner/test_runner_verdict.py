import pytest

from orchard_proxy.runner import verdict
from orchard_proxy.runner.control import ListedCall
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.launch import HarnessResult
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult

FAILED = Failure(code="agent_failed", blame=Blame.AGENT, phase=Phase.RUN, message="it fell")


def ran(**fields):
    return ExecResult(**{"exit_code": 0, "duration_s": 1.0, **fields})


def result(*, completed):
    return HarnessResult(completed=completed, answer=None, detail="why")


@pytest.mark.parametrize(
    ("run", "completed", "code"),
    [
        pytest.param(ran(), True, None, id="fine"),
        pytest.param(ran(exit_code=1), True, None, id="an exit code alone is no failure"),
        pytest.param(ran(), False, "agent_failed", id="exit 0 and no result"),
        pytest.param(ran(exit_code=124), False, "agent_failed", id="124 is an exit code like any other"),
        pytest.param(ran(exit_code=None, signal=9), False, "agent_killed", id="killed by a signal"),
        pytest.param(ran(exit_code=None, signal=15, timed_out=True), True, "agent_timeout", id="too late"),
    ],
)
def test_what_the_agent_is_blamed_for(run, completed, code):
    failure = verdict.failure_of_run(run, result(completed=completed), 5.0)
    assert (failure and failure.code) == code
    assert failure is None or (failure.blame, failure.phase, failure.retryable) == (Blame.AGENT, Phase.RUN, False)


def call(outcome, status=None):
    return ListedCall(outcome=outcome, http_status=status)


@pytest.mark.parametrize(
    ("calls", "exit_code", "restarted", "not_ready", "code", "blame"),
    [
        pytest.param([call("complete", 200)], 1, False, None, "agent_failed", Blame.AGENT, id="the agent"),
        pytest.param([call("engine_error", 400)], 1, False, None, "agent_failed", Blame.AGENT, id="a bad request"),
        pytest.param([call("engine_error", 500)], 1, False, None, "policy_failed", Blame.POLICY, id="5xx"),
        pytest.param([call("engine_error", 429)], 1, False, None, "policy_failed", Blame.POLICY, id="overload"),
        pytest.param([call("engine_error")], 1, False, None, "policy_failed", Blame.POLICY, id="nobody answered"),
        pytest.param([call("upstream_cut", 200)], 1, False, None, "policy_failed", Blame.POLICY, id="cut off"),
        pytest.param(
            [call("engine_error", 500), call("complete", 200)],
            1,
            False,
            None,
            "agent_failed",
            Blame.AGENT,
            id="overcome",
        ),
        pytest.param([], 1, False, "down", "policy_unavailable", Blame.POLICY, id="not there"),
        pytest.param([call("crashed")], 1, True, "not probed", "proxy_restarted", Blame.INFRA, id="the proxy died"),
        pytest.param([], 127, False, None, "launch_failed", Blame.CLIENT, id="no such program"),
        pytest.param([call("complete", 200)], 127, False, None, "agent_failed", Blame.AGENT, id="127 of its own"),
        pytest.param([], 1, False, None, "agent_failed", Blame.AGENT, id="it never called"),
    ],
)
def test_who_else_is_to_blame(  # noqa: PLR0917 (a table)
    calls, exit_code, restarted, not_ready, code, blame
):
    found = verdict.reassigned(FAILED, calls, exit_code=exit_code, proxy_restarted=restarted, not_ready=not_ready)
    assert (found.code, found.blame) == (code, blame)
    assert "it fell" in found.message
    assert verdict.is_graded(found) == (blame is Blame.AGENT)
    assert verdict.is_retried(found) == (blame is Blame.INFRA)


def test_how_a_rollout_ends():
    assert verdict.status_of(None) is RolloutStatus.COMPLETED
    assert verdict.status_of(FAILED) is RolloutStatus.FAILED
    assert verdict.is_graded(None)
    assert not verdict.is_retried(None)
