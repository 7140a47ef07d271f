import json

import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import orders, plan
from orchard_proxy.runner.orders import Orders


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"task_id": "t", "prompt": "p"}))
    return path


def begin(tmp_path, tasks, **said):
    made = orders.draft(Orders(data_dir=tmp_path / "data", tasks=tasks, harness="react", run_id="r", n=3, **said))
    done = orders.settled(made, harness="react", harness_version="1.0", model="m")
    plan.save(done, tmp_path / "data")
    return done


def resume(tmp_path, **said):
    made = orders.draft(Orders(data_dir=tmp_path / "data", resume=True, **said))
    name = made.plan.harness_at.rpartition("/")[2]
    return orders.settled(made, harness=name, harness_version="1.0", model=made.plan.model)


def test_a_new_run_has_the_defaults(tmp_path, tasks):
    made = begin(tmp_path, tasks)
    assert (made.n, made.timeout_s, made.retries, made.concurrency) == (3, 1800.0, 2, 4)
    assert made.tasks == str(tasks)


def test_a_run_is_resumed_with_nothing_said(tmp_path, tasks):
    assert resume_equal(begin(tmp_path, tasks), resume(tmp_path))
    assert resume_equal(plan.load(tmp_path / "data", "r"), resume(tmp_path, run_id="r"))


def resume_equal(one, other):
    return one == other


def test_what_may_change_when_a_run_is_resumed(tmp_path, tasks):
    begin(tmp_path, tasks, upstream="http://a")
    made = resume(tmp_path, concurrency=9, retries=0, proxy="http://b", n=3)
    assert (made.concurrency, made.retries, made.upstream, made.proxy) == (9, 0, None, "http://b")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"n": 4}, "n 3, not 4"),
        ({"harness": "other"}, "harness 'react'"),
        ({"model": "x"}, "model"),
        ({"run_id": "q"}, "no run 'q'"),
    ],
)
def test_what_may_not(tmp_path, tasks, said, says):
    begin(tmp_path, tasks)
    with pytest.raises(UsageError, match=says):
        resume(tmp_path, **said)


def test_changed_tasks_are_another_run(tmp_path, tasks):
    begin(tmp_path, tasks)
    tasks.write_text(json.dumps({"task_id": "t", "prompt": "changed"}))
    with pytest.raises(UsageError, match="are not the ones that run r began with"):
        resume(tmp_path)


def test_another_version_of_the_harness_is_another_run(tmp_path, tasks):
    begin(tmp_path, tasks)
    made = orders.draft(Orders(data_dir=tmp_path / "data", resume=True))
    with pytest.raises(UsageError, match="harness_version"):
        orders.settled(made, harness="react", harness_version="2.0", model="m")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"harness": None}, "--harness"),
        ({"tasks": None}, "TASKS"),
        ({"run_id": "a b"}, "--run-id"),
        ({"run_id": "r"}, "add --resume"),
    ],
)
def test_what_a_new_run_needs(tmp_path, tasks, said, says):
    begin(tmp_path, tasks)
    with pytest.raises(UsageError, match=says):
        orders.draft(Orders(**{"data_dir": tmp_path / "data", "tasks": tasks, "harness": "react", **said}))


@pytest.mark.parametrize("given", ["./mine/react", "mine/react"])
def test_a_harness_of_ones_own_is_found_again_from_another_folder(tmp_path, tasks, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = orders.draft(Orders(data_dir=tmp_path / "data", tasks=tasks, harness=given))
    assert made.plan.harness_at == str(tmp_path / "mine" / "react")
