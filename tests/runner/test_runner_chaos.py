"""64 rollouts, 16 at once, while proxy, runner, harnesses and sandboxes are killed with -9 at random."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections import defaultdict

import psutil
import pytest
from runner_kit import write_harness, write_tasks
from support.children import ORCHARD, run

TASKS, N, CONCURRENCY = 8, 8, 16
RUNNER_KILLS, OTHER_KILLS = 3, 24
WORD = f"CHAOS-HARNESS-{os.getpid()}"  # of this test run alone
SCRIPT = f"""
# {WORD}
for step in 1 2 3; do
  tries=0
  until ask "say $PROMPT $step" >> said.txt; do tries=$((tries + 1)); test $tries -lt 4 || exit 1; sleep 0.5; done
  sleep 0.3
done
echo done
"""


class Storm:
    """Starts the run again and again until it is through, and kills."""

    def __init__(self, words, folder):
        self.words = words
        self.folder = folder
        self.chance = random.Random(os.environ.get("CHAOS_SEED", "3"))
        self.kills = defaultdict(int)
        self.process = None
        self.through = False

    async def run(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kill())
            await self._runs()
            self.through = True

    async def _runs(self):
        for _ in range(RUNNER_KILLS + 6):
            begun = (self.folder / "data" / "run" / "chaos.json").exists()
            words = ["--resume", "--data", str(self.folder / "data"), "--retries", "6"] if begun else self.words
            with (self.folder / "log").open("ab") as log:
                command = [*ORCHARD, "run", *words, "--json"]
                self.process = await asyncio.create_subprocess_exec(
                    *command, stdout=asyncio.subprocess.PIPE, stderr=log
                )
                out, _ = await self.process.communicate()
                log.write(f"the runner ended with {self.process.returncode}; kills {dict(self.kills)}\n".encode())
            if self.process.returncode == 0:
                self.told = json.loads(out)
                return
        raise AssertionError("it never came through:\n" + (self.folder / "log").read_text()[-3000:])

    async def _kill(self):
        while not self.through:
            await asyncio.sleep(self.chance.uniform(0.2, 0.7))
            kinds = ["harness", "harness", "sandbox", "proxy"] if sum(self.kills.values()) < OTHER_KILLS else []
            if self.kills["runner"] < RUNNER_KILLS:
                kinds.append("runner")
            if kinds:
                self._kill_one(self.chance.choice(kinds))

    def _kill_one(self, kind):
        victims = self._victims(kind)
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(victims), signal.SIGKILL)
                self.kills[kind] += 1

    def _victims(self, kind):
        """Processes below our runner: of others on this machine we keep our hands off."""
        try:
            runner = psutil.Process(self.process.pid)
            below = runner.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        if kind == "runner":
            return [runner.pid] if len(below) > CONCURRENCY else []
        words = {"proxy": "serve", "harness": WORD, "sandbox": "env_service.agent.supervisor"}
        return [process.pid for process in below if words[kind] in command_of(process)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.timeout(300)
async def test_every_rollout_ends_as_a_row_and_none_twice(tmp_path, policy):
    tasks = [
        {"task_id": f"t{n}", "prompt": f"word{n}", "grade": {"command": f'test "$(grep -c word{n} said.txt)" = 3'}}
        for n in range(TASKS)
    ]
    path = write_tasks(tmp_path / "tasks.jsonl", *tasks)
    harness = write_harness(tmp_path / "shell", SCRIPT)
    words = [str(path), "--harness", str(harness), "--upstream", policy, "--data", str(tmp_path / "data")]
    words += ["--n", str(N), "--concurrency", str(CONCURRENCY), "--run-id", "chaos", "--retries", "6"]
    storm = Storm(words, tmp_path)
    await storm.run()
    assert storm.kills["runner"] == RUNNER_KILLS, storm.kills
    assert min(storm.kills[kind] for kind in ("harness", "sandbox", "proxy")) > 0, storm.kills

    listed = json.loads(run("rollouts", "ls", "--data", str(tmp_path / "data"), "--limit", "1000", "--json").stdout)
    slots = defaultdict(list)
    for row in listed:
        match = re.fullmatch(r"chaos:(t\d+):(\d+)-(\d+)", row["rollout_id"])
        assert row["attempt"] == int(match[3])
        slots[match[1], int(match[2])].append(row)
    assert set(slots) == {(f"t{n}", sample) for n in range(TASKS) for sample in range(N)}
    for rows in slots.values():
        rows.sort(key=lambda row: row["attempt"])
        assert [row["attempt"] for row in rows] == list(range(1, len(rows) + 1))
        *before, last = rows
        assert all(row["failure"]["blame"] == "infra" and row["reward"] is None for row in before), rows
        assert last["status"] in ("completed", "failed"), last
        assert last["failure"] is None or last["failure"]["blame"] == "agent", last
        assert last["reward"] in (0.0, 1.0), last
    codes = {row["failure"]["code"] for row in listed if row["failure"]}
    assert "runner_killed" in codes
    told = storm.told["total"]
    assert (told["finished"], told["n"], told["attempts"]) == (TASKS * N, TASKS * N, len(listed))
    assert told["passed"] > TASKS * N / 2, "most were not hurt"

    out = tmp_path / "out"
    exported = run("export", "--data", str(tmp_path / "data"), "--out", str(out))
    assert exported.returncode == 0, exported.stderr
    checked = run("validate", str(out))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    left = [process.pid for process in psutil.process_iter() if WORD in command_of(process)]
    assert left == []
