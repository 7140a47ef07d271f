import pytest
from msgspec import Raw
from msgspec.structs import replace

from orchard_proxy.record.rollout_state import created, finished
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.frames import FinishFrame, RolloutFrame
from orchard_proxy.schema.records import Failure, Rollout

FAILURE = Failure(code="x", blame=Blame.AGENT, phase=Phase.RUN)


def finish(rollout: Rollout, **over) -> Rollout:
    known = {"rollout_id": "r", "finished_us": 5, "status": RolloutStatus.COMPLETED, **over}
    return finished(FinishFrame(**known), rollout)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param(b"{}", b"{}", b"{}", id="nothing"),
        pytest.param(b'{"a": 1.50}', b"{}", b'{"a": 1.50}', id="nothing-added-nothing-respelt"),
        pytest.param(b'{"a":1.50,"b":{"x":1}}', b'{"b":{"y":2}}', b'{"a":1.50,"b":{"y":2}}', id="top-level-only"),
        pytest.param(b"{}", b'{"b":2}', b'{"b":2}', id="added"),
        pytest.param(b'{"a":1}', b"[1]", b'{"a":1}', id="not-an-object"),
        pytest.param(b"null", b'{"b":2}', b'{"b":2}', id="onto-no-object"),
    ],
)
def test_metadata_merge_by_their_top_level_keys(old, new, expected):
    assert bytes(finish(Rollout(rollout_id="r", metadata=Raw(old)), metadata=new).metadata) == expected


def test_the_last_writer_wins_and_what_is_not_said_stays():
    once = finish(Rollout(rollout_id="r"), reward=0.25, rewards={"a": 1.0})
    twice = finish(once, finished_us=9, version=2, rewards={"b": 2.0})
    assert (twice.reward, twice.finished_us, twice.reward_version) == (0.25, 5, 2)
    assert [(one.name, one.set_us, one.version) for one in twice.rewards] == [("a", 5, 1), ("b", 9, 2)]
    assert finish(twice, reward=0.0, version=3).reward == 0.0


def test_a_failure_stays_while_the_status_does():
    failed = finish(Rollout(rollout_id="r"), status=RolloutStatus.FAILED, failure=FAILURE)
    assert finish(failed, status=RolloutStatus.FAILED).failure == FAILURE
    assert finish(failed, status=RolloutStatus.COMPLETED).failure is None
    other = replace(FAILURE, code="y")
    assert finish(failed, status=RolloutStatus.ABORTED, failure=other).failure == other


def test_creation_behind_a_finish_keeps_the_reward():
    known = finish(Rollout(rollout_id="r", model="m"), reward=1.0, metadata=b'{"b":2}')
    frame = RolloutFrame(rollout_id="r", created_us=3, group_id="g", metadata=b'{"a":1,"b":1}')
    rollout = created(frame, known)
    assert (rollout.reward, rollout.group_id, rollout.started_us, rollout.model) == (1.0, "g", 3, "m")
    assert bytes(rollout.metadata) == b'{"a":1,"b":2}'
