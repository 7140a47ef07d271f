"""The tiny policy's chat template: messages and tools to prompt text (Hermes/Qwen style, data/tiny_template.jinja).

Not a parser: tiny_parse reads the answers. Invariant: nothing is put between reasoning, content and a tool call, and a
call's arguments are printed as the client sent them; so within a tool loop, a client that echoes the assistant's
message faithfully gets a prompt that starts with the last prompt and the answer, token by token.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any

import msgspec
from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call in an assistant message; `arguments` is JSON text, verbatim."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message as the template needs it."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
    environment.filters["json"] = dumps
    source = resources.files("orchard_proxy.policy").joinpath("data/tiny_template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def render(messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = True) -> str:
    """Return the prompt text."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


def dumps(value: Any) -> str:
    """Write JSON as the template and the scripts do: `{"a": 1, "b": "é"}`."""
    return json.dumps(value, ensure_ascii=False)


def assistant_text(*, reasoning: str = "", content: str = "", tool_calls: tuple[ToolCall, ...] = ()) -> str:
    """Return what a model would say to give this message: exactly what `render` prints for it, without <|im_end|>."""
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    calls = [f'<tool_call>\n{{"name": {dumps(c.name)}, "arguments": {c.arguments}}}\n</tool_call>' for c in tool_calls]
    return thought + content + "\n".join(calls)
