"""`orchard serve`: the recording proxy."""

import asyncio
from pathlib import Path
from typing import Any

import click

from orchard_proxy.server.serve import Served, serve
from orchard_proxy.settings import load_serve


@click.command("serve")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="orchard.toml to read. [./orchard.toml]"
)
@click.option("--upstream", help="Root URL of the policy server. [http://127.0.0.1:8001]")
@click.option("--upstream-key", help="Key for the policy server; better in ORCHARD_SERVE__UPSTREAM_KEY.")
@click.option("--engine", type=click.Choice(["auto", "vllm", "llamacpp", "openai"]), help="Kind of engine. [auto]")
@click.option(
    "--upstream-stream",
    type=click.Choice(["auto", "on", "off"]),
    help="Whose stream a client gets: the engine's own unless it lacks ids, always, or never. [auto]",
)
@click.option("--data", envvar="ORCHARD_DATA", help="Directory of journal and catalog. [orchard-data]")
@click.option("--host", help="Address to listen on. [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on, 0 for a free one. [8000]")
@click.option("--port-file", help="Write the port here once listening.")
@click.option("--uds", help="Unix socket that serves the data plane only.")
@click.option("--uds-fd", type=int, hidden=True, help="The same, as an inherited listening socket.")
@click.option("--open", "open_", is_flag=True, default=None, help="Any API key names a rollout. Loopback only.")
@click.option("--admin-key", help="Key of the control plane. [DATA/admin.key, made if absent]")
@click.option(
    "--durability",
    type=click.Choice(["process", "power"]),
    help="What a finished call survives: a killed process, or a power cut. [process]",
)
@click.option("--max-body-bytes", type=click.IntRange(1), help="Largest request body. [64 MiB]")
def command(config: Path | None, open_: bool | None, **flags: Any) -> None:
    """Record every call of an agent, between it and the policy server.

    Settings also come from orchard.toml, table [serve], and from ORCHARD_SERVE__NAME; flags win.
    """
    settings = load_serve({"open": open_, **flags}, config=config)
    asyncio.run(serve(settings, announce))


def announce(served: Served) -> None:
    """Say where it listens, and how to use it."""
    click.echo(f"orchard serves {served.url}/v1 and records to {served.data_dir}")
