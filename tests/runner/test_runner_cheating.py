"""An agent that tries to cheat, from the inside. Each attempt has a positive control that shows it was a real one."""

import json
import os

import aiohttp
import msgspec
import psutil
import pytest
from runner_kit import a_house_at, attempt, rollout_id, row

from orchard_proxy.runner.proxy import RemoteProxy
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade, Task
from orchard_proxy.schema.enums import RolloutStatus

KNOCK = r"""
import json, os, socket, sys, urllib.error, urllib.request
key, mine, port = os.environ["OPENAI_API_KEY"], os.environ["MINE"], int(os.environ["PORT"])
root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
reward = json.dumps({"reward": 1.0}).encode()
paths = [
    ("GET", "/rollouts"), ("GET", f"/rollouts/{mine}"), ("POST", "/rollouts"), ("POST", f"/rollouts/{mine}/finish"),
    ("POST", f"/r/{key}/rollouts/{mine}/finish"), ("POST", f"/v1/../rollouts/{mine}/finish"),
    ("POST", f"/v1/%2e%2e/rollouts/{mine}/finish"), ("POST", f"//rollouts/{mine}/finish"),
    ("POST", f"/r/{key}/../../rollouts/{mine}/finish"), ("GET", "/metrics"), ("GET", "/readyz"), ("GET", "/healthz"),
]
def knock(method, path, carried):
    ask = urllib.request.Request(root + path, reward if method == "POST" else None, method=method)
    ask.add_header("Authorization", "Bearer " + carried)
    try:
        return urllib.request.urlopen(ask, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
got = {f"{method} {path} {carried}": knock(method, path, carried)
       for carried in (key, "admin", "", "orchard") for method, path in paths}
try:
    socket.create_connection(("127.0.0.1", port), timeout=2)
    got["the proxy's own port"] = 200
except OSError:
    pass
found = {}
for folder, _, names in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/usr")):
        found |= {name: folder for name in names if name in ("admin.key", "rollout.secret", "catalog.db")}
let_in = {name: status for name, status in got.items() if status < 400}
print(json.dumps({"let in": let_in, "found": found, "tried": len(got)}))
"""


@pytest.fixture(params=["the socket of the proxy", "our relay to it"])
async def any_house(request, proxy):
    name = f"cheat-{request.param_index}"
    if request.param_index == 0:
        async with a_house_at(proxy, run_id=name) as made:
            yield made
    else:
        async with RemoteProxy(proxy.url, proxy.admin_key) as remote, a_house_at(remote, run_id=name) as made:
            yield made


async def test_it_cannot_reach_the_control_plane(any_house, proxy):
    task = Task(task_id="knock", prompt="p", timeout_s=60.0, files={"knock.py": KNOCK}, grade=AnswerGrade(expected="x"))
    name = rollout_id(task, run_id=any_house.plan.run_id)
    port = proxy.url.rpartition(":")[2]
    script = f"ask 'say I am in'; MINE={name} PORT={port} python3 -I knock.py"
    _, found = await attempt(any_house, task, script)
    assert found.failure is None, found.failure
    first, told = found.metadata["answer"].splitlines()
    assert first == "I am in", "the data plane is open to it"
    assert json.loads(told) == {"let in": {}, "found": {}, "tried": 48}
    assert (found.status, found.reward) == (RolloutStatus.COMPLETED, 0.0)
    rollouts = [rollout async for rollout in any_house.control.rollouts(any_house.plan.run_id)]
    assert len(rollouts) == 1, "it made none"
    assert rollouts[0].rollout_id == name, "the door that it looked for is there, for us"


SEARCH = r"""
import os, sys
words = {"grader": "HIDDEN-" + "GRADER-7", "answer": "EXPECTED-" + "ANSWER-7", "prompt": "PROMPT-" + "WORD-7"}
found = {name: [] for name in words}
for folder, _, names in os.walk("/"):
    if folder.startswith(("/usr", "/sys", "/proc/sys", "/proc/irq", "/proc/bus")):
        continue
    for name in names:
        path = os.path.join(folder, name)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                data = file.read(1 << 22) or b""
        except OSError:
            continue
        for word, text in words.items():
            if text.encode() in data:
                found[word].append(path)
print("grader", len(found["grader"]), "answer", len(found["answer"]), "prompt", len(found["prompt"]) > 0)
"""


@pytest.mark.parametrize(
    "grade",
    [
        CommandGrade(command="test HIDDEN-GRADER-7; sh check.sh", files={"check.sh": "# HIDDEN-GRADER-7\ntrue"}),
        AnswerGrade(expected="EXPECTED-ANSWER-7"),
    ],
    ids=["a hidden command", "an expected answer"],
)
async def test_it_cannot_read_the_grader_before_it_ends(house, grade):
    task = Task(task_id="search", prompt="PROMPT-WORD-7", timeout_s=60.0, files={"search.py": SEARCH}, grade=grade)
    _, found = await attempt(house, task, "python3 -I search.py")
    assert found.failure is None, found.failure
    assert found.metadata["answer"] == "grader 0 answer 0 prompt True"
    assert found.reward == (1.0 if isinstance(grade, CommandGrade) else 0.0)


STAY = r"""
import os, signal, sys, time
def daemon():
    if os.fork():
        return
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    while True:
        if os.fork() == 0:  # as fast as it can, from ever new processes
            open("/workspace/verdict", "w").write("tampered by STAYS-BEHIND")
            os._exit(0)
        os.wait()
        time.sleep(0.01)
for _ in range(4):
    daemon()
time.sleep(0.3)
print("STAYS-BEHIND" in open("/workspace/verdict").read())
"""


async def test_it_cannot_outlive_its_end(house):
    """Daemons in sessions of their own that ignore signals: dead before the grader looks, and after it."""
    check = "rm -f verdict; sleep 0.6; test ! -e verdict"
    task = Task(
        task_id="stay",
        prompt="p",
        timeout_s=60.0,
        files={"stay.py": STAY},
        grade=CommandGrade(command=check),
    )
    _, found = await attempt(house, task, f"python3 -I -S stay.py STAYS-BEHIND-{os.getpid()}")
    assert found.metadata["answer"] == "True", "it was there"
    assert found.metadata["harness_run"]["lingering"] > 0
    assert found.reward == 1.0
    assert alive(f"STAYS-BEHIND-{os.getpid()}") == []


def alive(word):
    return [process.pid for process in psutil.process_iter(["cmdline"]) if word in (process.info["cmdline"] or [])]


async def test_nor_its_timeout(house):
    task = Task(task_id="late", prompt="p", timeout_s=1.5, files={"stay.py": STAY}, grade=CommandGrade(command="true"))
    _, found = await attempt(house, task, f"python3 -I -S stay.py STAYS-LATE-{os.getpid()}; sleep 60")
    assert found.failure.code == "agent_timeout"
    assert alive(f"STAYS-LATE-{os.getpid()}") == []


FORGE = r"""
import json, os, urllib.error, urllib.request
mine, other, done = os.environ["OPENAI_API_KEY"], os.environ["OTHER"], os.environ["DONE"]
root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "say hi"}]}).encode()
def ask(path="/v1/chat/completions", **headers):
    spelled = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(root + path, body, spelled)
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
bearer = {"Authorization": "Bearer " + mine}
print(json.dumps({
    "mine": ask(**bearer),
    "mine and another in a header": ask(**bearer, x_api_key=other),
    "mine and another as google does": ask(**bearer, x_goog_api_key=other),
    "mine and another in the query": ask("/v1/chat/completions?key=" + other, **bearer),
    "mine and another in the path": ask(f"/r/{other}/v1/chat/completions", **bearer),
    "mine in the path and another": ask(f"/r/{mine}/v1/chat/completions", x_api_key=other),
    "two in the query": ask(f"/v1/chat/completions?key={mine}&key={other}"),
    "one made up": ask(Authorization="Bearer orch-" + "A" * 43),
    "a rollout's name": ask(Authorization="Bearer " + os.environ["OTHER_ID"]),
    "none": ask(),
    "one that is finished": ask(Authorization="Bearer " + done),
}))
"""


async def test_it_cannot_write_another_rollouts_calls(any_house):
    house = any_house
    other = await house.control.create(f"{house.plan.run_id}:other", run_id=house.plan.run_id)
    done = await house.control.create(f"{house.plan.run_id}:done", run_id=house.plan.run_id)
    await house.control.finish(done.rollout_id, status=RolloutStatus.COMPLETED)
    env = {"OTHER": other.api_key, "OTHER_ID": other.rollout_id, "DONE": done.api_key}
    task = Task(task_id="forge", prompt="p", timeout_s=60.0, files={"forge.py": FORGE}, env=env)
    ended, found = await attempt(house, task, "python3 -I forge.py")
    statuses = json.loads(found.metadata["answer"])
    assert statuses.pop("mine") == 200
    assert statuses == {
        "mine and another in a header": 400,
        "mine and another as google does": 400,
        "mine and another in the query": 400,
        "mine and another in the path": 400,
        "mine in the path and another": 400,
        "two in the query": 400,
        "one made up": 401,
        "a rollout's name": 401,
        "none": 401,
        "one that is finished": 410,
    }
    assert len(await house.control.calls(ended.rollout_id)) == 1
    assert await house.control.calls(other.rollout_id) == []
    assert (await row(house, other.rollout_id)).status is RolloutStatus.RUNNING


async def test_it_cannot_go_on_calling_when_its_rollout_is_over(house):
    """A key that leaked out of a sandbox is worth nothing once the rollout is finished."""
    task = Task(task_id="leak", prompt="p", timeout_s=30.0)
    ended, _ = await attempt(house, task, "true")
    again = await house.control.create(ended.rollout_id, **_same_fields(house, task))
    body = msgspec.json.encode({"model": "tiny", "messages": []})
    headers = {"Authorization": f"Bearer {again.api_key}"}
    async with aiohttp.ClientSession(house.proxy.url, headers=headers) as session:
        async with session.post("/v1/chat/completions", data=body) as answer:
            assert answer.status == 410


def _same_fields(house, task):
    return {
        "group_id": f"{house.plan.run_id}:{task.task_id}",
        "task_id": task.task_id,
        "attempt": 1,
        "run_id": house.plan.run_id,
        "harness": "shell",
        "harness_version": "1",
        "model": "tiny",
        "metadata": {"sample": 0, "task": {}},
    }
