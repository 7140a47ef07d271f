"""What a recorded call costs: CPU-ms per call of `orchard serve` beside a bare aiohttp pass-through, in one run.

Not a test: timings are noisy, so read the ratios. The engine and the clients are processes of their own, and CPU time
is read from /proc for the proxy's process alone; the deriver, which works behind it, is shown beside it.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent))
from fakes.engine import Said, ScriptedEngine, whole
from support.children import Child, pids_of

SIZES = {"64": 64, "8k": 8192, "32k": 32768}
OUTPUT_TOKENS = 64
CONCURRENCY = 8


def answer_of(prompt_tokens: int) -> bytes:
    entries = [
        {"token": "x", "logprob": -0.123456789, "bytes": [120], "top_logprobs": []} for _ in range(OUTPUT_TOKENS)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * OUTPUT_TOKENS},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": list(range(1000, 1000 + OUTPUT_TOKENS)),
    }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": OUTPUT_TOKENS}
    body = {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}
    return json.dumps(
        {**body, "prompt_token_ids": list(range(10_000, 10_000 + prompt_tokens))}, separators=(",", ":")
    ).encode()


def stream_of(prompt_tokens: int) -> bytes:
    whole_body = json.loads(answer_of(prompt_tokens))
    ids, entries = whole_body["choices"][0]["token_ids"], whole_body["choices"][0]["logprobs"]["content"]

    def event(delta, finish, prompt=None, **extra) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **extra}
        head = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
        body = {**head, "prompt_token_ids": prompt} if prompt else head
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    parts = [event({"role": "assistant", "content": ""}, None, whole_body["prompt_token_ids"])]
    for number, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        finish = "stop" if number == len(ids) - 1 else None
        parts.append(event({"content": "x"}, finish, logprobs={"content": [entry]}, token_ids=[token]))
    return b"".join(parts)


def request_of(prompt_tokens: int, *, stream: bool) -> bytes:
    text = "word " * prompt_tokens  # About five bytes of text a token, as in English.
    return json.dumps(
        {"model": str(prompt_tokens), "messages": [{"role": "user", "content": text}], "stream": stream}
    ).encode()


def engine_process(pipe) -> None:
    answers = {}

    def say(heard):
        if heard.path == "/v1/models":
            return whole({"data": [{"id": "64"}]})
        body = heard.json
        key = (int(body["model"]), bool(body.get("stream")))
        if key not in answers:
            answers[key] = stream_of(key[0]) + b"data: [DONE]\n\n" if key[1] else answer_of(key[0])
        return Said([answers[key]], content_type="text/event-stream" if key[1] else "application/json")

    async def main() -> None:
        async with ScriptedEngine(say) as engine:
            pipe.send(engine.url)
            await asyncio.sleep(3600)

    asyncio.run(main())


def bare_process(upstream: str, pipe) -> None:
    """The least that an aiohttp proxy can do."""

    async def main() -> None:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(upstream + request.path, data=body, headers=headers) as answer:
                reply = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
                return reply

        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}", os.getpid()))
        await asyncio.sleep(3600)

    asyncio.run(main())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(url: str, body: bytes, calls: int) -> None:
    left = iter(range(calls))

    async def client(session) -> None:
        for _ in left:
            async with session.post(
                url + "/v1/chat/completions", data=body, headers={"Authorization": "Bearer b"}
            ) as answer:
                assert answer.status == 200
                await answer.read()

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))


def measure(url: str, pid: int, body: bytes, calls: int) -> float:
    before = cpu_s(pid)
    asyncio.run(drive(url, body, calls))
    return (cpu_s(pid) - before) / calls * 1000


def spawn(target, *args):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    return ours.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(options, Path(folder))


def report(options, folder: Path) -> None:
    upstream = spawn(engine_process)
    bare_url, bare_pid = spawn(bare_process, upstream)
    flags = ["--upstream", upstream, "--data", str(folder / "data"), "--open", "--port", "0"]
    server = Child(["serve", *flags], folder / "port", folder / "log")
    url = f"http://127.0.0.1:{server.wait_for_port()}"
    print(f"{'prompt ids':>10} {'answer':>8} {'bare ms':>8} {'orchard ms':>10} {'ratio':>6} {'deriver ms':>10}")
    try:
        for name, tokens in SIZES.items():
            for stream in (False, True):
                pair = {"bare": (bare_url, bare_pid), "orchard": (url, server)}
                row(options, name, request_of(tokens, stream=stream), stream=stream, **pair, folder=folder)
    finally:
        server.stop()


def row(options, name, body, *, stream, bare, orchard, folder) -> None:
    url, server = orchard
    asyncio.run(drive(url, body, 20))
    asyncio.run(drive(bare[0], body, 20))
    (deriver,) = pids_of("derive", "--follow", str(folder / "data"))
    behind = cpu_s(deriver)
    ours, theirs = [], []
    for _ in range(options.rounds):
        theirs.append(measure(*bare, body, options.calls))
        ours.append(measure(url, server.process.pid, body, options.calls))
    asyncio.run(asyncio.sleep(2))
    derived = (cpu_s(deriver) - behind) / (options.rounds * options.calls) * 1000
    a, b = statistics.median(ours), statistics.median(theirs)
    ratio = a / b if b else math.nan
    print(
        f"{name:>10} {'stream' if stream else 'whole':>8} {b:8.2f} {a:10.2f} {ratio:6.2f} {derived:10.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
