"""The llama.cpp server in this process, serving SmolLM2-135M: a real chat model and no torch.

Not a wrapper of llama.cpp's API: clients talk to its own HTTP server. Nothing here knows of the proxy.

Invariant: a token scored again in its recorded context gets the recorded log-probability, whatever ran beside it.
That holds because of `n_ubatch = 16`: with llama.cpp's default of 512 prefill and decode run different kernels, and
the same token differs by up to 0.5. Measured here with 16, four slots, eight clients, prompts of 160 to 460 tokens:
1,198 tokens, every difference exactly 0 (with 512: up to 0.36).
"""

import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import xllamacpp

from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.policy import fetch

_log = logging.getLogger(__name__)

MODEL_NAME = "smollm2"
N_UBATCH = 16
HTTP_THREADS = 16
"""llama.cpp's default is one per core, and a waiting request holds one: two cores would answer no /health."""
START_TIMEOUT_S = 30.0
ERRORS_ONLY = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    slots: int = 4
    """Requests served side by side; each has its own context."""
    ctx: int = 4096
    """Tokens a slot."""
    model: Path | None = None
    """A GGUF file; None fetches SmolLM2-135M into the cache."""


def serve(options: Options, *, port_file: Path | None) -> None:
    """Run until SIGTERM or SIGINT, then end this process with status 0; requests under way are cut.

    The port file appears, whole, once requests are answered. Raises UsageError when the model cannot be loaded or the
    address is taken, FetchError when there is no model.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = start(options)
    url = server.listening_address
    _log.info("%s on %s: %d slots of %d tokens", MODEL_NAME, url, options.slots, options.ctx)
    if port_file is not None:
        _write_whole(port_file, url.rsplit(":", 1)[1] + "\n")
    stop.wait()
    _log.info("%s stopped", MODEL_NAME)
    logging.shutdown()
    # xllamacpp's destructor stops the model, then waits for handlers that wait for the model: with a request under
    # way it would never return. There is nothing on disk to lose.
    os._exit(0)


def start(options: Options) -> xllamacpp.Server:
    """Start the server in threads of this process; return it once it answers."""
    model = options.model or fetch.fetch()
    if not model.is_file():
        raise UsageError(f"There is no model file {model}.")
    try:
        server = xllamacpp.Server(_params(options, model))
    except RuntimeError as error:
        where = f"{options.host}:{options.port}"
        raise UsageError(f"llama.cpp could not load {model.name} or listen on {where}: see its lines above.") from error
    _wait_healthy(server.listening_address)
    return server


def _params(options: Options, model: Path) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {MODEL_NAME}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.ctx * options.slots
    params.n_ubatch = N_UBATCH
    # Two threads are slower than one on a busy machine: ggml spins while it waits.
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.n_threads_http = HTTP_THREADS
    # A cache of past slots in RAM would bring back old state unseen: no prompt could flush a slot any more, and a
    # re-feed would only read what it is meant to check.
    params.cache_ram_mib = 0
    # The bare model, unless a request says otherwise: llama.cpp's defaults truncate, but its logprobs do not show it.
    params.sampling.temp = 1.0
    params.sampling.top_k = 0
    params.sampling.top_p = 1.0
    params.sampling.min_p = 0.0
    params.use_jinja = True
    params.endpoint_metrics = True
    params.ui = False
    params.warmup = False
    params.verbosity = ERRORS_ONLY
    return params


def _wait_healthy(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310 (our own http URL)
                if json.load(answer).get("status") == "ok":
                    return
        except urllib.error.HTTPError:
            pass  # 503 while it loads
        time.sleep(0.02)
    raise OrchardError(f"llama.cpp did not answer on {url}/health within {START_TIMEOUT_S:g} s.")


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
