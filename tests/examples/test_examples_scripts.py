"""The numbered examples, run as a user runs them: in a process of their own, against real servers on free ports."""

import ast
import importlib
import json
import math
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import children

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
read_parquet = importlib.import_module("04_read_parquet")


def example(name, *args, env=None, without=(), stderr=False):
    """Run an example; it must succeed, and say nothing on stderr unless told. Packages `without` are not there."""
    hide = f"import runpy, sys; sys.modules.update(dict.fromkeys({without!r})); del sys.argv[0]; "
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", hide + run, str(EXAMPLES / name), *map(str, args)]
    done = subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert stderr or not done.stderr
    return done.stdout


def http(url, body=None, key=""):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Proxy:
    """A recording proxy before a tiny policy, as its users see it."""

    def __init__(self, url: str, data: Path) -> None:
        self.url = url
        self.data = data

    def control(self, path, body=None):
        return http(f"{self.url}{path}", body, (self.data / "admin.key").read_text().strip())


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    data = folder / "data"
    with children.orchard("policy", "tiny", folder=folder) as engine:
        with children.orchard("serve", "--open", "--upstream", engine, "--data", str(data), folder=folder) as url:
            yield Proxy(url, data)


GROUPS = {  # group: the rewards of its attempts
    "mixed": [1.0, 0.0, 0.0, 1.0],
    "agreed": [0.1, 0.1, 0.1],
    "half graded": [1.0, None, 0.0],
}


@pytest.fixture(scope="module")
def export(proxy, tmp_path_factory):
    """Return an export of graded and ungraded rollouts of one or two turns each."""
    for group, rewards in GROUPS.items():
        for attempt, reward in enumerate(rewards, 1):
            rollout = proxy.control("/rollouts", {"group_id": group, "task_id": group, "attempt": attempt})
            for turn in range(1 + attempt % 2):
                body = {"model": "tiny", "messages": [{"role": "user", "content": "Go on. " * (1 + 9 * turn)}]}
                http(f"{rollout['base_urls']['openai']}/chat/completions", body | {"max_tokens": 9}, rollout["api_key"])
            finish = {"status": "completed"} if reward is None else {"status": "completed", "reward": reward}
            proxy.control(f"/rollouts/{rollout['rollout_id']}/finish", finish)
    out = tmp_path_factory.mktemp("export") / "out"
    done = children.run("export", "--data", str(proxy.data), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 100


def test_record_one_call():
    printed = example("01_record_one_call.py")
    said = re.search(r"^the client got: (.+)$", printed, re.MULTILINE)[1]
    targets = re.findall(r"^ +\d+  (.+?) +target, log-probability -\d+\.\d{4}$", printed, re.MULTILINE)
    assert "".join(map(ast.literal_eval, targets)) == ast.literal_eval(said)
    assert "'<|im_start|>'     context" in printed
    assert printed.endswith("sampled 12 = trained 12 + masked 0\n")


def test_any_openai_client(proxy):
    printed = example("02_any_openai_client.py", env={"OPENAI_BASE_URL": f"{proxy.url}/v1"})
    assert "8 answers" in printed
    recorded = {name: proxy.control(f"/rollouts/{name}/samples?wait_s=30") for name in ("streamed", "turns", "no-sdk")}
    for name, found in recorded.items():
        assert found["accounting"]["sampled"] == found["accounting"]["trained"] > 0, name
    calls = {
        name: proxy.control(f"/rollouts/{name}")["calls"]
        for name in ("turns", *(f"side-by-side-{n}" for n in range(4)))
    }
    assert [len(found) for found in calls.values()] == [3, 1, 1, 1, 1]


def test_a_client_who_leaves_is_kept_and_not_trained_on(proxy):
    assert "one-who-leaves  left after 2000 bytes" in example(
        "02_any_openai_client.py", env={"OPENAI_BASE_URL": f"{proxy.url}/v1"}
    )
    found = proxy.control("/rollouts/one-who-leaves/samples?wait_s=30")["accounting"]
    assert found["trained"] == 0
    assert found["masked"]["client_gone"] > 0


@pytest.mark.timeout(300)  # the first run on a machine installs the harness
def test_run_tasks():
    printed = example("03_run_tasks.py", stderr=True)
    rewards = dict(re.findall(r"^(\w+) +rewards (\[.*?\])", printed, re.MULTILINE))
    assert rewards == {"count": "[1.0, 1.0]", "rename": "[1.0, 1.0]", "hard": "[0.0, 0.0]"}
    assert re.search(r"^sampled (\d+) = trained \1$", printed, re.MULTILINE)


def test_read_parquet_with_what_is_installed(export):
    printed = example("04_read_parquet.py", export)
    assert "half graded" in printed
    assert "rows to train on" in printed
    assert "input_ids" in printed


def test_read_parquet_without_duckdb_and_torch_says_what_to_install(export):
    printed = example("04_read_parquet.py", export, without=("duckdb", "torch"))
    assert "pip install duckdb" in printed
    assert "pip install torch" in printed
    assert re.search(r"labels +int64 +\[4, \d+\]", printed)


def test_read_parquet_where_there_is_no_export(tmp_path):
    command = [sys.executable, str(EXAMPLES / "04_read_parquet.py"), str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"orchard export --out {tmp_path / 'none'}\n")


def test_advantages_are_normalised_by_group(export):
    found = read_parquet.group_advantages(export)
    groups = {}
    for row in pq.read_table(export / "rollouts").to_pylist():
        if row["rollout_id"] in found:
            groups.setdefault(row["group_id"], []).append((row["attempt"], float(found[row["rollout_id"]])))
    assert sorted(groups["mixed"]) == [(1, 1.0), (2, -1.0), (3, -1.0), (4, 1.0)]
    assert sorted(groups["agreed"]) == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert sorted(groups["half graded"]) == [(1, 1.0), (3, -1.0)]


def test_a_batch_has_labels_where_the_policy_spoke_and_nowhere_else(export):
    rows = read_parquet.training_rows(export)
    batch = read_parquet.pad(rows)
    _check(rows, batch)


def test_a_torch_batch(export):
    torch = pytest.importorskip("torch")
    rows = read_parquet.training_rows(export)
    batches = list(read_parquet.load(rows, size=4))
    assert [len(batch["labels"]) for batch in batches] == [4] * (len(rows) // 4) + [len(rows) % 4] * bool(len(rows) % 4)
    for at, batch in enumerate(batches):
        assert batch["labels"].dtype == batch["input_ids"].dtype == torch.int64
        assert batch["logprobs"].dtype == batch["advantages"].dtype == torch.float32
        _check(rows[4 * at : 4 * at + 4], {name: tensor.numpy() for name, tensor in batch.items()})
        logits = torch.zeros(*batch["labels"].shape, 2048)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        assert loss.item() == pytest.approx(math.log(2048))


def _check(rows, batch):
    assert {len(row["token_ids"]) for row in rows} != {batch["labels"].shape[1]}, "some row must be padded"
    for at, row in enumerate(rows):
        length, mask = len(row["token_ids"]), np.array(row["loss_mask"], bool)
        here = {name: array[at] for name, array in batch.items()}
        assert here["input_ids"][:length].tolist() == row["token_ids"]
        assert here["attention_mask"].tolist() == [1] * length + [0] * (len(here["labels"]) - length)
        target = here["labels"] != -100
        assert target[:length].tolist() == mask.tolist()
        assert not target[length:].any()
        assert here["labels"][target].tolist() == here["input_ids"][target].tolist()
        assert here["logprobs"][target].tolist() == pytest.approx([lp for lp in row["logprobs"] if not math.isnan(lp)])
        assert set(here["advantages"][target].tolist()) == {float(np.float32(row["advantage"]))}
        assert not here["logprobs"][~target].any()
        assert not here["advantages"][~target].any()
        assert np.isfinite(here["logprobs"]).all()
