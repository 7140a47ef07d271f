"""Runs with real parts: `orchard serve`, the scripted tiny policy, bubblewrap sandboxes. The harness is a shell script.

The script has `ask TEXT`, which prints what the policy answers, through the socket that the sandbox has.
"""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from env_service.backends.local import LocalBackend
from orchard_proxy.runner import plan
from orchard_proxy.runner.control import ControlClient
from orchard_proxy.runner.plan import Job, RunPlan, Slot
from orchard_proxy.runner.proxy import ProxyChild
from orchard_proxy.runner.rollout import Attempt, House
from orchard_proxy.schema.launch import FileToWrite, HarnessResult, LaunchPlan

SCRIPT = r"""
[[rule]]
last = '^say (?P<what>.*)'
text = "{what}"

[[rule]]
last = '^long'
text = "word "
repeat = 400
"""
ASK = r"""
import json, os, sys, urllib.error, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 500}
key = {"Authorization": "Bearer " + os.environ.get("KEY", os.environ["OPENAI_API_KEY"])}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
ask = urllib.request.Request(url, json.dumps(body).encode(), key)
try:
    print(json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"])
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code} {error.read().decode()}")
except OSError as error:
    sys.exit(f"no answer: {error}")
"""
PRELUDE = 'ask() { python3 -I -S "$HOME/ask.py" "$1"; }\n'


class ShellHarness:
    """Runs a script; it completed when the script says so by exit status 0; the answer is what it printed."""

    name = "shell"
    version = "1"

    def __init__(self, script, *, timeout_s=None):
        self.script = script
        self.timeout_s = timeout_s

    async def install(self):
        """There is nothing to install."""

    def plan(self, request):
        return LaunchPlan(
            harness=self.name,
            version=self.version,
            argv=["/bin/sh", "-c", PRELUDE + self.script],
            env={
                "OPENAI_BASE_URL": request.base_url,
                "OPENAI_API_KEY": request.api_key,
                "MODEL": request.model,
                "PROMPT": request.prompt,
            },
            files=[FileToWrite(path=f"{request.home}/ask.py", content=ASK)],
            timeout_s=self.timeout_s or request.timeout_s,
        )

    def result(self, plan, run, written):
        answer = run.stdout.decode().strip()
        return HarnessResult(completed=run.ok, answer=answer or None, detail=run.stderr.decode()[-300:])


def run_plan(**fields):
    return RunPlan(
        **{
            "run_id": "run",
            "tasks": "/tasks",
            "tasks_sha256": "x",
            "harness": "shell",
            "harness_at": "/shell",
            "harness_version": "1",
            "model": "tiny",
            "n": 1,
            "timeout_s": 30.0,
            "retries": 2,
            "concurrency": 4,
            "started_s": 1.0,
            **fields,
        }
    )


@dataclass
class Served:
    """A proxy that a test only uses."""

    url: str
    admin_key: str
    socket: Path
    generation: int = 0


@asynccontextmanager
async def a_house_at(proxy, **fields):
    """Sandboxes before a proxy that is there."""
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlClient(lambda: proxy.url, proxy.admin_key))
        backend = LocalBackend()
        stack.push_async_callback(backend.close)
        yield House(plan=run_plan(**fields), control=control, proxy=proxy, backend=backend, harness=None)


@asynccontextmanager
async def a_house(data_dir: Path, upstream: str, **fields):
    """A proxy of our own in front of the policy, and sandboxes."""
    async with ProxyChild(data_dir, ["--upstream", upstream]) as proxy, a_house_at(proxy, **fields) as house:
        yield house


def with_script(house, script, **kwargs):
    return msgspec.structs.replace(house, harness=ShellHarness(script, **kwargs))


async def attempt(house, task, script, *, number=1, **kwargs):
    """Run one attempt; give how it ended, and the row that the proxy has of it."""
    job = Job(slot=Slot(task=task, sample=0), attempt=number)
    ended = await Attempt(with_script(house, script, **kwargs), job).run()
    return ended, await row(house, ended.rollout_id)


async def row(house, rollout_id):
    found = {rollout.rollout_id: rollout async for rollout in house.control.rollouts(house.plan.run_id)}
    return found[rollout_id]


def rollout_id(task, *, sample=0, number=1, run_id="run"):
    return plan.rollout_id(run_id, Job(slot=Slot(task=task, sample=sample), attempt=number))


def write_tasks(path: Path, *tasks) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


async def a_running_sandbox(house):
    """Wait until an agent runs; give its sandbox."""
    while not house.backend._open:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0.02)
    (sandbox,) = house.backend._open
    await asyncio.sleep(0.7)
    return sandbox


def write_harness(folder: Path, script: str) -> Path:
    """The same harness as a folder that `--harness` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    ask = ASK.replace("{error}", "{{error}}")
    manifest = f"""
name = "shell"
version = "1"
dialects = ["chat"]
[launch]
command = ["/bin/sh", "-c", '''{PRELUDE}{script}''']
[launch.env]
OPENAI_BASE_URL = "{{base_url}}"
OPENAI_API_KEY = "{{api_key}}"
MODEL = "{{model}}"
PROMPT = "{{prompt}}"
[[launch.files]]
path = "{{home}}/ask.py"
content = '''{ask}'''
"""
    (folder / "harness.toml").write_text(manifest)
    return folder
