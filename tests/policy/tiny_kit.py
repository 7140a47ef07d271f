"""A running tiny server for tests, and what a client of it reads. All real: sockets, model, tokenizer."""

import contextlib
import io
import json

import aiohttp
from fakes import twins

from orchard_proxy.policy import tiny_server
from orchard_proxy.policy.tiny_server import TinyOptions

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}},
]
INSTRUMENTED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}


def ask(text="hello", **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


class Client:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def send(self, path: str, body=None) -> tuple[int, str, bytes]:
        """Return (status, content type, body); a dict goes out as JSON, bytes as they are, None as GET."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if body is None else {"data": io.BytesIO(data)}
        async with self.http.request("GET" if body is None else "POST", self.url + path, **sent) as answer:
            return answer.status, answer.headers.get("content-type", ""), await answer.read()

    async def json(self, path: str, body=None):
        status, _, answer = await self.send(path, body)
        assert status == 200, answer
        return json.loads(answer)

    async def chat(self, **body):
        return await self.json("/v1/chat/completions", ask(**body))

    async def chunks(self, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
        status, kind, answer = await self.send(path, {**body, "stream": True})
        assert (status, kind) == (200, "text/event-stream; charset=utf-8"), answer
        assert answer.endswith(b"data: [DONE]\n\n")
        events = answer.decode().split("\n\n")[:-2]
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.asynccontextmanager
async def serving(tmp_path=None, script: str | None = None, **options):
    """Give a Client of a server that follows `script`."""
    path = None
    if script is not None:
        path = tmp_path / "script.toml"
        path.write_text(script, encoding="utf-8")
    async with (
        tiny_server.running(TinyOptions(script=path, **options)) as url,
        aiohttp.ClientSession() as http,
    ):
        yield Client(http, url)


def shape(value) -> str:
    """Return the form of JSON without its values: keys in order (token ids as keys are "id"), and kinds of values."""
    if isinstance(value, dict):
        members = [f"{key}:{shape(item)}" for key, item in value.items() if not key.isdigit()]
        members += sorted({f"id:{shape(item)}" for key, item in value.items() if key.isdigit()})
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + "|".join(sorted({shape(item) for item in value})) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return "number" if isinstance(value, int | float) else "str"


def vllm_twins():
    return twins.load("vllm")
