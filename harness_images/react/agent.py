"""A ReAct agent with a shell, on the unmodified `openai` SDK: it thinks, runs a command, looks, and answers.

It knows nothing of Orchard: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, the task comes on stdin, the
outcome goes to a JSON file. Commands run in the current folder, as the user who runs this; isolation is not its work.

Invariant: the history only grows at its end, and what the model said goes back unchanged, so that each prompt extends
the last one token by token.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai

Message = dict[str, Any]

TOOLS_SYSTEM = """\
You solve tasks on a Linux machine. You have one tool, `bash`, which runs a command in the folder of the task and gives
you its output. Each command runs in a shell of its own. Look before you change anything, and check your work. When you
are done, answer without a tool call: your answer is the result.
"""
TEXT_SYSTEM = """\
You solve tasks on a Linux machine, step by step. Write a thought, then one action, then wait:

Thought: what to do next
Action: bash[the command]

You get what the command printed as `Observation: ...`. When you are done, write your result instead of an action:

Answer: the result
"""
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command in the folder of the task. Gives its output and its exit status.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, as bash reads it."}},
            "required": ["command"],
        },
    },
}
ACTION = re.compile(r"^Action: *bash\[", re.MULTILINE)
ANSWER = re.compile(r"^Answer: *(.*)", re.MULTILINE | re.DOTALL)
MOST_OUTPUT = 16_000
"""Characters of a command's output that the model sees: head and tail."""


class CutError(Exception):
    """The model's answer was cut by a token limit before it was whole."""


class Agent:
    """One attempt at one task."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.client = openai.OpenAI()
        self.options = options
        self.turns = 0
        self.as_text = options.mode == "text"
        self.shown: list[Message] = json.loads(Path(options.examples).read_text()) if options.examples else []
        self.messages: list[Message] = []

    def solve(self, task: str) -> str:
        """Work until the model answers; return the answer. Raises TurnsUsedUpError, CutError, openai.OpenAIError."""
        system = TEXT_SYSTEM if self.as_text else TOOLS_SYSTEM
        self.messages = [{"role": "system", "content": system}, *self.shown, {"role": "user", "content": task}]
        while self.turns < self.options.max_turns:
            try:
                message, cut = self.ask()
            except (openai.BadRequestError, openai.UnprocessableEntityError, openai.InternalServerError) as error:
                if not self.may_fall_back(error):
                    raise
                self.as_text = True
                return self.solve(task)
            self.turns += 1
            self.messages.append(message)
            observations = self.act(message)
            if not observations:
                if cut:
                    raise CutError(message.get("content") or "")
                return self.answer_of(message)
            self.messages += observations
        raise TurnsUsedUpError(f"no answer after {self.turns} turns")

    def may_fall_back(self, error: openai.APIStatusError) -> bool:
        """Whether the server has refused the very first request because it cannot do tools."""
        return self.options.mode == "auto" and not self.as_text and self.turns == 0 and "tool" in str(error).lower()

    def ask(self) -> tuple[Message, bool]:
        """Make one call; return the assistant's message to echo, and whether it was cut."""
        request: dict[str, Any] = {"model": self.options.model, "messages": self.messages}
        if not self.as_text:
            request["tools"] = [BASH_TOOL]
        if self.options.max_tokens:
            request["max_tokens"] = int(self.options.max_tokens)
        if self.options.temperature:
            request["temperature"] = float(self.options.temperature)
        if self.options.stream == "yes":
            with self.client.chat.completions.stream(**request) as stream:
                completion = stream.get_final_completion()
        else:
            completion = self.client.chat.completions.create(**request)
        if not completion.choices:
            raise openai.OpenAIError("the server's answer has no choice")
        choice = completion.choices[0]
        return echo(choice.message), choice.finish_reason == "length"

    def act(self, message: Message) -> list[Message]:
        """Do what the model wants done; return what it is told of it, nothing when it has answered."""
        if self.as_text:
            command = text_action(message.get("content") or "")
            return [] if command is None else [{"role": "user", "content": f"Observation: {self.run(command)}"}]
        calls = message.get("tool_calls", [])
        return [{"role": "tool", "tool_call_id": call["id"], "content": self.use(call)} for call in calls]

    def use(self, call: dict[str, Any]) -> str:
        """Do one tool call; a mistake of the model is an observation, too."""
        function = call["function"]
        if function["name"] != "bash":
            return f"There is no tool {function['name']!r}; there is bash."
        try:
            command = json.loads(function["arguments"])["command"]
        except (ValueError, KeyError, TypeError):
            return 'The arguments must be a JSON object like {"command": "ls"}.'
        return self.run(command) if isinstance(command, str) else "The command must be a string."

    def run(self, command: str) -> str:
        """Run a command and return its output, with its exit status when that is not 0."""
        if "\0" in command:
            return "A command cannot hold a NUL character."
        # A file, not a pipe: a server that the command leaves in the background would keep a pipe open for ever.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=tool_env(), start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(self.options.command_timeout_s)
                ending = "" if status == 0 else f"\n[exit status {status}]"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ending = f"\n[killed after {self.options.command_timeout_s:g} s]"
            output.seek(0)
            text = shortened(output.read().decode(errors="replace"))
        return (text.rstrip("\n") + ending).lstrip("\n") or "[no output]"

    def answer_of(self, message: Message) -> str:
        """Return the final answer in a message without an action."""
        content = str(message.get("content") or "")
        found = ANSWER.search(content) if self.as_text else None
        return (found[1] if found else content).strip()


class TurnsUsedUpError(Exception):
    """The model did not answer within its turns."""


def echo(message: Any) -> Message:
    """Return the model's message as it goes back: what it said, and nothing that the SDK made of it."""
    said = message.model_dump(exclude_none=True)
    kept = {key: said[key] for key in ("role", "content", "reasoning", "reasoning_content", "refusal") if key in said}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
        }
        for call in said.get("tool_calls") or []
    ]
    return kept | ({"tool_calls": calls} if calls else {})


def text_action(content: str) -> str | None:
    """Return the command of the first `Action: bash[...]`: up to the bracket that closes it, else to the last one."""
    start = ACTION.search(content)
    if start is None:
        return None
    rest = content[start.end() :].partition("\nObservation:")[0]
    depth = 1
    for position, character in enumerate(rest):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return rest.rpartition("]")[0] or rest


def shortened(text: str) -> str:
    """Leave out the middle of a long text."""
    if len(text) <= MOST_OUTPUT:
        return text
    half = MOST_OUTPUT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def tool_env() -> dict[str, str]:
    """Return the environment of commands: ours without the key, which the task has no use for."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}


def attempt(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """Solve a task; return the outcome whatever happens."""
    agent: Agent | None = None
    outcome: dict[str, Any]
    try:
        agent = Agent(options)
        outcome = {"status": "answered", "answer": agent.solve(task), "detail": ""}
    except TurnsUsedUpError as error:
        outcome = {"status": "turns_used_up", "answer": None, "detail": str(error)}
    except CutError as error:
        outcome = {"status": "cut", "answer": str(error), "detail": "the answer was cut by its token limit"}
    except (openai.OpenAIError, OSError, ValueError) as error:
        outcome = {"status": "error", "answer": None, "detail": f"{type(error).__name__}: {error}"}
    return outcome | ({"turns": agent.turns, "messages": agent.messages} if agent else {"turns": 0, "messages": []})


def main() -> int:
    """Read the task from stdin, solve it, write the outcome."""
    options = arguments().parse_args()
    outcome = attempt(options, sys.stdin.read())
    path = Path(options.result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome, indent=1))
    print(outcome["answer"] or f"{outcome['status']}: {outcome['detail']}")
    return 0 if outcome["status"] == "answered" else 1


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="A ReAct agent with a shell. The task is read from stdin.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True, help="file for the outcome, as JSON")
    parser.add_argument("--mode", choices=["auto", "tools", "text"], default="auto")
    parser.add_argument("--examples", default="", help="JSON file of messages that stand before the task")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--max-tokens", default="", help="of one answer")
    parser.add_argument("--temperature", default="")
    parser.add_argument("--stream", choices=["yes", "no"], default="no")
    parser.add_argument("--command-timeout-s", type=float, default=120.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
