"""Record one call: all that Orchard does, at its smallest.

    pip install 'orchard-proxy[policy,harness]'
    python examples/01_record_one_call.py

Beside this script run a policy server (the embedded tiny one: nothing to download, no GPU, talks nonsense) and the
recording proxy in front of it. The client is the plain `openai` SDK. It gets what the engine would have said without
us; what was recorded is what a trainer needs: every token by its id, whether it is a target, its log-probability.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        server("policy", "tiny", folder=Path(folder)) as engine,
        server("serve", "--open", "--upstream", engine, "--data", f"{folder}/data", folder=Path(folder)) as proxy,
    ):
        # An agent, unmodified. With --open, any key is the name of a rollout.
        client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="my-first-rollout")
        question = [{"role": "user", "content": "Say anything."}]
        answer = client.chat.completions.create(model="tiny", messages=question, max_tokens=12, seed=1)
        print(f"the client got: {answer.choices[0].message.content!r}\n")

        # What was recorded. Only the admin key reads it: an agent cannot, let alone reward itself.
        admin_key = Path(folder, "data", "admin.key").read_text().strip()
        recorded = http(f"{proxy}/rollouts/my-first-rollout/samples?wait_s=30", key=admin_key)
        sample = recorded["samples"][0]
        for token, target, logprob in zip(sample["token_ids"], sample["loss_mask"], sample["logprobs"], strict=True):
            text = http(f"{engine}/detokenize", {"tokens": [token]})["prompt"]
            print(f"  {token:5d}  {text!r:18} {f'target, log-probability {logprob:.4f}' if target else 'context'}")
        counts = recorded["accounting"]
        print(f"\nsampled {counts['sampled']} = trained {counts['trained']} + masked {counts['masked'] or 0}")


@contextmanager
def server(*verb: str, folder: Path) -> Iterator[str]:
    """Run `orchard VERB` on a free port; give its URL, and stop it at the end."""
    port_file, log = folder / f"{verb[0]}.port", folder / f"{verb[0]}.log"
    command = [sys.executable, "-m", "orchard_proxy.cli.main", *verb, "--port", "0", "--port-file", str(port_file)]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    sys.exit(f"`orchard {verb[0]}` did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        finally:
            process.terminate()


def http(url: str, body: dict | None = None, *, key: str = "") -> dict:
    """GET, or POST where there is a body."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
