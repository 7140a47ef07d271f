"""The react agent by itself: a program on the openai SDK, against a server that says what a test wants."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness_images import registry

PROGRAM = registry.BUNDLED / "react" / "agent.py"
spec = importlib.util.spec_from_file_location("react_agent_under_test", PROGRAM)
agent = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent)


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """An agent that is asked for nothing but its tool."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    return agent.Agent(agent.arguments().parse_args(["--model=m", "--result=r", "--command-timeout-s=5"]))


@pytest.mark.parametrize(
    ("content", "command"),
    [
        pytest.param("Thought: x\nAction: bash[ls -l]", "ls -l", id="simple"),
        pytest.param("Action: bash[ls]\nObservation: made up\nAction: bash[rm x]", "ls", id="only-the-first"),
        pytest.param("Action: bash[[ -f x ] && echo y]", "[ -f x ] && echo y", id="brackets-inside"),
        pytest.param("Action: bash[cat <<E\na\nE\n]", "cat <<E\na\nE\n", id="many-lines"),
        pytest.param("Action: bash[echo ']' [x]", "echo '", id="an-unpaired-bracket-ends-it"),
        pytest.param("Action: bash[echo '[']", "echo '['", id="else-up-to-the-last-one"),
        pytest.param("Action: bash[ls", "ls", id="never-closed"),
        pytest.param("Answer: 42", None, id="answer"),
        pytest.param("I would use Action: bash[ls]", None, id="not-at-the-start-of-a-line"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_text_actions(content, command):
    assert agent.text_action(content) == command


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        pytest.param("echo a; echo b >&2", "a\nb", id="both-streams-in-order"),
        pytest.param("echo a; exit 3", "a\n[exit status 3]", id="exit-status"),
        pytest.param("false", "[exit status 1]", id="status-alone"),
        pytest.param("true", "[no output]", id="nothing"),
        pytest.param("cat; pwd | wc -l", "1", id="stdin-is-empty"),
        pytest.param("printf '\\377x'", "\ufffdx", id="no-utf-8"),
        pytest.param("env | grep -c OPENAI", "0\n[exit status 1]", id="no-key"),
        pytest.param("a\0b", "A command cannot hold a NUL character.", id="nul"),
        pytest.param("kill -9 $$", "[exit status -9]", id="signal"),
    ],
)
def test_commands(shell, command, seen):
    assert shell.run(command) == seen


def test_a_command_that_hangs_is_killed_with_its_children(shell):
    shell.options.command_timeout_s = 0.5
    assert shell.run("echo begun; sleep 4711 & wait") == "begun\n[killed after 0.5 s]"
    assert subprocess.run(["pgrep", "-f", "sleep 4711"], check=False, capture_output=True).returncode == 1


def test_a_server_left_in_the_background_does_not_block(shell):
    began = time.monotonic()
    pid = int(shell.run("sleep 30 & echo $!"))
    assert time.monotonic() - began < 3
    os.kill(pid, signal.SIGKILL)


def test_a_long_output_keeps_head_and_tail(shell):
    seen = shell.run("echo begin; yes | head -c 100000; echo end")
    assert seen.startswith("begin\ny")
    assert seen.endswith("end")
    assert "characters left out" in seen
    assert len(seen) < agent.MOST_OUTPUT + 100


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        pytest.param("bash", '{"command": "echo hi"}', "hi", id="good"),
        pytest.param("bash", '{"command": ', "must be a JSON object", id="half"),
        pytest.param("bash", '["ls"]', "must be a JSON object", id="a-list"),
        pytest.param("bash", "null", "must be a JSON object", id="null"),
        pytest.param("bash", '{"cmd": "ls"}', "must be a JSON object", id="other-name"),
        pytest.param("bash", '{"command": 3}', "must be a string", id="a-number"),
        pytest.param("python", "{}", "no tool 'python'; there is bash", id="other-tool"),
    ],
)
def test_tool_calls(shell, name, arguments, told):
    assert told in shell.use({"id": "1", "function": {"name": name, "arguments": arguments}})


# Whole runs.


def completion(message, finish_reason="stop"):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def call(command):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"tool_calls": [{"id": "t1", "type": "function", "function": function}]}


@contextmanager
def model(answer):
    """A model server: `answer(body)` gives a status and a body. Yields its URL and the requests that came."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            status, told = answer(body)
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attempt(folder: Path, url: str, *flags: str, task: str = "Do it.") -> tuple[int, dict]:
    result = folder / "out" / "result.json"
    run = subprocess.run(
        [sys.executable, "-I", PROGRAM, "--model=m", f"--result={result}", *flags],
        input=task, capture_output=True, text=True, cwd=folder, check=False, timeout=60,
        env={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert result.exists(), run.stderr
    return run.returncode, json.loads(result.read_text())


def test_it_acts_and_answers_and_the_history_only_grows(tmp_path):
    def answer(body):
        if len(body["messages"]) == 2:
            return 200, completion({"content": "  I look.\n", "reasoning": "hm", **call("echo x > made")})
        return 200, completion({"content": "done\n"})

    with model(answer) as (url, seen):
        status, outcome = attempt(tmp_path, url, "--max-tokens=7", "--temperature=0.5")
    assert (status, outcome["status"], outcome["answer"], outcome["turns"]) == (0, "answered", "done", 2)
    assert (tmp_path / "made").read_text() == "x\n"
    assert seen[1]["messages"][:2] == seen[0]["messages"]
    assert seen[1]["messages"][2] == {"role": "assistant", "content": "  I look.\n", "reasoning": "hm"} | call(
        "echo x > made"
    )
    assert (seen[0]["max_tokens"], seen[0]["temperature"]) == (7, 0.5)


def refuses_tools(body):
    if "tools" in body:
        return 400, {"error": {"message": "tools are not supported by this server", "type": "invalid_request_error"}}
    if len(body["messages"]) == 2:
        return 200, completion({"content": "Thought: look\nAction: bash[echo 6 | tr 6 7]"})
    return 200, completion({"content": f"Answer: {body['messages'][-1]['content']}\n"})


def test_where_tools_are_refused_it_goes_on_in_text(tmp_path):
    with model(refuses_tools) as (url, seen):
        status, outcome = attempt(tmp_path, url)
    assert (status, outcome["answer"]) == (0, "Observation: 7")
    assert ["tools" in body for body in seen] == [True, False, False]
    with model(refuses_tools) as (url, seen):
        status, outcome = attempt(tmp_path, url, "--mode=tools")
    assert (status, outcome["status"], len(seen)) == (1, "error", 1)
    assert "tools are not supported" in outcome["detail"]


@pytest.mark.parametrize(
    ("answer", "flags", "status", "detail"),
    [
        pytest.param((200, completion(call("true"))), ["--max-turns=2"], "turns_used_up", "after 2 turns", id="turns"),
        pytest.param((200, completion({"content": "ha"}, "length")), [], "cut", "cut by its token limit", id="cut"),
        pytest.param((401, {"error": {"message": "no such key"}}), [], "error", "no such key", id="refused"),
        pytest.param((200, {"choices": []}), [], "error", "no choice", id="an-answer-without-a-choice"),
    ],
)
def test_what_else_can_happen_is_told_in_the_result(tmp_path, answer, flags, status, detail):
    with model(lambda _: answer) as (url, _):
        code, outcome = attempt(tmp_path, url, *flags)
    assert (code, outcome["status"]) == (1, status)
    assert detail in outcome["detail"]
    assert outcome["messages"]


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        pytest.param('[{"role": "user", "content": "1?"}]', "", id="good"),
        pytest.param("[", "JSONDecodeError", id="no-json"),
        pytest.param(None, "FileNotFoundError", id="no-file"),
    ],
)
def test_examples_stand_before_the_task(tmp_path, text, detail):
    if text:
        (tmp_path / "shots.json").write_text(text)
    with model(lambda _: (200, completion({"content": "ok"}))) as (url, seen):
        _, outcome = attempt(tmp_path, url, "--examples=shots.json")
    assert detail in outcome["detail"]
    assert detail or [message["content"] for message in seen[0]["messages"][1:]] == ["1?", "Do it."]


def test_nobody_there(tmp_path):
    code, outcome = attempt(tmp_path, "http://127.0.0.1:1/v1")
    assert (code, outcome["status"]) == (1, "error")
    assert "APIConnectionError" in outcome["detail"]


def test_any_prompt(tmp_path):
    task = "-x {api_key} \U0001f333 'q'\n" + "y" * 200_000
    with model(lambda _: (200, completion({"content": "ok"}))) as (url, seen):
        assert attempt(tmp_path, url, task=task)[0] == 0
    assert seen[0]["messages"][1]["content"] == task
