"""Answers written by hand in the shapes of the captured ones, for what no captured engine would do."""

import json
from typing import Any

from orchard_proxy.engines.base import Exchange
from orchard_proxy.schema.packed import unpack_floats, unpack_ids

REQUEST = b'{"model":"smol","n":2,"messages":[{"role":"user","content":"hi"}]}'


def entry(logprob: Any = -0.5, token: Any = "a", **more: Any) -> dict:
    return {"token": token, "logprob": logprob, "bytes": [97], "top_logprobs": [], **more}


def entries(ids: list, logprobs: list | None = None) -> list[dict]:
    return [entry(-0.5 if logprobs is None else logprobs[i]) for i in range(len(ids if logprobs is None else logprobs))]


def choice(
    ids: Any, lps: Any = "same", *, index: int = 0, text: str | None = "aaa", finish: str | None = "stop", **more
):
    if lps == "same":
        lps = entries(ids)
    content = {"content": lps} if lps is not None else None
    message = {"role": "assistant", "content": text}
    given = {} if ids is None else {"token_ids": ids}
    return (
        {"index": index, "message": message, "logprobs": content, "finish_reason": finish, "stop_reason": None}
        | given
        | more
    )


def body(*choices: dict, prompt: Any = (1, 2, 3), usage: Any = None, **more) -> bytes:
    stated = {} if usage is None else {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    whole = {"id": "x", "model": "smol", "choices": list(choices), "prompt_token_ids": prompt} | stated | more
    return json.dumps(whole).encode()


def chunk(
    ids: Any = None, lps: Any = "same", *, index: int = 0, delta: dict | None = None, finish: str | None = None, **more
):
    if lps == "same":
        lps = None if ids is None else entries(ids)
    content = {"content": lps} if lps is not None else None
    one = {"index": index, "delta": delta or {}, "logprobs": content, "finish_reason": finish, "token_ids": ids}
    return {"id": "x", "model": "smol", "choices": [one], **more}


def sse(*chunks: Any, done: bool = True) -> bytes:
    events = [c if isinstance(c, bytes) else json.dumps(c).encode() for c in chunks] + [b"[DONE]"] * done
    return b"".join(b"data: " + event + b"\n\n" for event in events)


def exchange(answer: bytes, **more: Any) -> Exchange:
    kind = "text/event-stream; charset=utf-8" if answer.startswith(b"data:") else "application/json"
    plain = {"request": REQUEST, "status": 200, "content_type": kind, "logprobs_mode": "raw"}
    return Exchange(answer=answer, **{**plain, **more})


def ids(choice) -> list[int]:
    return unpack_ids(choice.token_ids)


def logprobs(choice) -> list[float]:
    return unpack_floats(choice.logprobs)
