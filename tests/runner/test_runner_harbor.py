import logging
import shutil

import pytest

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import harbor, loading
from orchard_proxy.runner.tasks import HarborGrade, Upload

MINIMAL = {
    "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n[environment]\nmemory_mb = 512\n",
    "instruction.md": "Write the sum of 19 and 23 into /app/sum.txt.",
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
    "tests/test.sh": '#!/bin/sh\n[ "$(cat /app/sum.txt)" = 42 ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "echo 42 > /app/sum.txt\n",
}


def write_task(folder, **changed):
    """Write a task folder; a value of None leaves a file out."""
    for name, text in {**MINIMAL, **changed}.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def test_the_minimal_task(tmp_path):
    (task,) = loading.load(write_task(tmp_path / "add-two"))
    assert (task.task_id, task.prompt) == ("add-two", MINIMAL["instruction.md"])
    assert (task.workdir, task.timeout_s, task.memory_bytes) == ("/app", 60.0, 512 * 1024 * 1024)
    assert task.grade == HarborGrade(tests=str(tmp_path / "add-two" / "tests"), timeout_s=30.0)
    assert set(task.scratch) == {"/tests", "/logs"}
    assert (task.uploads, task.warnings) == ([], [])


def test_an_empty_task_toml_gets_harbors_defaults(tmp_path):
    (task,) = harbor.read(write_task(tmp_path / "t", **{"task.toml": "", "environment/Dockerfile": None}))
    assert (task.timeout_s, task.grade.timeout_s, task.memory_bytes) == (None, 600.0, None)
    assert task.workdir == "/app"


def test_unknown_keys_are_ignored_and_names_and_metadata_kept(tmp_path):
    toml = (
        'version = "1.0"\nunknown = 1\n[task]\nname = "me/add"\nkeywords = ["a"]\n[metadata]\nlevel = "easy"\n'
        '[environment]\nworkdir = "/w"\nallow_internet = true\nmemory = "2G"\nnew_key = 1\n'
        'env = {A = "${NOT_SET_HERE:-d}"}\n'
        '[verifier]\nenv = {B = "b"}\n'
    )
    (task,) = harbor.read(write_task(tmp_path / "t", **{"task.toml": toml}))
    assert (task.task_id, task.metadata, task.workdir) == ("me/add", {"level": "easy"}, "/w")
    assert (task.memory_bytes, task.env, task.grade.env) == (2 * 1024**3, {"A": "d"}, {"B": "b"})


def test_variables_of_the_host(tmp_path, monkeypatch):
    folder = write_task(tmp_path / "t", **{"task.toml": '[verifier]\nenv = {K = "${THE_KEY}"}\n'})
    with pytest.raises(UsageError, match="THE_KEY"):
        harbor.read(folder)
    monkeypatch.setenv("THE_KEY", "k")
    assert harbor.read(folder)[0].grade.env == {"K": "k"}


def test_what_the_dockerfile_copies_is_uploaded(tmp_path):
    docker = (
        "FROM x\nWORKDIR /app\nCOPY *.py src ./\nCOPY big.bin /data/big.bin\nRUN pip install x\nCOPY conf /etc/conf\n"
    )
    files = {"a.py": "", "b.py": "", "src/x.txt": "", "big.bin": "", "conf": ""}
    changed = {"environment/Dockerfile": docker} | {f"environment/{name}": text for name, text in files.items()}
    (task,) = harbor.read(write_task(tmp_path / "t", **changed))
    here = tmp_path / "t" / "environment"
    assert task.uploads == [
        Upload(source=str(here / "a.py"), target="/app/a.py"),
        Upload(source=str(here / "b.py"), target="/app/b.py"),
        Upload(source=str(here / "src"), target="/app"),
        Upload(source=str(here / "big.bin"), target="/data/big.bin"),
        Upload(source=str(here / "conf"), target="/etc/conf"),
    ]
    assert task.scratch == ["/tests", "/logs", "/data"]
    assert task.warnings == ["not built: RUN pip install x"]


def test_loose_files_go_to_the_workdir(tmp_path):
    changed = {"environment/Dockerfile": None, "environment/a.txt": "", "environment/sub/b.txt": ""}
    toml = '[environment]\ndocker_image = "python:3.12"\n'
    (task,) = harbor.read(write_task(tmp_path / "t", **{"task.toml": toml}, **changed))
    assert [upload.target for upload in task.uploads] == ["/app/a.txt", "/app/sub"]
    assert task.warnings == ["docker_image python:3.12 is not pulled"]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("<!-- harbor-canary GUID 1 -->\n\nDo it.\n", "Do it.\n"),
        ("# BENCHMARK DATA. canary GUID 2\n# canary 3\nDo it.", "Do it."),
        ("Mind the canary.\n", "Mind the canary.\n"),
    ],
)
def test_canary_lines_are_not_part_of_the_instruction(tmp_path, text, prompt):
    assert harbor.read(write_task(tmp_path / "t", **{"instruction.md": text}))[0].prompt == prompt


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"task.toml": "steps = [{name = 'a'}]\n"}, "steps"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "gpus"),
        ({"task.toml": "[environment]\nos = 'windows'\n"}, "os"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "separate"),
        ({"task.toml": "[verifier.environment]\n"}, "separate"),
        ({"task.toml": "[environment]\nmemory = 'much'\n"}, "memory"),
        ({"task.toml": "["}, "task.toml"),
        ({"task.toml": "[agent]\ntimeout_sec = 'long'\n"}, "timeout_sec"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose"),
        ({"tests/test.sh": None}, "test.sh"),
        ({"instruction.md": None}, "instruction.md"),
        ({"environment/Dockerfile": "FROM x\nCOPY nothing /x\n"}, "nothing"),
    ],
)
def test_what_cannot_work_is_an_error(tmp_path, changed, says):
    with pytest.raises(UsageError, match=says):
        harbor.read(write_task(tmp_path / "t", **changed))


def test_a_link_that_leads_out_is_refused(tmp_path):
    folder = write_task(tmp_path / "t")
    (folder / "tests" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="leads out"):
        harbor.read(folder)


def test_a_folder_of_tasks_in_order_and_what_is_none_is_named(tmp_path, caplog):
    for name in ("b", "a", "c"):
        write_task(tmp_path / name)
    (tmp_path / "c" / "instruction.md").unlink()
    (tmp_path / "notes").mkdir()
    with caplog.at_level(logging.WARNING):
        assert [task.task_id for task in loading.load(tmp_path)] == ["a", "b"]
    assert "c is no task" in caplog.text
    assert "notes is no task" in caplog.text


def test_one_name_for_two_tasks_is_refused(tmp_path):
    for name in ("a", "b"):
        write_task(tmp_path / name, **{"task.toml": '[task]\nname = "me/same"\n'})
    with pytest.raises(UsageError, match="me/same"):
        loading.load(tmp_path)


def test_the_digest_sees_hidden_tests_and_not_where_the_folder_lies(tmp_path):
    first = write_task(tmp_path / "one" / "t")
    shutil.copytree(first, tmp_path / "two" / "t")
    before = loading.digest(loading.load(first))
    assert loading.digest(loading.load(tmp_path / "two" / "t")) == before
    with (first / "tests" / "test.sh").open("a") as file:
        file.write("# changed\n")
    assert loading.digest(loading.load(first)) != before
