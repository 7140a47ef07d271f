"""The bundled harnesses at work: unmodified programs in sandboxes fix a failing test in a small git repository.

The model is scripted, everything else is real: install, sandbox, git, proxy, record, export. The first run on a machine
installs (mini-swe-agent: a minute, 750 MB).
"""

import json

import pyarrow.parquet as pq
import pytest
from support.children import orchard, run

SCRIPT = r"""
[[rule]]
any = 'a malformed call'
last = 'Tool call error|must be a JSON object'
tool_calls = [{name = "bash", arguments = {command = "touch repaired; echo done-it"}}]

[[rule]]
any = 'a malformed call'
turn = 1
tool_calls = [{name = "bash", arguments = '{"command": "echo'}]

[[rule]]
any = 'a malformed call'
last_role = "tool"
last = 'done-it'
tool_calls = [{name = "bash", arguments = {command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}]

[[rule]]
any = 'a malformed call'
last = 'COMPLETE_TASK'
last_role = "tool"
text = "Done."

[[rule]]
system = 'Action: bash\['
turn = 1
text = '''Thought: which test fails?
Action: bash[ls && sh test.sh]'''

[[rule]]
system = 'Action: bash\['
last = 'FAILED'
text = '''Thought: a minus.
Action: bash[[ -f calc.py ] && sed -i 's/a - b/a + b/' calc.py && sh test.sh && git commit -qam Fix]'''

[[rule]]
system = 'Action: bash\['
last = 'OK'
text = '''Thought: it passes.
Answer: fixed'''

[[rule]]
turn = 1
text = "  Let me see what fails.\n\n"
tool_calls = [{name = "bash", arguments = '{"command":   "ls && sh test.sh"  }'}]

[[rule]]
turn = 2
last = 'FAILED'
reasoning = "A minus where a plus belongs."
text = "I see."
tool_calls = [{name = "bash", arguments = {command = "sed -i s/-/+/ calc.py && sh test.sh && git commit -qam Fix"}}]

[[rule]]
turn = 3
last = 'OK'
text = "It passes."
tool_calls = [{name = "bash", arguments = {command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo fixed"}}]

[[rule]]
turn = 4
text = "fixed"
"""
CALC = "def add(a, b):\n    return a - b\n"
TEST = """import unittest
from calc import add

class TestAdd(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 2), 4)
"""
SETUP = "git init -q && git config user.email a@b.c && git config user.name A && git add . && git commit -qm one"
GRADE = 'python3 -B -m unittest && test -z "$(git status --porcelain)" && test "$(git log -1 --format=%s)" = Fix'
FILES = {
    "calc.py": CALC,
    "test_calc.py": TEST,
    # -B: an edit of the same size within the same second leaves bytecode that Python takes for current.
    "test.sh": "python3 -B -m unittest 2>&1 | tail -3\n",
    ".gitignore": "__pycache__\n",
}
REPO = {
    "task_id": "repo",
    "prompt": "A test of this repository fails. Fix the code and commit it.",
    "files": FILES,
    "setup": SETUP,
    "grade": {"command": GRADE},
}
MALFORMED = {"task_id": "malformed", "prompt": "Survive a malformed call.", "grade": {"command": "test -f repaired"}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    (folder / "script.toml").write_text(SCRIPT)
    with orchard("policy", "tiny", "--script", str(folder / "script.toml"), folder=folder) as url:
        yield url


@pytest.fixture
def run_task(tmp_path, policy):
    """Run one task under a harness; return the run's summary, its rollout, the lines of its calls, and its samples."""

    def ran(task, *harness):
        tasks, data, out = tmp_path / "tasks.jsonl", str(tmp_path / "data"), tmp_path / "out"
        tasks.write_text(json.dumps(task))
        words = ["run", str(tasks), "--upstream", policy, "--data", data, "--json", "--harness", *harness]
        done = run(*words, timeout_s=800)
        assert done.returncode == 0, done.stderr
        (ended,) = json.loads(done.stdout)["tasks"]
        shown = run("rollouts", "show", ended["rollout_ids"][-1], "--data", data, "--json")
        exported = run("export", "--data", data, "--out", str(out))
        assert exported.returncode == 0, exported.stderr
        checked = run("validate", str(out))
        assert checked.returncode == 0, checked.stdout + checked.stderr
        return ended, json.loads(shown.stdout), pq.read_table(out / "samples").to_pylist()

    return ran


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("harness", "answer", "calls"),
    [
        pytest.param(["react"], "fixed", 4, id="react"),
        pytest.param(["react", "--harness-arg", "stream=yes"], "fixed", 4, id="react-stream"),
        pytest.param(["react", "--harness-arg", "mode=text"], "fixed", 3, id="react-text"),
        pytest.param(["mini-swe-agent"], "fixed", 3, id="mini-swe-agent"),
    ],
)
def test_a_repository_is_fixed_and_every_token_is_in_one_row(run_task, harness, answer, calls):
    ended, shown, samples = run_task(REPO, *harness)
    assert ended["rewards"] == [1.0], shown["metadata"]
    assert (shown["status"], shown["harness"], shown["failure"]) == ("completed", harness[0], None)
    assert shown["metadata"]["answer"] == answer
    lines = shown["choices"]
    assert [line["parent"] for line in lines] == [None, *range(calls - 1)]
    fates = {(line["outcome"], line["delivery"], *line["problems"]) for line in lines}
    assert fates == {("complete", "confirmed")}
    (sample,) = samples
    assert sample["reward"] == 1.0
    assert sum(sample["loss_mask"]) == sum(line["sampled"] for line in lines) == ended["totals"]["sampled_tokens"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harness", ["react", "mini-swe-agent"])
def test_a_malformed_tool_call_is_survived(run_task, harness):
    """The engine refuses such a history, so the proxy repairs its copy, or the harness drops the turn: another row."""
    ended, shown, samples = run_task(MALFORMED, harness)
    assert (ended["rewards"], shown["status"]) == ([1.0], "completed"), shown
    assert len(samples) == 2
    assert sum(sum(sample["loss_mask"]) for sample in samples) == ended["totals"]["sampled_tokens"]
