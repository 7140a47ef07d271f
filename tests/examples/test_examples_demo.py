"""The parts of `make demo` that take seconds: its tasks under scripted policies in real sandboxes, its table, its lock.

`make demo` itself, with a real model, takes minutes and is run by hand and by whoever tries Orchard.
"""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import demo_table
import demo_tasks
import pytest
from support import children

pytestmark = pytest.mark.timeout(600)  # the first run on a machine installs the harnesses
KNOWS_THE_FORM = r"""
[[rule]]
any = 'Observation: 75 ash\.txt'
last = '^Question: How much is (.*)\?\Z'
text = "Thought: I compute it.\nAction: bash[expr {1}]"

[[rule]]
last = '^Question: What does (\S+) say\?'
text = "Thought: I read the file.\nAction: bash[cat {1}]"

[[rule]]
last = '^Question: How many lines has (\S+)\?'
text = "Thought: I count the lines.\nAction: bash[wc -l {1}]"

[[rule]]
last = '^Observation: (\S+)'
text = "Answer: {1}"
"""
GIVES_UP = """
[[rule]]
tool_calls = [{name = "bash", arguments = {command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]
"""


def run(folder, tasks, script, harness, *more):
    """Run tasks once each and export them; return the rows of the demo's table and what `prove` says of the rows."""
    lines = demo_tasks.write(tasks, folder / "tasks.jsonl")
    with children.orchard("policy", "tiny", "--script", str(script), folder=folder) as engine:
        where = ["--upstream", engine, "--data", str(folder / "data"), "--timeout", "60"]
        done = children.run("run", str(lines), "--harness", harness, *more, *where, timeout_s=500)
        assert done.returncode == 0, done.stderr
        assert children.run("export", "--data", str(folder / "data"), "--out", str(folder / "out")).returncode == 0
        proof = children.run("prove", str(folder / "out"), "--upstream", engine)
    return demo_table.read(folder / "out"), proof.stdout.splitlines()[-1]


@pytest.mark.parametrize("harness", ["mini-swe-agent", "react"])
def test_an_agent_that_looks_mends_the_repository(harness, tmp_path):
    rows, proof = run(tmp_path, demo_tasks.repair(), demo_tasks.SCRIPT, harness)
    assert [(row.task, row.harness, row.reward, row.branches) for row in rows] == [("repair", harness, 1.0, 1)]
    assert rows[0].trained == rows[0].sampled > 100
    assert proof == "re-feed: ok"


def test_a_repository_that_nobody_mends_is_worth_nothing(tmp_path):
    script = tmp_path / "gives_up.toml"
    script.write_text(GIVES_UP)
    rows, _ = run(tmp_path, demo_tasks.repair(), script, "mini-swe-agent")
    assert [row.reward for row in rows] == [0.0]


def test_every_question_can_be_answered_in_the_form_of_the_worked_examples(tmp_path):
    script = tmp_path / "form.toml"
    script.write_text(KNOWS_THE_FORM)
    arguments = [f"--harness-arg={name}={value}" for name, value in demo.REACT.items()]
    rows, proof = run(tmp_path, demo_tasks.questions(), script, "react", *arguments)
    assert {row.task: row.reward for row in rows} == dict.fromkeys(demo_tasks.QUESTIONS, 1.0)
    assert all(row.calls == 2 and row.branches == 1 and row.masked == 0 for row in rows)
    assert proof == "re-feed: ok"


def test_worked_examples_are_none_of_the_questions():
    examples = json.loads(demo_tasks.questions()[0]["files"]["examples.json"])
    assert [message["role"] for message in examples] == ["user", "assistant"] * (len(examples) // 2)
    asked = {message["content"].removeprefix("Question: ") for message in examples}
    assert not asked & set(demo_tasks.QUESTIONS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollouts": 1}, "rollouts in the export"),
        ({"trained": 0}, "without a token"),
        ({"reward": 0.5}, "mended in 50% of the attempts"),
    ],
)
def test_a_demo_that_shows_less_fails(change, said):
    good = {"harness": "h", "calls": 8, "sampled": 9, "trained": 9, "masked": 0, "branches": 4, "reward": 1.0}
    counts = {**dict.fromkeys(demo_tasks.QUESTIONS, demo.ATTEMPTS), "repair": demo.REPAIRS}
    rows = [demo_table.Row(task=task, rollouts=count, **good) for task, count in counts.items()]
    demo.check(rows)
    vars(rows[-1]).update(change)
    with pytest.raises(demo.DemoError, match=said):
        demo.check(rows)


def copied(tree):
    """Return the demo in a tree of its own: its data is there."""
    shutil.copytree(Path(demo.__file__).parent, tree / "examples")
    (tree / "build").mkdir()
    return [sys.executable, str(tree / "examples" / "demo.py")]


def test_a_second_demo_in_the_same_tree_is_refused(tmp_path):
    command = copied(tmp_path)
    with (tmp_path / "build" / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "another demo is running in this tree" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_demo_that_is_stopped_leaves_no_server(number, tmp_path):
    with subprocess.Popen(copied(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()
        while not (tmp_path / "build" / "demo" / "smollm2.port").exists():
            assert process.poll() is None
            assert time.monotonic() < began + 120
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 1
        assert process.stderr.read().endswith("demo: interrupted\n")
    assert children.pids_of("--port-file", str(tmp_path / "build" / "demo" / "smollm2.port")) == []
