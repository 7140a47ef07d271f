"""Tasks in Harbor's layout, run: tests come last, rewards are read as Harbor reads them."""

from pathlib import Path

import msgspec
import pytest
from runner_kit import attempt
from test_runner_harbor import write_task

from orchard_proxy.runner import harbor
from orchard_proxy.schema.enums import Blame, Phase


@pytest.fixture
def a_task(tmp_path):
    def make(**changed):
        (task,) = harbor.read(write_task(tmp_path / "add-two", **changed))
        return msgspec.structs.replace(task, timeout_s=20.0)

    return make


async def test_the_minimal_task_by_its_solution_and_by_nothing(house, a_task):
    _, found = await attempt(house, a_task(), "echo 42 > /app/sum.txt")
    assert (found.reward, found.failure) == (1.0, None)
    _, found = await attempt(house, a_task(), "true", number=2)
    assert (found.reward, found.failure) == (0.0, None)
    assert "No such file" in found.metadata["grade"]["output"]


@pytest.mark.parametrize(
    ("test_sh", "reward", "code"),
    [
        pytest.param("echo 0.5 > /logs/verifier/reward.txt; exit 3", 0.5, None, id="the exit code is ignored"),
        pytest.param(
            """echo '{"reward": 0.75, "style": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt""",
            0.75,
            None,
            id="json wins",
        ),
        pytest.param("exit 0", None, "no_reward", id="no file"),
        pytest.param("echo > /logs/verifier/reward.txt", None, "no_reward", id="empty"),
        pytest.param("echo nan > /logs/verifier/reward.txt", None, "bad_reward", id="nan"),
        pytest.param("mkdir /logs/verifier/reward.txt", None, "no_reward", id="no file but a folder"),
        pytest.param("sleep 60", None, "grade_timeout", id="too late"),
        pytest.param("kill -9 $PPID; kill -9 -1", None, "shim_killed", id="it kills all there is"),
    ],
)
async def test_what_test_sh_may_say(house, a_task, test_sh, reward, code):
    toml = "[verifier]\ntimeout_sec = 2.0\n"
    _, found = await attempt(house, a_task(**{"tests/test.sh": f"#!/bin/sh\n{test_sh}\n", "task.toml": toml}), "true")
    assert (found.reward, found.failure and found.failure.code) == (reward, code)
    assert found.failure is None or (found.failure.blame, found.failure.phase) == (Blame.TASK, Phase.GRADE)


async def test_where_test_sh_runs_and_what_it_sees(house, a_task):
    test_sh = (
        "#!/bin/bash\n"
        'test "$PWD" = /app && test "$WHO" = verifier && test "$FROM_IMAGE" = yes && test -z "$OPENAI_API_KEY" && '
        "test -f /tests/data/expected.txt && test -x /tests/helper.sh && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n"
    )
    toml = '[verifier]\nenv = {WHO = "verifier"}\n'
    docker = "FROM x\nENV FROM_IMAGE=yes\nWORKDIR /app\nCOPY start.txt .\n"
    task = a_task(
        **{
            "tests/test.sh": test_sh,
            "tests/data/expected.txt": "",
            "tests/helper.sh": "",
            "task.toml": toml,
            "environment/Dockerfile": docker,
            "environment/start.txt": "begin",
        }
    )
    (Path(task.grade.tests) / "helper.sh").chmod(0o755)
    _, found = await attempt(house, task, 'test "$(cat /app/start.txt)" = begin')
    assert (found.reward, found.failure) == (1.0, None), found.metadata


async def test_what_the_agent_leaves_for_the_grader_is_gone(house, a_task):
    """Rewards written early, tests planted early, folders that cannot be written, links that lead elsewhere."""
    script = """
        mkdir -p /logs/verifier /tests/data /app/fake
        echo '{"reward": 1}' > /logs/verifier/reward.json
        echo '{"reward": 1}' > /app/fake/reward.json
        echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
        echo planted > /tests/data/planted
        mkdir /tests/locked && touch /tests/locked/x && chmod 000 /tests/locked
        rm -rf /logs/verifier && ln -s /app/fake /logs/verifier
        chmod 500 /tests /logs
    """
    test_sh = "#!/bin/sh\nls -R /tests\ntest ! -e /tests/data && echo 0 > /logs/verifier/reward.txt\n"
    _, found = await attempt(house, a_task(**{"tests/test.sh": test_sh}), script)
    assert (found.reward, found.failure) == (0.0, None), found.metadata


async def test_the_agent_timeout_is_the_tasks_and_the_work_is_graded(house, tmp_path):
    (task,) = harbor.read(write_task(tmp_path / "t", **{"task.toml": "[agent]\ntimeout_sec = 1.0\n"}))
    _, found = await attempt(house, task, "echo 42 > /app/sum.txt; sleep 60")
    assert (found.reward, found.failure.code, found.failure.blame) == (1.0, "agent_timeout", Blame.AGENT)
