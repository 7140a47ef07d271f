"""What a chat-completions request asks for, read without parsing its messages.

Not a validator: the engine refuses what it refuses. The invariant: nothing a client can send raises here; a member of
the wrong type reads as absent and is named in `mistyped`.
"""

import json
from typing import Any

import msgspec
from msgspec import Raw

from orchard_proxy.wire import jsonbytes

DIALECT = "chat"

_OBJECT = msgspec.json.Decoder(dict[str, Raw])

_NOT_SAMPLING = frozenset(
    (
        # what is said
        *("messages", "tools", "functions", "documents", "prompt", "input_ids", "prompt_token_ids"),
        *("chat_template", "chat_template_kwargs", "prediction", "audio", "modalities"),
        # who asks, of whom, and how the answer travels
        *("model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "session_id", "cache_salt", "request_id", "priority"),
        *("kv_transfer_params", "cache_prompt", "id_slot"),
        # what is shown of the sampling
        *("logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "verbose", "return_tokens", "return_token_ids"),
        *("return_tokens_as_token_ids", "include_reasoning"),
    )
)


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as the proxy needs to understand it."""

    ok: bool
    """The body is a JSON object; when not, it is forwarded untouched and the engine refuses it in its own words."""
    body: bytes
    members: dict[str, Raw] = {}
    """Top-level members as raw JSON, views into `body`; the last of equal keys."""
    has_messages: bool = False
    """`messages` is an array: without one, every engine refuses."""
    model: str | None = None
    stream: bool = False
    n: int = 1
    include_usage: bool = False
    wants_logprobs: bool = False
    """`logprobs` is true."""
    top_logprobs: int | None = None
    has_tools: bool = False
    """`tools` (or the older `functions`) is an array with something in it."""
    mistyped: frozenset[str] = frozenset()
    """Members that are not of the type the API documents, e.g. `"logprobs": "abc"`, `"n": "2"`, `"stream": "yes"`."""

    def has(self, key: str) -> bool:
        """Say whether the member is there and not null."""
        raw = self.members.get(key)
        return raw is not None and bytes(raw) != b"null"

    def value(self, key: str) -> Any:
        """Decode one member; None when absent, null or not JSON."""
        raw = self.members.get(key)
        if raw is None:
            return None
        try:
            return jsonbytes.loads(bytes(raw))
        except ValueError:
            return None


def decode(body: bytes) -> ChatRequest:
    """Read a request body. Never raises."""
    members = _members(body)
    if members is None:
        return ChatRequest(ok=False, body=body)
    mistyped: set[str] = set()

    def read(key: str, *types: type) -> Any:
        raw = members.get(key)
        if raw is None:
            return None
        value = _small(bytes(raw))
        if value is None or type(value) in types:
            return value
        mistyped.add(key)
        return None

    options = read("stream_options", dict) or {}
    n = read("n", int)
    return ChatRequest(
        ok=True,
        body=body,
        members=members,
        has_messages=bytes(members.get("messages", Raw())).startswith(b"["),
        model=read("model", str),
        stream=read("stream", bool) is True,
        n=1 if n is None else n,
        include_usage=options.get("include_usage") is True,
        wants_logprobs=read("logprobs", bool) is True,
        top_logprobs=read("top_logprobs", int),
        has_tools=_filled(members.get("tools")) or _filled(members.get("functions")),
        mistyped=frozenset(mistyped),
    )


def sampling(request: ChatRequest) -> Raw:
    """Return the parameters that shape the answer, as sent: everything but what is said, shown or addressed."""
    return Raw(jsonbytes.dumps({k: strict(v) for k, v in request.members.items() if k not in _NOT_SAMPLING}))


def messages(request: ChatRequest) -> Raw:
    """Return the messages as sent, or an empty list."""
    return strict(request.members.get("messages", Raw(b"[]")))


def tools(request: ChatRequest) -> Raw:
    """Return the tools as sent (or the older functions), or null."""
    return strict(request.members.get("tools") or request.members.get("functions") or Raw(b"null"))


def strict(raw: Raw) -> Raw:
    """Return JSON that every reader takes: untouched where it is that; else NaN is null and surrogates are escaped."""
    text = bytes(raw)
    try:
        msgspec.json.decode(text, type=Raw)
        text.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Raw(_respelled(text))
    return raw


def _respelled(text: bytes) -> bytes:
    try:
        value = json.loads(text.decode("utf-8", "replace"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return jsonbytes.dumps(text.decode("utf-8", "replace"))
    return jsonbytes.dumps(value)


def _members(body: bytes) -> dict[str, Raw] | None:
    """Accept JSON, and what Python's json accepts beyond it (NaN), since engines written in Python do."""
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError:
        return None
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return jsonbytes.members(body)


def _small(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return NotImplemented  # a type that no member may have


def _filled(raw: Raw | None) -> bool:
    if raw is None:
        return False
    text = bytes(raw)
    return text.startswith(b"[") and text[1:].lstrip() != b"]"
