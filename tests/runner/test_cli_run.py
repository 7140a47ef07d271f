"""`orchard run` as a user types it."""

import asyncio
import json
import os
import signal
import subprocess

import pytest
from runner_kit import write_harness, write_tasks
from support.children import ORCHARD, run

SCRIPT = 'ask "$PROMPT" | tee out.txt'
TASKS = [
    {"task_id": "file", "prompt": "say good", "grade": {"command": "grep -q good out.txt"}},
    {"task_id": "answer", "prompt": "say 42", "expected_answer": 42},
    {"task_id": "wrong", "prompt": "say 43", "expected_answer": 42},
]


@pytest.fixture
def words(tmp_path, policy):
    """The words of a run that works."""
    tasks = write_tasks(tmp_path / "tasks.jsonl", *TASKS)
    harness = write_harness(tmp_path / "shell", SCRIPT)
    return [str(tasks), "--harness", str(harness), "--upstream", policy, "--data", str(tmp_path / "data")]


def orchard_run(*words):
    return run("run", *words)


def test_a_run_as_json_and_resumed_as_a_table(words, tmp_path):
    done = orchard_run(*words, "--n", "2", "--json", "--run-id", "first")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["ok"], told["run_id"], told["harness"], told["model"]) == (True, "first", "shell", "tiny")
    assert {task["task_id"]: task["rewards"] for task in told["tasks"]} == {
        "file": [1.0, 1.0],
        "answer": [1.0, 1.0],
        "wrong": [0.0, 0.0],
    }
    assert told["total"]["pass_at_k"] == pytest.approx({"1": 2 / 3, "2": 2 / 3})
    assert told["total"]["sampled_tokens"] > 0
    assert "run first: 3 tasks, n = 2, shell, tiny" in done.stderr
    assert "6/6 rollouts" in done.stderr
    again = orchard_run("--resume", "--data", str(tmp_path / "data"))
    assert again.returncode == 0, again.stderr
    assert "6 done, 0 to do" in again.stderr
    lines = again.stdout.splitlines()
    assert lines[0].split() == ["task", "n", "passed", "reward", "pass@1", "pass@2", "tokens", "seconds", "failures"]
    assert lines[4].split()[:6] == ["total", "6", "4", "0.667", "0.667", "0.667"]
    assert "orchard export --data" in lines[-1]
    listed = json.loads(run("rollouts", "ls", "--data", str(tmp_path / "data"), "--json").stdout)
    assert len(listed) == 6
    out = tmp_path / "out"
    assert run("export", "--data", str(tmp_path / "data"), "--out", str(out)).returncode == 0
    checked = run("validate", str(out))
    assert checked.returncode == 0, checked.stdout


def test_through_a_proxy_that_runs_already(words, tmp_path, proxy):
    at = words.index("--upstream")
    words[at : at + 2] = ["--proxy", proxy.url, "--model", "tiny"]
    refused = orchard_run(*words)
    assert (refused.returncode, "--admin-key" in refused.stderr) == (2, True)
    done = orchard_run(*words, "--admin-key", proxy.admin_key, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"]["passed"] == 2
    assert not (tmp_path / "data" / "journal").exists(), "what was recorded is with the proxy"
    words[words.index("--model") + 1] = "tini"
    wrong = orchard_run(*words, "--admin-key", proxy.admin_key, "--run-id", "wrong")
    assert (wrong.returncode, "no such model, but tiny" in wrong.stderr) == (2, True), wrong.stderr
    assert not (tmp_path / "data" / "run" / "wrong.json").exists(), "nothing to go on with"


def test_both_kinds_of_settings(words, monkeypatch):
    monkeypatch.setenv("ORCHARD_RUN__N", "2")
    monkeypatch.setenv("ORCHARD_RUN__TIMEOUT_S", "11")
    done = orchard_run(*words, "--json")
    assert json.loads(done.stdout)["n"] == 2
    assert json.loads(orchard_run(*words, "--json", "--n", "1").stdout)["n"] == 1
    monkeypatch.setenv("ORCHARD_RUN__RETREIS", "1")
    assert "retreis" in orchard_run(*words).stderr


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        pytest.param({"tasks": "nowhere.jsonl"}, 2, "no such task file", id="no tasks"),
        pytest.param({"--harness": "reakt"}, 2, "Did you mean react", id="no such harness"),
        pytest.param({"--upstream": "localhost"}, 2, "--upstream is a URL", id="no url"),
        pytest.param({"--model": "tini"}, 2, "no such model, but tiny", id="no such model"),
        pytest.param({"--proxy": "http://127.0.0.1:9"}, 2, "not both", id="proxy and upstream"),
        pytest.param({"--n": "0"}, 2, "--n", id="n"),
        pytest.param({"--harness-arg": "x"}, 2, "NAME=VALUE", id="harness argument"),
        pytest.param({"--harness-arg": "x=1"}, 2, "no argument 'x'", id="unknown harness argument"),
        pytest.param({"--resume": None}, 2, "no run in", id="nothing to resume"),
        pytest.param({"--run-id": "a/b"}, 2, "--run-id takes", id="run id"),
    ],
)
def test_wrong_usage(words, change, status, says):
    for name, value in change.items():
        if name == "tasks":
            words[0] = value
        elif name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name] if value is None else [name, value]
    done = orchard_run(*words)
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_work_that_failed_is_exit_1(words, tmp_path):
    write_tasks(tmp_path / "tasks.jsonl", {"task_id": "t", "prompt": "p", "setup": "exit 1"})
    done = orchard_run(*words)
    assert done.returncode == 1
    assert "setup_failed 1" in done.stdout
    assert "--resume" not in done.stdout, "nothing that a new attempt would mend"


def test_changed_tasks_are_not_resumed(words, tmp_path):
    assert orchard_run(*words).returncode == 0
    write_tasks(tmp_path / "tasks.jsonl", *TASKS[:2])
    done = orchard_run("--resume", "--data", str(tmp_path / "data"))
    assert (done.returncode, "are not the ones" in done.stderr) == (2, True)


def start(words, log):
    """Start a run in a process group of its own, as a shell does: Ctrl-C reaches the whole group."""
    with log.open("wb") as told:
        command = [*ORCHARD, "run", *words, "--json"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, start_new_session=True)


async def until_said(log, word):
    async with asyncio.timeout(30):
        while word not in log.read_text():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("signals", [1, 2])
async def test_ctrl_c(words, tmp_path, signals):
    write_harness(tmp_path / "shell", "sleep 2.5; " + SCRIPT)
    log = tmp_path / "log"
    process = start([*words, "--concurrency", "2", "--n", "2"], log)
    await until_said(log, "orchard: run ")
    for _ in range(signals):
        os.killpg(process.pid, signal.SIGINT)
        await asyncio.sleep(0.3)
    out, _ = await asyncio.to_thread(process.communicate, timeout=30)
    told = json.loads(out)
    assert process.returncode == 1
    assert told["interrupted"]
    assert told["total"]["attempts"] == 2
    assert told["total"]["failures"] == ({} if signals == 1 else {"interrupted": 2})
    write_harness(tmp_path / "shell", "sleep 2.5; " + SCRIPT)
    done = await asyncio.to_thread(orchard_run, "--resume", "--data", str(tmp_path / "data"), "--json")
    again = json.loads(done.stdout)
    assert (done.returncode, again["total"]["finished"], again["total"]["passed"]) == (0, 6, 4)
    assert again["total"]["attempts"] == (6 if signals == 1 else 8)
