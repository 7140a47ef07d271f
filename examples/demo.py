"""`make demo`: a real model, a real agent loop, and what they said as training rows, in a few minutes on two cores.

Everything here is what a user would do: two `orchard` commands run beside this script, the agent talks to the proxy
with the plain `openai` SDK, rewards go in over the control plane, rows come out as Parquet, and a proof closes it.
Data and export stay in build/demo to look at.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pyarrow.parquet as pq
import react_agent
from rich.console import Console
from rich.table import Table

DEMO = Path(__file__).resolve().parent.parent / "build" / "demo"
DATA, EXPORT = DEMO / "data", DEMO / "export"
ORCHARD = [sys.executable, "-m", "orchard_proxy.cli.main"]
ATTEMPTS, CONCURRENCY, PROVED_CALLS = 4, 4, 20
TASKS = {  # task id: (question, the answer that earns reward 1)
    "product": ("How much is 12 * 11?", "132"),
    "difference": ("How much is 81 - 47?", "34"),
    "sum": ("How much is 256 + 389?", "645"),
    "quotient": ("How much is 144 / 12?", "12"),
    "age": ("What is the age of Ada?", "36"),
    "height": ("What is the height of the Oak tower?", "120"),
    "price": ("What is the price of a pear?", "4"),
    "capital": ("What is the capital of Japan?", "Tokyo"),
}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
began = time.monotonic()


class DemoError(Exception):
    """The demo did not show what it is meant to show."""


def main() -> None:
    """Run the steps; the last line of output is the verdict."""
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir(parents=True)
    step("A policy server: SmolLM2-135M on llama.cpp, in one process")
    with child("policy", "policy", "smollm2", "--slots", str(CONCURRENCY)) as engine_url:
        step("The recording proxy in front of it")
        with child("proxy", "serve", "--upstream", engine_url, "--data", str(DATA)) as proxy_url:
            step(f"{len(TASKS)} questions, {ATTEMPTS} attempts each: a ReAct agent on the plain openai SDK")
            run_rollouts(proxy_url)
        step("What was recorded, as Parquet")
        orchard("export", "--data", str(DATA), "--out", str(EXPORT))
        orchard("validate", str(EXPORT))
        check(show())
        step(f"The proof: {PROVED_CALLS} recorded answers scored again by the engine")
        orchard("prove", str(EXPORT), "--upstream", engine_url, "--calls", str(PROVED_CALLS))


def step(title: str) -> None:
    """Print a headline with the time so far."""
    console.print(f"\n[bold green]●[/] [bold]{title}[/] [dim]{time.monotonic() - began:.0f} s[/]")


@contextmanager
def child(name: str, *args: str) -> Iterator[str]:
    """Run an `orchard` server beside us on a free port; give its URL, and stop it at the end."""
    port_file, log = DEMO / f"{name}.port", DEMO / f"{name}.log"
    command = [*ORCHARD, *args, "--port", "0", "--port-file", str(port_file)]
    console.print(f"  $ orchard {' '.join(command[3:])}", style="dim", soft_wrap=True)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise DemoError(f"`orchard {args[0]}` ended with status {process.returncode}: {tail(log)}")
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        console.print(f"  {url}, log in {log.relative_to(DEMO.parent.parent)}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(log: Path) -> str:
    """Return the last line that a child wrote."""
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def orchard(*args: str) -> None:
    """Run an `orchard` command and show its output."""
    console.print(f"  $ orchard {' '.join(args)}", style="dim", soft_wrap=True)
    done = subprocess.run([*ORCHARD, *args], stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        console.print(f"  {line}", soft_wrap=True, markup=False)
    if done.returncode != 0:
        raise DemoError(f"`orchard {args[0]}` ended with status {done.returncode}")


def run_rollouts(proxy_url: str) -> None:
    """Run every attempt, four side by side, and print how each task went."""
    admin_key = (DATA / "admin.key").read_text().strip()
    jobs = [(task_id, attempt) for task_id in TASKS for attempt in range(1, ATTEMPTS + 1)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        futures = [pool.submit(run_one, proxy_url, admin_key, *job) for job in jobs]
        for at, (question, gold) in enumerate(TASKS.values()):
            episodes = [future.result() for future in futures[at * ATTEMPTS : (at + 1) * ATTEMPTS]]
            marks = "".join("[green]✓[/]" if e.answer == gold else "[red]✗[/]" for e in episodes)
            console.print(f"  {marks}  {question}  [dim]{' | '.join(e.answer[:20] for e in episodes)!r}[/]")


def run_one(proxy_url: str, admin_key: str, task_id: str, attempt: int) -> react_agent.Episode:
    """Run one rollout: ask for a key, let the agent work with it, set the reward."""
    question, gold = TASKS[task_id]
    control = {"group_id": task_id, "task_id": task_id, "attempt": attempt, "harness": "react", "model": "smollm2"}
    rollout = post(f"{proxy_url}/rollouts", admin_key, {"rollout_id": f"{task_id}-{attempt}", **control})
    with openai.OpenAI(base_url=rollout["base_urls"]["openai"], api_key=rollout["api_key"]) as client:
        episode = react_agent.solve(client, question, seed=100 * attempt + 10 * list(TASKS).index(task_id))
    reward = float(episode.answer == gold)
    finish = {"status": "completed", "reward": reward, "rewards": {"exact": reward}}
    post(f"{proxy_url}/rollouts/{rollout['rollout_id']}/finish", admin_key, finish)
    return episode


def post(url: str, key: str, body: dict[str, object]) -> dict:
    """POST JSON to the control plane."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)


def show() -> dict[str, int]:
    """Print the table from the Parquet files; return its totals."""
    rollouts = pq.read_table(EXPORT / "rollouts").to_pylist()
    samples = pq.read_table(EXPORT / "samples", columns=["rollout_id", "loss_mask"]).to_pylist()
    columns = ["rollouts", "calls", "sampled", "trained", "masked", "branches"]
    table = Table("task")
    for name in (*columns, "reward"):
        table.add_column(name, justify="right")
    totals = dict.fromkeys(columns, 0)
    for task_id in TASKS:
        mine = [rollout for rollout in rollouts if rollout["task_id"] == task_id]
        rows = [sample for sample in samples if sample["rollout_id"] in {rollout["rollout_id"] for rollout in mine}]
        sampled, trained = sum(r["sampled_tokens"] for r in mine), sum(sum(row["loss_mask"]) for row in rows)
        cells = [len(mine), sum(r["calls"] for r in mine), sampled, trained, sampled - trained, len(rows)]
        totals = {name: totals[name] + cell for name, cell in zip(columns, cells, strict=True)}
        table.add_row(task_id, *map(str, cells), f"{sum(r['reward'] for r in mine) / max(len(mine), 1):.2f}")
    table.add_section()
    rewards = [rollout["reward"] for rollout in rollouts]
    table.add_row("all", *map(str, totals.values()), f"{sum(rewards) / max(len(rewards), 1):.2f}", style="bold")
    console.print(table)
    return totals


def check(totals: dict[str, int]) -> None:
    """Raise DemoError unless every attempt is there and its tokens can be trained on."""
    if totals["rollouts"] != len(TASKS) * ATTEMPTS:
        raise DemoError(f"{totals['rollouts']} rollouts in the export, {len(TASKS) * ATTEMPTS} were run")
    if totals["trained"] == 0:
        raise DemoError("no token of the export can be trained on")


if __name__ == "__main__":
    try:
        main()
    except (DemoError, OSError, openai.OpenAIError) as error:
        sys.exit(f"demo: FAILED: {error}")
    console.print(f"\n[dim]{time.monotonic() - began:.0f} s in all; look into {os.path.relpath(DEMO)}[/]")
    print("demo: ok")
