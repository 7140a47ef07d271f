"""The same tasks under two real harnesses, with only the flag changed."""

import json

import pytest
from runner_kit import write_tasks
from support.children import orchard, run

SCRIPT = r"""
[[rule]]
turn = 1
last = 'Write (?P<what>\d+) into (?P<file>\w+\.txt)'
tool_calls = [{name = "bash", arguments = {command = "echo {what} > {file}; cat {file}"}}]

[[rule]]
turn = 2
any = 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'
tool_calls = [{name = "bash", arguments = {command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]

[[rule]]
turn = 2
text = "It is written."
"""
TASKS = [
    {
        "task_id": name,
        "prompt": f"Write {number} into {name}.txt.",
        "grade": {"command": f'test "$(cat {name}.txt)" = {number}'},
        "timeout_s": 60,
    }
    for name, number in (("one", 11), ("two", 22))
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "script.toml").write_text(SCRIPT)
    with orchard("policy", "tiny", "--script", str(folder / "script.toml"), folder=folder) as url:
        yield url


@pytest.mark.timeout(400)
@pytest.mark.parametrize("harness", ["react", "mini-swe-agent"])
def test_the_same_tasks(tmp_path, scripted, harness):
    tasks = write_tasks(tmp_path / "tasks.jsonl", *TASKS)
    words = [str(tasks), "--upstream", scripted, "--data", str(tmp_path / "data"), "--n", "2", "--json"]
    done = run("run", *words, "--harness", harness, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["harness"], told["total"]["passed"], told["total"]["failures"]) == (harness, 4, {})
    out = tmp_path / "out"
    assert run("export", "--data", str(tmp_path / "data"), "--out", str(out)).returncode == 0
    assert run("validate", str(out)).returncode == 0
    rows = json.loads(run("rollouts", "ls", "--data", str(tmp_path / "data"), "--json").stdout)
    assert all(row["calls"] == 2 for row in rows)
