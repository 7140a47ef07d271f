"""Data folders written by the real journal, for the tests of tests/cli."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from orchard_proxy.record.journal import Journal
from orchard_proxy.record.recorder import Recorder
from orchard_proxy.schema.enums import Outcome, RolloutStatus
from orchard_proxy.schema.frames import BeginFrame, EditFrame, EndFrame, FinishFrame, RolloutFrame

EDIT = EditFrame(engine="vllm", engine_url="http://127.0.0.1:1", edits=[], upstream_stream=False, logprobs_mode="raw")
T0 = 1_790_000_000_000_000


def answer(prompt: list[int], sampled: list[int], text: str) -> bytes:
    """Return what vLLM says."""
    entries = [
        {"token": text, "logprob": -0.25 * (1 + n), "bytes": None, "top_logprobs": []} for n in range(len(sampled))
    ]
    message = {"role": "assistant", "content": text}
    said = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    choices = [{**said, "token_ids": sampled}]
    return json.dumps({"model": "m", "choices": choices, "prompt_token_ids": prompt, "usage": usage}).encode()


def request(*contents: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in contents]}).encode()


async def call(
    recorder: Recorder, rollout_id: str, seq: int, body: bytes, *, prompt: list[int], sampled: list[int], **end: Any
) -> None:
    begin = BeginFrame(
        rollout_id=rollout_id,
        seq=seq,
        begun_us=T0 + seq,
        dialect="chat",
        path="/v1/chat/completions",
        headers={},
        body=body,
    )
    one = recorder.begin(begin, EDIT)
    one.head(200, {"content-type": "application/json"})
    one.chunk(answer(prompt, sampled, "said"))
    await one.end(EndFrame(**{"outcome": Outcome.COMPLETE, "ended_us": T0 + seq + 5, **end}))
    one.delivered()


async def _record(data_dir: Path) -> None:
    async with Journal.open(data_dir) as journal:
        recorder = Recorder(journal)
        meta = msgspec.Raw(b'{"note": "first"}')
        await recorder.rollout(RolloutFrame(rollout_id="one", created_us=T0, group_id="g", task_id="t", metadata=meta))
        await recorder.rollout(RolloutFrame(rollout_id="two", created_us=T0 + 1, group_id="h"))
        await call(recorder, "one", 0, request("q"), prompt=[1, 2], sampled=[3, 4])
        await call(recorder, "one", 1, request("q", "r"), prompt=[1, 2, 3, 4, 5], sampled=[6])
        await call(
            recorder, "one", 2, request("q", "s"), prompt=[1, 2, 3, 4, 7], sampled=[8], outcome=Outcome.UPSTREAM_CUT
        )
        await call(recorder, "two", 0, request("x", "\ud800"), prompt=[9], sampled=[8, 7])
        done = FinishFrame(
            rollout_id="one", finished_us=T0 + 99, status=RolloutStatus.COMPLETED, reward=0.5, rewards={"tests": 0.5}
        )
        await recorder.finish(done)


def record(data_dir: Path) -> Path:
    data_dir.mkdir(parents=True)
    asyncio.run(_record(data_dir))
    return data_dir


INVARIANT = "sampled 6 = trained 5 + 1 upstream_cut"


def orchard(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    command = [sys.executable, "-m", "orchard_proxy.cli.main", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}, timeout=60
    )


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
