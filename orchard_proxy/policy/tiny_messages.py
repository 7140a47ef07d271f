"""`messages` of a chat request: decoded for the template.

Text only. As in vLLM, tool-call arguments in the history must be JSON: a malformed string is refused with 400.
"""

import json
from typing import Any

from orchard_proxy.policy.tiny_fields import Fields, RequestError, invalid, refused
from orchard_proxy.policy.tiny_template import Message, ToolCall, dumps


def chat_messages(fields: Fields) -> list[Message]:
    """Decode `messages`."""
    if fields.body.get("messages") is None:
        raise invalid("missing", "body.messages", "Field required", fields.body)
    messages = [_message(raw, f"body.messages.{i}") for i, raw in enumerate(fields.objects("messages") or [])]
    if not messages:
        raise refused("messages must hold at least one message.", "messages")
    return messages


def _message(raw: dict[str, Any], where: str) -> Message:
    role = raw.get("role")
    if not isinstance(role, str):
        raise invalid("missing", f"{where}.role", "Field required", raw)
    reasoning = raw.get("reasoning") or raw.get("reasoning_content") or ""
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid("list_type", f"{where}.tool_calls", "Input should be a valid list", calls)
    return Message(
        role=role,
        content=_text(raw.get("content"), f"{where}.content"),
        reasoning=reasoning if isinstance(reasoning, str) else "",
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)),
    )


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("string_type", where, "Input should be a valid string", content)
    return "\n".join(_part(part, f"{where}.{i}") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if isinstance(text, str):
        return text
    raise refused(f"a content part of type {kind!r} cannot be read: this model reads text only.", where)


def _tool_call(raw: Any, where: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("missing", f"{where}.function.name", "Field required", raw)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(str(error)) from error
        return ToolCall(name=function["name"], arguments=arguments)
    return ToolCall(name=function["name"], arguments=dumps(arguments or {}))
