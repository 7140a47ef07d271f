"""`orchard policy tiny`: the seeded numpy model behind vLLM's HTTP routes.

Not the answers (tiny_chat, tiny_completions) and not the model. Nothing here knows the proxy. Invariants: /health
answers while anything computes; a client that goes away ends its generation within one hop.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from orchard_proxy.errors import UsageError
from orchard_proxy.policy import tiny_request, tiny_script, tiny_template, tiny_wire
from orchard_proxy.policy.tiny_chat import ChatAnswer, Job
from orchard_proxy.policy.tiny_completions import CompletionAnswer
from orchard_proxy.policy.tiny_engine import TinyEngine
from orchard_proxy.policy.tiny_fields import Fields, RequestError, parse_object, refused
from orchard_proxy.policy.tiny_messages import chat_messages
from orchard_proxy.policy.tiny_sampling import SamplingParams
from orchard_proxy.policy.tiny_tokenizer import END_ID
from orchard_proxy.policy.tiny_wire import Json

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
COMPLETION_MAX_TOKENS = 16
"""vLLM's default on /v1/completions."""


class TinyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes one tiny server differ from another."""

    seed: int = 0
    script: Path | None = None
    model_name: str = "tiny"
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int = 131072
    delay_s: float = 0.0


class _Answer(Protocol):
    async def whole(self) -> bytes: ...

    def events(self) -> AsyncIterator[bytes]: ...


class TinyServer:
    """The routes over one engine."""

    def __init__(self, options: TinyOptions) -> None:
        self._options = options
        self._script = tiny_script.load(options.script) if options.script else None
        processed = options.logprobs_mode == "processed_logprobs"
        self.engine = TinyEngine(seed=options.seed, processed_logprobs=processed, delay_s=options.delay_s)
        self._head = tiny_wire.head("modelperm", options.model_name)

    def app(self) -> web.Application:
        """Return the aiohttp application; it closes the engine when it ends."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/update_weight_version", self._update_weight_version)
        app.router.add_post("/weights", self._put_weights)
        app.router.add_get("/weights", self._get_weights)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/load", self._load)
        app.router.add_get("/health", self._health)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self.engine.close()

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = parse_object(await http.read())
        request = tiny_request.chat_request(body, model=self._options.model_name)
        job = await self.engine.run(lambda: self._chat_job(request))
        answer = ChatAnswer(self.engine, request, job, model=self._options.model_name)
        return await self._send(http, answer, stream=request.output.stream)

    def _chat_job(self, request: tiny_request.ChatRequest) -> Job:
        text = tiny_template.render(
            request.messages, request.tools, add_generation_prompt=request.add_generation_prompt
        )
        job = self._job(text, request.params, request.max_tokens, default=tiny_request.DEFAULT_MAX_TOKENS)
        said = self._script.answer(request.messages) if self._script else None
        if said is None:
            return job
        forced = self.engine.tokenizer.encode(said.text) + [END_ID] * said.end
        if request.max_tokens is None:
            room = self._options.max_model_len - len(job.ids)
            limit = min(room, max(len(forced), job.params.max_tokens))
            return msgspec.structs.replace(
                job, forced=forced, params=msgspec.structs.replace(job.params, max_tokens=limit)
            )
        return msgspec.structs.replace(job, forced=forced)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = parse_object(await http.read())
        request = tiny_request.completion_request(body, model=self._options.model_name)
        params, limit = request.params, request.max_tokens
        jobs = [
            await self.engine.run(lambda p=prompt: self._job(p, params, limit, default=COMPLETION_MAX_TOKENS))  # type: ignore[misc]
            for prompt in request.prompts
        ]
        answer = CompletionAnswer(self.engine, jobs, request.output, model=self._options.model_name)
        return await self._send(http, answer, stream=request.output.stream)

    def _job(self, prompt: str | list[int], params: SamplingParams, limit: int | None, *, default: int) -> Job:
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise refused("The prompt is empty.", "prompt")
        context = self._options.max_model_len
        params = tiny_request.limited(params, limit, prompt_tokens=len(ids), context=context, default=default)
        text = prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)
        return Job(ids=ids, text=text, params=params)

    def _encode(self, text: str) -> list[int]:
        try:
            return self.engine.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is no Unicode: {error.reason}") from error

    async def _send(self, http: web.Request, answer: _Answer, *, stream: bool) -> web.StreamResponse:
        self.engine.running += 1
        try:
            if stream:
                return await _stream(http, answer.events())
            return web.Response(body=await answer.whole(), content_type="application/json")
        finally:
            self.engine.running -= 1

    async def _tokenize(self, http: web.Request) -> web.Response:
        fields = Fields(parse_object(await http.read()))
        tiny_request.check_model(fields, self._options.model_name)
        text = fields.string("prompt")
        if text is None:
            messages = chat_messages(fields)
            generation = fields.boolean("add_generation_prompt", default=True)
            text = tiny_template.render(messages, fields.objects("tools"), add_generation_prompt=generation)
        ids = await self.engine.run(lambda: self._encode(text))
        strings = [self.engine.tokenizer.token_string(i) for i in ids] if fields.boolean("return_token_strs") else None
        context = self._options.max_model_len
        return _json({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, http: web.Request) -> web.Response:
        fields = Fields(parse_object(await http.read()))
        tiny_request.check_model(fields, self._options.model_name)
        ids = list(fields.integers("tokens"))
        tiny_request.check_ids(ids)
        return _json({"prompt": self.engine.tokenizer.decode(ids)})

    async def _models(self, _: web.Request) -> web.Response:
        name = self._options.model_name
        permission = {
            "id": self._head.id,
            "object": "model_permission",
            "created": self._head.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {"id": name, "object": "model", "created": self._head.created, "owned_by": "orchard", "root": name}
        model |= {"parent": None, "max_model_len": self._options.max_model_len, "permission": [permission]}
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, _: web.Request) -> web.Response:
        return _json({"server_load": self.engine.running})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self.engine.weight_version})

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        version = Fields(parse_object(await http.read())).string("new_version")
        if version is None:
            raise refused("new_version must be given.", "new_version")
        self.engine.weight_version = version
        return _json({"success": True, "new_version": version})

    async def _get_weights(self, _: web.Request) -> web.Response:
        version = self.engine.weight_version
        npz = await self.engine.run(self.engine.weights_npz)
        return web.Response(body=npz, content_type="application/octet-stream", headers={"x-weight-version": version})

    async def _put_weights(self, http: web.Request) -> web.Response:
        npz = await http.read()
        try:
            version = await self.engine.load_weights(npz, http.query.get("version"))
        except UsageError as error:
            raise RequestError(str(error)) from error
        log.info("weights are now version %s", version)
        return _json({"success": True, "new_version": version})


def _json(value: Json) -> web.Response:
    return web.Response(body=tiny_wire.body(value), content_type="application/json")


async def _stream(http: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(http)
    async for event in events:
        await response.write(event)
    await response.write_eof()
    return response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, body=tiny_wire.body(error.body), content_type="application/json")
    except web.HTTPNotFound:
        return web.Response(status=404, body=tiny_wire.body({"detail": "Not Found"}), content_type="application/json")


@contextlib.asynccontextmanager
async def running(options: TinyOptions, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve within the block; give the URL."""
    # A client that goes away cancels its handler, and with it the generation.
    runner = web.AppRunner(TinyServer(options).app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        name, bound = runner.addresses[0][:2]
        yield f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}"
    finally:
        await runner.cleanup()


def serve(options: TinyOptions, *, host: str, port: int, port_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT. Raise UsageError for a bad script or an address that cannot be had."""
    asyncio.run(_serve(options, host=host, port=port, port_file=port_file))


async def _serve(options: TinyOptions, *, host: str, port: int, port_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with running(options, host=host, port=port) as url:
            if port_file is not None:
                _write_port(port_file, url)
            print(f"tiny policy server: {url}/v1 (model {options.model_name})", flush=True)  # noqa: T201 - the result
            await stop.wait()
    except (socket.gaierror, OSError) as error:
        raise UsageError(f"cannot serve on {host}:{port}: {error}") from error


def _write_port(path: Path, url: str) -> None:
    # By rename: whoever waits for the file never reads half of it.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(url.rsplit(":", 1)[1] + "\n", encoding="ascii")
    partial.replace(path)
