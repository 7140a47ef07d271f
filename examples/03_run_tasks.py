"""Run tasks: each attempt is an unmodified agent in a sandbox of its own, recorded and graded.

    pip install 'orchard-proxy[policy,sandbox]'
    python examples/03_run_tasks.py              # Linux with user namespaces; nothing runs outside a sandbox

A task is a line of JSON: what the agent is told, the files that it finds, and how its work is graded. docs/running.md
has all fields; a folder in Harbor's task layout does as well. The agent is the harness `react`, a loop with a shell;
`orchard harness ls` shows the others. The policy is the tiny one with a script, so that it needs no GPU: leave that
out, and give `orchard run --upstream` the URL of your own.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ORCHARD = [sys.executable, "-m", "orchard_proxy.cli.main"]
TASKS = [
    {  # graded by its answer
        "task_id": "count",
        "prompt": "How many lines has poem.txt?",
        "files": {"poem.txt": "Trees in a row,\nand the wind among them.\n"},
        "expected_answer": 2,
        "answer_match": "number",
    },
    {  # graded by a command that runs once the agent is dead; exit status 0 is reward 1
        "task_id": "rename",
        "prompt": "Rename old.txt to new.txt. Commit it.",
        "setup": "git init -q && echo hello > old.txt && git add . && git -c user.name=a -c user.email=a commit -qm 1",
        "grade": {"command": "sh check.sh", "files": {"check.sh": "git show HEAD:new.txt | grep -x hello"}},
    },
    {  # nothing in the script fits, and the untrained model talks nonsense: reward 0
        "task_id": "hard",
        "prompt": "Prove Goldbach's conjecture.",
        "grade": {"command": "test -s proof.txt", "timeout_s": 5},
    },
]
SCRIPT = r"""
[[rule]]
last = 'How many lines has (\S+)\?'
tool_calls = [{name = "bash", arguments = {command = "wc -l {1}"}}]

[[rule]]
last = '^(\d+) \S+\.txt'
text = "It has {1} lines."

[[rule]]
last = 'Rename (\S+) to (\S+)\. Commit it\.'
tool_calls = [{name = "bash", arguments = {command = "git mv {1} {2}; git -c user.name=a -c user.email=a commit -m 2"}}]

[[rule]]
last = '1 file changed'
text = "Done."
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
        (folder / "script.toml").write_text(SCRIPT)
        with tiny_policy(folder) as url:
            run = ["run", "tasks.jsonl", "--harness", "react", "--upstream", url, "--n", "2", "--json"]
            summary = json.loads(orchard(folder, *run))
        for task in summary["tasks"]:
            print(f"{task['task_id']:8}  rewards {task['rewards']}  pass@k {task['totals']['pass_at_k']}")
        print(orchard(folder, "export", "--out", "out"))  # and now 04_read_parquet.py


@contextmanager
def tiny_policy(folder: Path) -> Iterator[str]:
    """Run the scripted policy server on a free port; give its URL."""
    command = [*ORCHARD, "policy", "tiny", "--script", "script.toml", "--port", "0", "--port-file", "port"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while not (folder / "port").exists() and process.poll() is None:
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{(folder / 'port').read_text().strip()}"
        finally:
            process.terminate()


def orchard(folder: Path, *args: str) -> str:
    """Run an `orchard` command in a folder; return what it prints."""
    print(f"$ orchard {' '.join(args)}")
    return subprocess.run([*ORCHARD, *args], cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
