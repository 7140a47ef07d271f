"""`orchard run`: tasks, n times each, through a harness in sandboxes, recorded and graded.

Only composition: which proxy, which sandboxes, which harness. The run itself is `runner.run`.
"""

import asyncio
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec

from env_service.backends.local import LocalBackend
from harness_images import registry
from orchard_proxy.cli.options import data_option, json_option
from orchard_proxy.cli.table import print_table
from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.runner import orders, run
from orchard_proxy.runner.control import ControlClient
from orchard_proxy.runner.orders import Draft, Orders
from orchard_proxy.runner.proxy import Proxy, ProxyChild, RemoteProxy
from orchard_proxy.runner.rollout import House
from orchard_proxy.runner.summary import Summary, Totals, as_json
from orchard_proxy.schema.launch import HarnessError
from orchard_proxy.schema.sandbox import SandboxError
from orchard_proxy.settings import load_run, load_serve


@click.command(name="run")
@click.argument("tasks", required=False, type=click.Path(path_type=Path))
@click.option(
    "--harness", help="A bundled harness (`orchard harness ls`), or the path of a folder with a harness.toml."
)
@click.option("--harness-arg", multiple=True, metavar="NAME=VALUE", help="An argument of the harness; may be repeated.")
@click.option(
    "--upstream", help="Root URL of the policy server, for the proxy that is started. [that of orchard serve]"
)
@click.option("--proxy", help="URL of a proxy that runs already; none is started then.")
@click.option("--admin-key", help="Key of its control plane; better in ORCHARD_RUN__ADMIN_KEY.")
@click.option("--model", help="Model name that the harness asks for. [the first that the policy server lists]")
@click.option("--n", type=click.IntRange(1), help="Rollouts a task. [1]")
@click.option("--concurrency", type=click.IntRange(1), help="Rollouts side by side. [4]")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds for the agent, for tasks that do not say. [1800]",
)
@click.option("--retries", type=click.IntRange(0), help="New attempts after a fault of the infrastructure. [2]")
@click.option("--rootfs", type=click.Path(exists=True, file_okay=False), help="Root folder, for tasks without one.")
@click.option("--run-id", help="Name of the run. [made up and printed]")
@click.option("--resume", is_flag=True, help="Go on with the run --run-id, or with the one started last in --data.")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="orchard.toml. [./orchard.toml]")
@data_option
@json_option
def command(
    *,
    tasks: Path | None,
    harness_arg: tuple[str, ...],
    upstream: str | None,
    run_id: str | None,
    resume: bool,
    config: Path | None,
    data_dir: Path,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run every task in TASKS n times, each in a sandbox of its own, and grade it.

    TASKS is a JSONL file, a task folder in Harbor's layout, or a folder of them: docs/running.md. The first Ctrl-C lets
    the running rollouts finish, the second aborts them; --resume goes on afterwards, and after a crash. Exit status 1:
    some rollouts did not come to an end of their own.
    """
    settings = load_run(flags, config=config)
    wanted = Orders(
        data_dir=data_dir,
        tasks=tasks,
        harness_args=_pairs(harness_arg) or None,
        upstream=upstream,
        run_id=run_id,
        resume=resume,
        **{name: getattr(settings, name) for name in _FROM_SETTINGS},
    )
    try:
        summary = asyncio.run(_run(wanted, settings.admin_key, config))
    except HarnessError as error:
        kind = UsageError if error.failure.code in _USAGE else OrchardError
        raise kind(str(error)) from error
    except SandboxError as error:
        raise OrchardError(str(error)) from error
    except asyncio.CancelledError as error:
        raise OrchardError("stopped; go on with --resume") from error
    click.echo(_json(summary) if as_json else _text(summary), nl=as_json)
    if not summary.ok:
        click.get_current_context().exit(1)


_FROM_SETTINGS = ("harness", "model", "n", "concurrency", "timeout_s", "retries", "rootfs", "proxy")
_MODELS_S = 30.0
_WIDE = 1e6
"""A mean from here on is written with an exponent."""
_USAGE = frozenset({"unknown_harness", "unknown_argument", "bad_manifest"})


def _pairs(words: tuple[str, ...]) -> Mapping[str, str]:
    for word in words:
        if "=" not in word[1:]:
            raise UsageError(f"--harness-arg takes NAME=VALUE, not {word!r}")
    return dict(word.split("=", 1) for word in words)


async def _run(wanted: Orders, admin_key: str | None, config: Path | None) -> Summary:
    made = orders.draft(wanted)
    for task in made.tasks:
        for warning in task.warnings:
            click.echo(f"orchard: task {task.task_id}: {warning}", err=True)
    harness = registry.find(made.plan.harness_at, made.plan.harness_args)
    await harness.install()
    async with AsyncExitStack() as stack:
        proxy, broken = await _proxy(stack, made, wanted.data_dir, admin_key, config)
        control = await stack.enter_async_context(ControlClient(lambda: proxy.url, proxy.admin_key))
        await run.wait_until_ready(control)
        model = await _model(made, config)
        backend = LocalBackend()
        stack.push_async_callback(backend.close)
        await backend.check()
        plan = orders.settled(made, harness=harness.name, harness_version=harness.version, model=model)
        click.echo(
            f"orchard: run {plan.run_id}: {len(made.tasks)} tasks, n = {plan.n}, {plan.harness}, {model}", err=True
        )
        stop = run.Stop(broken)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.signal)
        house = House(plan=plan, control=control, proxy=proxy, backend=backend, harness=harness)
        return await run.conduct(house, made.tasks, stop, data_dir=wanted.data_dir, export=_export(made, wanted))


async def _proxy(
    stack: AsyncExitStack, made: Draft, data_dir: Path, admin_key: str | None, config: Path | None
) -> tuple[Proxy, "asyncio.Future[None] | None"]:
    if made.plan.proxy is not None:
        if admin_key is None:
            raise UsageError("--proxy needs --admin-key, or ORCHARD_RUN__ADMIN_KEY")
        if not made.plan.model:
            raise UsageError("--proxy needs --model: the name that the harness asks for")
        return await stack.enter_async_context(RemoteProxy(made.plan.proxy, admin_key)), None
    settings = load_serve({"upstream": made.plan.upstream}, config=config)
    flags = ["--upstream", settings.upstream, *(["--config", str(config)] if config else [])]
    env = {"ORCHARD_SERVE__ADMIN_KEY": settings.admin_key} if settings.admin_key else {}
    child = await stack.enter_async_context(ProxyChild(data_dir, flags, env=env))
    return child, child.failed


async def _model(made: Draft, config: Path | None) -> str:
    """Return the model to ask for: the wanted one where the policy server lists it or lists none, else its first."""
    wanted = made.plan.model
    if made.plan.proxy is not None:
        return wanted  # Only its rollouts can ask: `run.check_model`.
    settings = load_serve({"upstream": made.plan.upstream}, config=config)
    url = f"{settings.upstream.rstrip('/')}/v1/models"
    try:
        listed = await _listed(url, settings.upstream_key)
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
        if wanted:
            return wanted
        raise UsageError(f"{url} lists no model; say --model") from error
    if wanted and wanted not in listed:
        raise UsageError(f"--model {wanted}: the policy server has no such model, but {', '.join(listed)}")
    return wanted or listed[0]


async def _listed(url: str, key: str | None) -> list[str]:
    """Return the names that a policy server lists, at least one. Raises all sorts of things where it does not."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_MODELS_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session, session.get(url) as answer:
        names = [str(one["id"]) for one in msgspec.json.decode(await answer.read(), type=dict[str, Any])["data"]]
    if not names:
        raise LookupError("an empty list")
    return names


def _export(made: Draft, wanted: Orders) -> str:
    data = wanted.data_dir if made.plan.proxy is None else "DATA-OF-THE-PROXY"
    return f"orchard export --data {data} --out OUT"


def _json(summary: Summary) -> str:
    return as_json(summary)


def _text(summary: Summary) -> str:
    """Print the table, and return the lines below it."""
    ks = list(summary.total.pass_at_k)
    headers = ["task", "n", "passed", "reward", *(f"pass@{k}" for k in ks), "tokens", "seconds", "failures"]
    rows = [_row(task.task_id, task.totals, ks) for task in summary.tasks]
    print_table(headers, [*rows, _row("total", summary.total, ks)] if len(rows) > 1 else rows)
    total = summary.total
    lines = [f"{total.finished} of {total.n} rollouts ended, {total.attempts} attempts, {summary.wall_s:.0f} s"]
    if summary.left:
        lines.append(f"{summary.left} to do: orchard run --resume --run-id {summary.run_id}")
    return "\n".join([*lines, f"rows: {summary.export}", ""])


def _row(name: str, totals: Totals, ks: list[str]) -> list[object]:
    failures = ", ".join(f"{code} {count}" for code, count in totals.failures.items()) or None
    mean = None if totals.reward_mean is None else _mean(totals.reward_mean)
    at_k = [f"{totals.pass_at_k[k]:.3f}" if k in totals.pass_at_k else None for k in ks]
    seconds = totals.duration_s_mean
    return [name, totals.n, totals.passed, mean, *at_k, totals.sampled_tokens, seconds, failures]


def _mean(reward: float) -> str:
    return f"{reward:.3f}" if abs(reward) < _WIDE else f"{reward:.4g}"
