"""Measure how many calls a second the deriver takes in, by length of the prompt. Not a test: run it by hand."""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))

from derive_kit import Scribe, request_body, vllm_answer

from orchard_proxy.record import deriver

SAMPLED = 128


def write(scribe: Scribe, prompt_tokens: int, calls: int) -> None:
    """Write rollouts of 20 turns whose prompts end at `prompt_tokens`."""
    turns = 20
    step = max(prompt_tokens // turns, 1)
    for n in range(calls):
        turn = n % turns
        if turn == 0:
            rollout_id = f"r{n}"
            scribe.rollout(rollout_id)
            prompt = [(17 * at + n) % 49_000 + 1 for at in range(max(prompt_tokens - step * (turns - 1), 1))]
            texts = ["x" * (4 * prompt_tokens)]
        sampled = [(31 * at + turn) % 49_000 + 1 for at in range(min(SAMPLED, max(step - 1, 1)))]
        call_id = scribe.begin(rollout_id, request_body(*texts))
        scribe.answer(call_id, vllm_answer(prompt, sampled))
        scribe.end(call_id)
        scribe.delivered(call_id)
        prompt = [*prompt, *sampled, *[7] * (step - len(sampled))]
        texts.append("y" * 400)


def main() -> None:
    """Print one line for each length."""
    for prompt_tokens, calls in ((64, 2_000), (8_192, 400), (32_768, 200)):
        with tempfile.TemporaryDirectory() as folder:
            scribe = Scribe(Path(folder))
            write(scribe, prompt_tokens, calls)
            begun, cpu = time.perf_counter(), time.process_time()
            deriver.derive(Path(folder))
            spent, used = time.perf_counter() - begun, time.process_time() - cpu
            journal_bytes = scribe.path.stat().st_size
            catalog_bytes = (Path(folder) / "catalog.db").stat().st_size
            print(
                f"{prompt_tokens:6} ids: {calls / spent:7.0f} calls/s, {1e3 * used / calls:6.2f} CPU-ms a call, "
                f"journal {journal_bytes / calls / 1024:6.1f} KiB a call, catalog {catalog_bytes / calls / 1024:5.1f}"
            )


if __name__ == "__main__":
    main()
