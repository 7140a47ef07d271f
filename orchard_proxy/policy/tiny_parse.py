"""From the model's text to reasoning, content and tool calls, as the text comes.

Not the wire: it gives `Delta`s; tiny_wire prints them. The whole-answer form is the fold of the same deltas, so a
stream and its non-stream twin never differ. Invariant: no character is lost: what is not in a delta is a marker, white
space after a call, or the frame of a call.

A call is `<tool_call>{"name": "…", "arguments": …}</tool_call>` with any white space. A block without a readable name
is no call: it is given as content, markers and all. Arguments are verbatim, also when they are no JSON.
"""

import json
import re

import msgspec

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*', re.DOTALL)


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one tool call: first its name, then its arguments bit by bit."""

    index: int
    name: str | None = None
    arguments: str | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class OutputParser:
    """Feed text, get deltas. `tools` says whether calls are looked for."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._state = "start"
        self._buffer = ""
        self._calls = 0
        self._between = False
        self._arguments: _ArgumentScanner | None = None
        self._out = _Collector()

    @property
    def calls(self) -> int:
        """How many tool calls began."""
        return self._calls

    def feed(self, text: str, *, last: bool = False) -> Delta:
        """Take more text. `last` lets go of whatever was held."""
        self._buffer += text
        while self._advance():
            pass
        if last:
            self._flush()
        return self._out.take()

    def _advance(self) -> bool:
        before = (self._state, len(self._buffer))
        getattr(self, f"_in_{self._state}")()
        return (self._state, len(self._buffer)) != before

    def _in_start(self) -> None:
        if self._buffer.startswith(THINK):
            self._buffer = self._buffer[len(THINK) :]
            self._state = "thought"
        elif self._buffer and not THINK.startswith(self._buffer):
            self._state = "content"

    def _in_thought(self) -> None:
        text, found = self._until(THINK_END)
        self._out.reasoning += text
        if found:
            self._state = "content"

    def _in_content(self) -> None:
        if not self._tools:
            self._out.content += self._buffer
            self._buffer = ""
            return
        if self._between:
            # White space between two calls is the template's, not the model's.
            self._buffer = self._buffer.lstrip()
        text, found = self._until(CALL)
        self._between = self._between and not text
        self._out.content += text
        if found:
            self._state = "call"

    def _in_call(self) -> None:
        match = _NAME.match(self._buffer)
        if match is not None and (name := _unquoted(match.group(1))) is not None:
            self._buffer = self._buffer[match.end() :]
            self._out.calls.append(CallDelta(index=self._calls, name=name))
            self._arguments = _ArgumentScanner()
            self._state = "arguments"
        elif CALL_END in self._buffer:
            block, self._buffer = self._buffer.split(CALL_END, 1)
            self._whole(block)

    def _in_arguments(self) -> None:
        assert self._arguments is not None
        if not self._arguments.begun:
            self._buffer = self._buffer.lstrip()
        taken = self._arguments.take(self._buffer)
        if taken:
            self._out.calls.append(CallDelta(index=self._calls, arguments=self._buffer[:taken]))
            self._buffer = self._buffer[taken:]
        if self._arguments.done:
            self._state = "frame"
        elif self._buffer.startswith(CALL_END):
            self._buffer = self._buffer[len(CALL_END) :]
            self._end_call()

    def _in_frame(self) -> None:
        _, found = self._until(CALL_END)
        if found:
            self._end_call()

    def _end_call(self) -> None:
        self._calls += 1
        self._between = True
        self._state = "content"

    def _whole(self, block: str) -> None:
        """Take a block whose keys come in another order; without a name it is content."""
        try:
            call = json.loads(block)
            name = call["name"]
            arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._out.content += CALL + block + CALL_END
            self._state = "content"
            return
        self._out.calls.append(CallDelta(index=self._calls, name=str(name)))
        self._out.calls.append(CallDelta(index=self._calls, arguments=arguments))
        self._end_call()

    def _until(self, marker: str) -> tuple[str, bool]:
        """Take text up to `marker` (found), or as much as cannot be its beginning."""
        at = self._buffer.find(marker)
        if at >= 0:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return text, True
        keep = held(self._buffer, marker)
        cut = len(self._buffer) - keep
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text, False

    def _flush(self) -> None:
        rest, self._buffer = self._buffer, ""
        if self._state == "thought":
            self._out.reasoning += rest
        elif self._state == "call":
            self._out.content += CALL + rest
        elif self._state in {"arguments", "frame"}:
            if self._state == "arguments" and rest:
                self._out.calls.append(CallDelta(index=self._calls, arguments=rest))
            self._calls += 1
        else:
            self._out.content += rest


class _Collector:
    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[CallDelta] = []

    def take(self) -> Delta:
        delta = Delta(reasoning=self.reasoning, content=self.content, calls=tuple(self.calls))
        self.reasoning, self.content, self.calls = "", "", []
        return delta


class _ArgumentScanner:
    """Find the end of a JSON value that comes in pieces. Whatever follows `</tool_call>` is never taken."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.begun = False

    def take(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        for at, char in enumerate(text):
            if not self._quoted and char == "<" and CALL_END.startswith(text[at : at + len(CALL_END)]):
                return at
            if self._ends_before(char):
                self.done = True
                return at
            self._step(char)
            if self.done:
                return at + 1
        return len(text)

    def _ends_before(self, char: str) -> bool:
        return not self._quoted and self._depth == 0 and self.begun and char in "}], \t\r\n"

    def _step(self, char: str) -> None:
        self.begun = True
        if self._quoted:
            self._in_string(char)
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            self.done = self._depth == 0


def held(text: str, marker: str) -> int:
    """Return how many last characters of `text` could begin `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def _unquoted(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None
