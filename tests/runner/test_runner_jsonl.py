import json
from pathlib import Path

import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import jsonl, loading
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade


def parse(*lines, folder=Path("/tasks")):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return jsonl.parse(text.encode(), name="tasks.jsonl", folder=folder)


def test_every_field():
    (task,) = parse(
        {
            "task_id": "fix/it",
            "prompt": "Fix it.",
            "files": {"a.py": "print()", "/tmp/b": ""},
            "setup": "git init",
            "setup_timeout_s": 5,
            "grade": {"command": "pytest", "timeout_s": 9, "reward": "stdout", "files": {"test_a.py": "pass"}},
            "timeout_s": 60,
            "workdir": "/repo",
            "rootfs": "roots/debian",
            "env": {"LANG": "C"},
            "metadata": {"source": "me", "n": 1},
        }
    )
    assert task.task_id == "fix/it"
    assert task.files == {"a.py": "print()", "/tmp/b": ""}
    assert (task.setup, task.setup_timeout_s, task.timeout_s) == ("git init", 5.0, 60.0)
    assert task.grade == CommandGrade(command="pytest", timeout_s=9, reward="stdout", files={"test_a.py": "pass"})
    assert (task.workdir, task.rootfs, task.env) == ("/repo", "/tasks/roots/debian", {"LANG": "C"})
    assert task.metadata == {"source": "me", "n": 1}


def test_the_least_task_has_no_reward():
    (task,) = parse({"task_id": "t", "prompt": "p"})
    assert (task.grade, task.timeout_s, task.setup) == (None, None, None)


@pytest.mark.parametrize("expected", ["42", 42, 42.5])
def test_an_expected_answer_may_be_a_number(expected):
    (task,) = parse({"task_id": "t", "prompt": "p", "expected_answer": expected, "answer_match": "number"})
    assert task.grade == AnswerGrade(expected=str(expected), match="number")


def test_blank_lines_windows_lines_and_a_byte_order_mark():
    text = b'\xef\xbb\xbf{"task_id": "a", "prompt": "p"}\r\n\r\n{"task_id": "b", "prompt": "p\\u2028q"}'
    tasks = jsonl.parse(text, name="t", folder=Path())
    assert [task.task_id for task in tasks] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param({"task_id": "t", "prompt": "p", "greade": {}}, "greade", id="misspelt key"),
        pytest.param({"task_id": "t", "prompt": "p", "grade": {"cmd": "x"}}, "cmd", id="misspelt key inside"),
        pytest.param({"prompt": "p"}, "task_id", id="no id"),
        pytest.param({"task_id": "t"}, "prompt", id="no prompt"),
        pytest.param({"task_id": "", "prompt": "p"}, "length", id="empty id"),
        pytest.param({"task_id": "t", "prompt": "p", "timeout_s": 0}, "> 0", id="no time"),
        pytest.param({"task_id": "t", "prompt": "p", "timeout_s": "1"}, "float", id="time as text"),
        pytest.param({"task_id": "t", "prompt": "p", "files": {"../x": ""}}, r"\.\.", id="path that leads out"),
        pytest.param({"task_id": "t", "prompt": "p", "files": {"x/": ""}}, "x/", id="path of a folder"),
        pytest.param({"task_id": "t", "prompt": "p", "workdir": "repo"}, "workdir", id="relative workdir"),
        pytest.param(
            {"task_id": "t", "prompt": "p", "grade": {"command": "x"}, "expected_answer": "1"}, "both", id="two graders"
        ),
        pytest.param('{"task_id": "t", "prompt": "p", "prompt": "q"}', "'prompt' is there twice", id="a key twice"),
        pytest.param(
            '{"task_id": "t", "prompt": "p", "grade": {"command": "a", "command": "b"}}', "'command'", id="twice inside"
        ),
        pytest.param(
            {"task_id": "t", "prompt": "p", "expected_answer": "ten", "answer_match": "number"}, "'ten'", id="no number"
        ),
        pytest.param("{", "truncated", id="not json"),
        pytest.param('["t"]', "object", id="not an object"),
    ],
)
def test_a_bad_line_is_named(line, says):
    good = {"task_id": "good", "prompt": "p"}
    with pytest.raises(UsageError, match=f"tasks.jsonl, line 3.*{says}"):
        parse(good, "", line)


def test_an_id_twice_is_named_with_both_lines():
    with pytest.raises(UsageError, match="line 2: task_id 't' is also on line 1"):
        parse({"task_id": "t", "prompt": "p"}, {"task_id": "t", "prompt": "q"})


def test_nothing_to_do_and_nowhere_to_look(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="holds no task"):
        loading.load(empty)
    with pytest.raises(UsageError, match="no such task file"):
        loading.load(tmp_path / "nowhere")


def test_a_rootfs_that_is_not_there(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "t", "prompt": "p", "rootfs": "roots/x"}')
    with pytest.raises(UsageError, match="task 't': no such rootfs folder"):
        loading.load(path)
    (tmp_path / "roots" / "x").mkdir(parents=True)
    assert loading.load(path)[0].rootfs == str(tmp_path / "roots" / "x")


def test_the_digest_sees_what_matters(tmp_path):
    first = parse({"task_id": "t", "prompt": "p"})
    assert loading.digest(first) == loading.digest(parse({"prompt": "p", "task_id": "t"}))
    assert loading.digest(first) != loading.digest(parse({"task_id": "t", "prompt": "q"}))
    assert loading.digest(first) != loading.digest(parse({"task_id": "t", "prompt": "p", "expected_answer": "1"}))
