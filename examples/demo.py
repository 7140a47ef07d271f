"""`make demo`: real agents in sandboxes, a real model, and what they said as training rows, in minutes on two cores.

Everything here is what a user would do at a terminal. `orchard run` runs each attempt in a sandbox of its own, with the
recording proxy between the agent and its policy, and grades it; rows come out as Parquet; a proof closes it.
Data and export stay in build/demo/data and build/demo/export to look at.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import demo_table
import demo_tasks
import pyarrow.parquet as pq
from rich.console import Console

BUILD = Path(__file__).resolve().parent.parent / "build"
DEMO = BUILD / "demo"
DATA, EXPORT = DEMO / "data", DEMO / "export"
ORCHARD = [sys.executable, "-m", "orchard_proxy.cli.main"]
ATTEMPTS, REPAIRS, CONCURRENCY, PROVED_CALLS = 4, 2, 4, 20
REACT = {"mode": "text", "examples": "examples.json", "max_tokens": 48, "max_turns": 4, "temperature": 0.8}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
began = time.monotonic()


class DemoError(Exception):
    """The demo did not show what it is meant to show."""


def main() -> None:
    """Run the steps; the last line of output is the verdict."""
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir(parents=True)
    step("Two policy servers: SmolLM2-135M on llama.cpp, and a tiny scripted one")
    with (
        policy("smollm2", "--slots", str(CONCURRENCY)) as smollm2,
        policy("tiny", "--script", str(demo_tasks.SCRIPT)) as tiny,
    ):
        tasks = demo_tasks.questions()
        step(f"SmolLM2 in a ReAct loop with a shell: {len(tasks)} questions, {ATTEMPTS} attempts each")
        arguments = [f"--harness-arg={name}={value}" for name, value in REACT.items()]
        run("questions", tasks, "react", smollm2, ATTEMPTS, *arguments, "--concurrency", str(CONCURRENCY))
        step(f"mini-swe-agent, unmodified, mends a repository with a failing test: {REPAIRS} attempts")
        run("repair", demo_tasks.repair(), "mini-swe-agent", tiny, REPAIRS)
        step("What was recorded, as Parquet")
        orchard("export", "--data", relative(DATA), "--out", relative(EXPORT))
        orchard("validate", relative(EXPORT))
        rows = demo_table.read(EXPORT)
        console.print(demo_table.render(rows))
        print_grade()
        check(rows)
        step(f"The proof: {PROVED_CALLS} recorded answers of each model scored again by it")
        for model, upstream in (("smollm2", smollm2), ("tiny", tiny)):
            flags = ("--upstream", upstream, "--model", model, "--calls", str(PROVED_CALLS))
            orchard("prove", relative(EXPORT), *flags)


def step(title: str) -> None:
    """Print a headline with the time so far."""
    console.print(f"\n[bold green]●[/] [bold]{title}[/] [dim]{time.monotonic() - began:.0f} s[/]")


def run(name: str, tasks: list[dict], harness: str, upstream: str, attempts: int, *more: str) -> None:
    """Run every attempt at some tasks and grade it."""
    lines = demo_tasks.write(tasks, DEMO / f"{name}.jsonl")
    orchard("run", relative(lines), "--harness", harness, *more, "--upstream", upstream, "--n", str(attempts),
            "--timeout", "120", "--data", relative(DATA))  # fmt: skip


def relative(path: Path) -> str:
    """Return a path as one would type it."""
    return os.path.relpath(path)


@contextmanager
def policy(kind: str, *args: str) -> Iterator[str]:
    """Run a policy server beside us on a free port; give its URL, and stop it at the end."""
    port_file, log = DEMO / f"{kind}.port", DEMO / f"{kind}.log"
    command = [*ORCHARD, "policy", kind, *args, "--port", "0", "--port-file", str(port_file)]
    console.print(f"  $ orchard {' '.join(command[3:])}", style="dim", soft_wrap=True)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise DemoError(f"`orchard policy {kind}` ended with status {process.returncode}: {tail(log)}")
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        console.print(f"  {url}, log in {relative(log)}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(log: Path) -> str:
    """Return the last line that a server wrote."""
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def orchard(*args: str) -> None:
    """Run an `orchard` command and show its output."""
    console.print(f"  $ orchard {' '.join(args)}", style="dim", soft_wrap=True)
    done = subprocess.run([*ORCHARD, *args], stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        console.print(f"  {line}", soft_wrap=True, markup=False)
    if done.returncode != 0:
        raise DemoError(f"`orchard {args[0]}` ended with status {done.returncode}")


def print_grade() -> None:
    """Print what the grader of a repair saw."""
    rollouts = pq.read_table(EXPORT / "rollouts", columns=["task_id", "metadata"]).to_pylist()
    first = next(json.loads(rollout["metadata"]) for rollout in rollouts if rollout["task_id"] == "repair")
    seen = first.get("grade", {}).get("output", "nothing")
    console.print("  the change of the first repair, and its tests as the grader ran them:")
    console.print("    " + seen.strip().replace("\n", "\n    "), style="dim", markup=False)


def check(rows: list[demo_table.Row]) -> None:
    """Raise DemoError unless every attempt is there, tokens can be trained on, and the repository was mended."""
    wanted = len(demo_tasks.QUESTIONS) * ATTEMPTS + REPAIRS
    if sum(row.rollouts for row in rows) < wanted:
        raise DemoError(f"{sum(row.rollouts for row in rows)} rollouts in the export, {wanted} were run")
    if not all(row.trained for row in rows):
        raise DemoError("a task without a token that can be trained on")
    if rows[-1].reward != 1:
        raise DemoError(f"the repository was mended in {rows[-1].reward:.0%} of the attempts")


@contextmanager
def alone() -> Iterator[None]:
    """Refuse to share build/demo with a demo that is running."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError("another demo is running in this tree; wait for it, or use another checkout") from None
        yield


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are stopped then, too
    try:
        with alone():
            main()
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    except (DemoError, OSError) as error:
        sys.exit(f"demo: FAILED: {error}")
    console.print(f"\n[dim]{time.monotonic() - began:.0f} s in all; look into {relative(DEMO)}[/]")
    print("demo: ok")
