"""Scripts of the tiny policy: which answer is forced for which conversation. Grammar: docs/policy-tiny.md.

Not generation: it gives text; the model then scores every token of it. Invariant: an answer depends on the conversation
alone (no counters), so that any number of rollouts can share a server and a retry gives the same answer.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.policy.tiny_template import Message, ToolCall, assistant_text, dumps

_HOLE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
PATTERN_KEYS = ("system", "last", "any")
SAY_KEYS = ("text", "reasoning", "tool_calls", "raw")
HEARD_ROLES = ("user", "tool", "function")
"""Who can speak last; the system and the assistant itself never count."""
MOST_CHARACTERS = 10_000_000
"""Of a repeated text: far more than any context holds."""


class ScriptCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call to make; a string as `arguments` is sent as it is, even if it is no JSON."""

    name: str
    arguments: dict[str, Any] | str = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[rule]]`: when (all given conditions hold), and what to say."""

    name: str = ""
    turn: int | list[int] | None = None
    system: str | None = None
    last: str | None = None
    last_role: str | None = None
    any: str | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ScriptCall] = []
    raw: str = ""
    repeat: int = 1
    end: bool = True


class ScriptFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    rule: list[Rule]


class Forced(msgspec.Struct, frozen=True, kw_only=True):
    """What the model shall say; `end`: and then stop, instead of going on freely."""

    text: str
    end: bool


class Script:
    """The rules of one file."""

    def __init__(self, rules: list[Rule]) -> None:
        self._rules = [(rule, _compiled(rule)) for rule in rules]

    def answer(self, messages: list[Message]) -> Forced | None:
        """Return what the first matching rule says; None means: sample freely."""
        seen = _Seen(messages)
        for rule, patterns in self._rules:
            captures = _match(rule, patterns, seen)
            if captures is not None:
                return Forced(text=_say(rule, captures), end=rule.end)
        return None


class _Seen:
    """The conversation as conditions see it."""

    def __init__(self, messages: list[Message]) -> None:
        self.turn = 1 + sum(m.role == "assistant" for m in messages)
        heard = [m for m in messages if m.role not in {"assistant", "system", "developer"}]
        self.last_role = heard[-1].role if heard else ""
        parts = {
            "system": [m.content for m in messages if m.role in {"system", "developer"}],
            "last": [heard[-1].content] if heard else [],
            "any": [m.content + "".join(f"\n{call.name} {call.arguments}" for call in m.tool_calls) for m in messages],
        }
        self.parts = {key: "\n".join(texts) for key, texts in parts.items()}


def load(path: Path) -> Script:
    """Read a script. Raise UsageError that names the file, the rule and the key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        script = msgspec.convert(raw, ScriptFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"script {path}: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"script {path}: {_located(str(error))}") from error
    for number, rule in enumerate(script.rule, 1):
        for problem in _problems(rule):
            label = f" ({rule.name})" if rule.name else ""
            raise UsageError(f"script {path}: rule {number}{label}: {problem}")
    return Script(script.rule)


def _located(message: str) -> str:
    """Say "rule 2: …" for msgspec's "… - at `$.rule[1].text`"."""
    found = re.search(r" - at `\$\.rule\[(\d+)\]\.?(.*)`$", message)
    if found is None:
        return message
    where = f" {found.group(2)}:" if found.group(2) else ""
    return f"rule {int(found.group(1)) + 1}:{where} {message[: found.start()]}"


def _problems(rule: Rule) -> list[str]:
    problems = []
    if not any(getattr(rule, key) for key in SAY_KEYS):
        problems.append(f"says nothing: give one of {', '.join(SAY_KEYS)}")
    if rule.raw and (rule.text or rule.reasoning or rule.tool_calls):
        problems.append("raw: cannot stand beside text, reasoning or tool_calls")
    if rule.repeat < 1:
        problems.append(f"repeat: must be at least 1, not {rule.repeat}")
    if rule.repeat * max(len(rule.text), len(rule.raw)) > MOST_CHARACTERS:
        problems.append(f"repeat: {rule.repeat} times this text is more than {MOST_CHARACTERS:,} characters")
    if rule.last_role is not None and rule.last_role not in HEARD_ROLES:
        problems.append(f"last_role: must be one of {', '.join(HEARD_ROLES)}, not {rule.last_role!r}")
    if any(turn < 1 for turn in _turns(rule)):
        problems.append("turn: the first answer is turn 1")
    problems += [f"{key}: {error}" for key in PATTERN_KEYS if (error := _regex_error(getattr(rule, key)))]
    if not problems:
        problems += _hole_problems(rule)
    return problems


def _regex_error(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        return f"not a regular expression: {error}"
    return None


def _hole_problems(rule: Rule) -> list[str]:
    groups = sum(pattern.groups for pattern in _compiled(rule).values())
    used = [
        int(hole) for text in _texts(rule) for escaped, hole in _HOLE.findall(text) if not escaped and hole.isdigit()
    ]
    bad = [n for n in used if not 0 <= n <= groups]
    problems = [f"{{{n}}}: the patterns have {groups} group(s); write {{{{{n}}}}} for the text {{{n}}}" for n in bad]
    for call in rule.tool_calls:
        try:
            dumps(call.arguments)
        except TypeError as error:
            problems.append(f"tool_calls: arguments of {call.name}: {error}")
    return problems


def _texts(rule: Rule) -> list[str]:
    found = [rule.text, rule.reasoning, rule.raw]
    for call in rule.tool_calls:
        _strings_of(call.arguments, found)
    return found


def _strings_of(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _strings_of(item, found)
    elif isinstance(value, list):
        for item in value:
            _strings_of(item, found)


def _compiled(rule: Rule) -> dict[str, re.Pattern[str]]:
    patterns = {key: getattr(rule, key) for key in PATTERN_KEYS}
    return {
        key: re.compile(pattern, re.DOTALL | re.MULTILINE) for key, pattern in patterns.items() if pattern is not None
    }


def _turns(rule: Rule) -> list[int]:
    if rule.turn is None:
        return []
    return rule.turn if isinstance(rule.turn, list) else [rule.turn]


def _match(rule: Rule, patterns: dict[str, re.Pattern[str]], seen: _Seen) -> dict[str, str] | None:
    """Return the captures when every condition of the rule holds."""
    if rule.turn is not None and seen.turn not in _turns(rule):
        return None
    if rule.last_role is not None and seen.last_role != rule.last_role:
        return None
    captures: dict[str, str] = {"turn": str(seen.turn)}
    number = 0
    for key, pattern in patterns.items():
        found = pattern.search(seen.parts[key])
        if found is None:
            return None
        captures.setdefault("0", found.group(0))
        for group in found.groups(""):
            number += 1
            captures[str(number)] = group
        captures |= found.groupdict("")
    return captures


def _say(rule: Rule, captures: dict[str, str]) -> str:
    if rule.raw:
        return str(_filled(rule.raw, captures)) * rule.repeat
    calls = []
    for call in rule.tool_calls:
        arguments = _filled(call.arguments, captures)
        calls.append(ToolCall(name=call.name, arguments=arguments if isinstance(arguments, str) else dumps(arguments)))
    content = _filled(rule.text, captures) * rule.repeat
    return assistant_text(reasoning=_filled(rule.reasoning, captures), content=content, tool_calls=tuple(calls))


def _filled(value: Any, captures: dict[str, str]) -> Any:
    """Put captures into every string: {1}, {name}, {turn}; {{1}} is the text {1}; other braces stay."""
    if isinstance(value, str):
        return _HOLE.sub(lambda m: f"{{{m[1]}}}" if m[1] else captures.get(m[2], m[0]), value)
    if isinstance(value, dict):
        return {key: _filled(item, captures) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, captures) for item in value]
    return value
