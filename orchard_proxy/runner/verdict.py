"""Whose fault a run of a harness was. Pure.

An exit code says little, so `completed` of the harness' result decides whether there is a failure, and the record of
the calls decides whether the agent or what it depends on is to blame.
"""

from collections.abc import Sequence

from orchard_proxy.runner.control import ListedCall
from orchard_proxy.schema.enums import Blame, Outcome, Phase, RolloutStatus
from orchard_proxy.schema.launch import HarnessResult
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult

_NOT_STARTED = frozenset({126, 127})
"""What a shell says of a command that cannot be executed, or is not there."""
_ENGINE_FAILED = frozenset({Outcome.ENGINE_ERROR, Outcome.UPSTREAM_CUT})


def failure_of_run(run: ExecResult, result: HarnessResult, timeout_s: float) -> Failure | None:
    """Return what the agent is blamed for, as long as nobody else is; None when it did its work."""
    if run.timed_out:
        return _agent("agent_timeout", f"still running after {timeout_s:g} s")
    if result.completed:
        return None
    if run.signal is not None:
        return _agent("agent_killed", f"ended by signal {run.signal}; {result.detail}".removesuffix("; "))
    return _agent("agent_failed", result.detail or f"exit code {run.exit_code}")


def _agent(code: str, message: str) -> Failure:
    return Failure(code=code, blame=Blame.AGENT, phase=Phase.RUN, message=message)


def reassigned(
    failure: Failure,
    calls: Sequence[ListedCall],
    *,
    exit_code: int | None,
    proxy_restarted: bool,
    not_ready: str | None,
) -> Failure:
    """Give the blame to the proxy or to the policy server where the record says that they failed the agent.

    `calls` are in commit order; `not_ready` is why the policy server cannot be asked now, if it cannot.
    """
    if proxy_restarted:
        return Failure(
            code="proxy_restarted",
            blame=Blame.INFRA,
            phase=Phase.RUN,
            retryable=True,
            message=f"the proxy was started again while the agent ran, which then failed: {failure.message}",
        )
    if not calls and exit_code in _NOT_STARTED:
        return Failure(code="launch_failed", blame=Blame.CLIENT, phase=Phase.LAUNCH, message=failure.message)
    last = calls[-1] if calls else None
    if last is not None and last.outcome in _ENGINE_FAILED and _is_servers_fault(last.http_status):
        return _policy("policy_failed", f"the last call ended as {last.outcome}", failure)
    if not_ready is not None:
        return _policy("policy_unavailable", not_ready, failure)
    return failure


def _is_servers_fault(status: int | None) -> bool:
    """Tell by a failed call's status: a refused request (4xx) is the client's; none means that nobody answered."""
    return status is None or status in {200, 429} or status >= 500


def _policy(code: str, why: str, failure: Failure) -> Failure:
    message = f"{why}; the agent then failed: {failure.message}"
    return Failure(code=code, blame=Blame.POLICY, phase=Phase.RUN, message=message)


def is_graded(failure: Failure | None) -> bool:
    """Say whether the work counts: an agent that failed is graded by what it left, a fault of others is not."""
    return failure is None or failure.blame is Blame.AGENT


def status_of(failure: Failure | None) -> RolloutStatus:
    """Return how the rollout ends."""
    return RolloutStatus.COMPLETED if failure is None else RolloutStatus.FAILED


def is_retried(failure: Failure | None) -> bool:
    """Say whether a new attempt is worth it: infrastructure only, never the agent's own faults."""
    return failure is not None and failure.blame is Blame.INFRA and failure.retryable
