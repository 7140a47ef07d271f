import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import plan
from orchard_proxy.runner.control import Listed
from orchard_proxy.runner.plan import RunPlan
from orchard_proxy.runner.tasks import Task
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.records import Failure

TASKS = [Task(task_id="a", prompt="p"), Task(task_id="b/c d", prompt="p")]
SLOTS = plan.slots(TASKS, 2)
PLAN = RunPlan(
    run_id="run",
    tasks="/t.jsonl",
    tasks_sha256="x",
    harness="react",
    harness_at="react",
    harness_version="1",
    model="m",
    n=2,
    timeout_s=1.0,
    retries=2,
    concurrency=4,
    started_s=1.0,
)
RUNNING = (RolloutStatus.RUNNING, None, False)
DONE = (RolloutStatus.COMPLETED, None, False)
AGENT = (RolloutStatus.FAILED, Blame.AGENT, False)
TASK = (RolloutStatus.FAILED, Blame.TASK, False)
POLICY = (RolloutStatus.FAILED, Blame.POLICY, False)
INFRA = (RolloutStatus.FAILED, Blame.INFRA, True)
BROKEN = (RolloutStatus.FAILED, Blame.INFRA, False)
KILLED = (RolloutStatus.ABORTED, Blame.INFRA, True)


def rollout(slot, attempt, how):
    status, blame, retryable = how
    failure = blame and Failure(code="c", blame=blame, phase=Phase.RUN, retryable=retryable)
    name = plan.rollout_id("run", plan.Job(slot=slot, attempt=attempt))
    return Listed(rollout_id=name, attempt=attempt, status=status, failure=failure, run_id="run")


def test_slots_are_in_the_order_of_the_tasks():
    assert [(slot.task.task_id, slot.sample) for slot in SLOTS] == [("a", 0), ("a", 1), ("b/c d", 0), ("b/c d", 1)]


@pytest.mark.parametrize(
    ("attempts", "next_attempt", "orphans"),
    [
        pytest.param([], 1, [], id="never begun"),
        pytest.param([DONE], None, [], id="done"),
        pytest.param([AGENT], None, [], id="the agent failed: done"),
        pytest.param([TASK], None, [], id="the task is broken: done"),
        pytest.param([POLICY], None, [], id="the policy failed: done"),
        pytest.param([BROKEN], None, [], id="a fault that a retry does not mend"),
        pytest.param([RUNNING], 2, [1], id="the runner was killed"),
        pytest.param([INFRA], 2, [], id="a retry was due"),
        pytest.param([INFRA, INFRA, INFRA], 4, [], id="out of retries: resuming gives new ones"),
        pytest.param([INFRA, DONE], None, [], id="done at the second attempt"),
        pytest.param([KILLED, RUNNING], 3, [2], id="killed twice"),
        pytest.param([RUNNING, DONE], None, [1], id="an older one is open"),
    ],
)
def test_what_is_left_of_a_slot(attempts, next_attempt, orphans):
    slot = SLOTS[2]
    known = [rollout(slot, number, how) for number, how in enumerate(attempts, 1)]
    left = plan.left("run", [slot], reversed(known))
    assert [job.attempt for job in left.jobs] == ([] if next_attempt is None else [next_attempt])
    assert sorted(orphan.attempt for orphan in left.orphans) == orphans
    assert left.done == (next_attempt is None)


def test_slots_do_not_mix():
    known = [rollout(SLOTS[0], 1, DONE), rollout(SLOTS[3], 1, RUNNING)]
    left = plan.left("run", SLOTS, known)
    assert [(job.slot, job.attempt) for job in left.jobs] == [(SLOTS[1], 1), (SLOTS[2], 1), (SLOTS[3], 2)]


@pytest.mark.parametrize("task_id", ["a", "org/name", "ü", "x" * 300, "a b", "a-b", "../..", "-", ":"])
def test_a_rollouts_id_is_one_that_the_proxy_takes(task_id):
    job = plan.Job(slot=plan.Slot(task=Task(task_id=task_id, prompt="p"), sample=12345), attempt=12345)
    name = plan.rollout_id("r" * 40, job)
    assert len(name) <= 128
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


def test_ids_differ_where_tasks_differ():
    names = ["a b", "a/b", "a-b", "a_b", "a%b", "x" * 65, "x" * 66]
    assert len({plan.slug(name) for name in names}) == len(names)


def test_a_plan_survives_the_disk(tmp_path):
    plan.save(PLAN, tmp_path)
    assert plan.load(tmp_path, "run") == PLAN
    plan.save(
        RunPlan(**{**{f: getattr(PLAN, f) for f in PLAN.__struct_fields__}, "run_id": "new", "started_s": 2.0}),
        tmp_path,
    )
    assert plan.load(tmp_path, None).run_id == "new"


@pytest.mark.parametrize(("run_id", "says"), [("other", "no run 'other'"), ("../x", "--run-id"), (None, "no run in")])
def test_a_plan_that_is_not_there(tmp_path, run_id, says):
    with pytest.raises(UsageError, match=says):
        plan.load(tmp_path, run_id)


def test_a_damaged_plan_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.json").write_text("{")
    with pytest.raises(UsageError, match=r"x\.json"):
        plan.load(tmp_path, "x")


@pytest.mark.parametrize("field", ["tasks_sha256", "harness", "harness_version", "model", "n", "timeout_s", "rootfs"])
def test_a_resumed_run_is_the_same_run(field):
    fields = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__}
    changed = RunPlan(**{**fields, field: 7 if field in ("n", "timeout_s") else "other"})
    with pytest.raises(UsageError, match="tasks" if field == "tasks_sha256" else field):
        plan.check_same(PLAN, changed)
    plan.check_same(
        PLAN, RunPlan(**{**fields, "concurrency": 1, "harness_at": "/elsewhere", "retries": 0, "upstream": "u"})
    )
