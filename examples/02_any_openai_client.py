"""Any OpenAI client: point it at the proxy, and its key says which rollout a call belongs to.

    orchard policy tiny &                        # or your own vLLM, llama.cpp, any OpenAI-compatible server
    orchard serve --open --upstream http://127.0.0.1:8001 &
    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1
    python examples/02_any_openai_client.py      # pip install openai
    orchard rollouts ls

Nothing here knows of Orchard: no import, no header, no extra field. A client that cannot be given a key can carry it in
the path, /r/KEY/v1, or as x-api-key.
"""

import asyncio
import http.client
import json
import os
import urllib.parse
import urllib.request

import openai

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").rstrip("/")
QUESTION = [{"role": "user", "content": "Say anything."}]


def streamed(model: str) -> str:
    """The openai SDK, streaming: events arrive one by one, as the engine sends them."""
    client = openai.OpenAI(base_url=BASE_URL, api_key="streamed")
    stream = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def turns(model: str) -> str:
    """A conversation of three turns: where each prompt extends the last, they become one training row."""
    client = openai.OpenAI(base_url=BASE_URL, api_key="turns")
    messages = list(QUESTION)
    for _ in range(3):
        said = client.chat.completions.create(model=model, messages=messages, max_tokens=8).choices[0].message
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
    return " / ".join(message["content"] for message in messages if message["role"] == "assistant")


async def side_by_side(model: str) -> str:
    """The asynchronous SDK: four calls at once, each in a rollout of its own, two answers each."""

    async def ask(number: int) -> int:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=f"side-by-side-{number}") as client:
            answer = await client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, n=2)
            return len(answer.choices)

    return f"{sum(await asyncio.gather(*map(ask, range(4))))} answers"


def no_sdk(model: str) -> str:
    """Plain HTTP with the key in the path, for a program that has a base URL to set and nothing else."""
    url = BASE_URL.removesuffix("/v1") + "/r/no-sdk/v1/chat/completions"
    body = json.dumps({"model": model, "messages": QUESTION, "max_tokens": 8}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def one_who_leaves(model: str) -> str:
    """A client that hangs up in the middle: the engine stops, what it said is kept and never trained on."""
    url = urllib.parse.urlsplit(BASE_URL)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = json.dumps({"model": model, "messages": QUESTION, "stream": True, "ignore_eos": True, "max_tokens": 20_000})
    headers = {"Content-Type": "application/json", "x-api-key": "one-who-leaves"}
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    heard = connection.getresponse().read(2000)
    connection.close()
    return f"left after {len(heard)} bytes"


def main() -> None:
    model = openai.OpenAI(base_url=BASE_URL, api_key="look").models.list().data[0].id
    print(f"{BASE_URL} serves {model}")
    print(f"streamed        {streamed(model)!r}")
    print(f"turns           {turns(model)!r}")
    print(f"side-by-side-*  {asyncio.run(side_by_side(model))}")
    print(f"no-sdk          {no_sdk(model)!r}")
    print(f"one-who-leaves  {one_who_leaves(model)}")


if __name__ == "__main__":
    main()
