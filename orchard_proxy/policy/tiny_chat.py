"""POST /v1/chat/completions of the tiny policy: from a decoded request to answer bytes.

Not routing (tiny_server) and not shapes (tiny_wire). Invariant: the stream of a request folds to its whole answer.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from orchard_proxy.policy import tiny_wire as wire
from orchard_proxy.policy.tiny_engine import TinyEngine
from orchard_proxy.policy.tiny_generate import Generation, Piece
from orchard_proxy.policy.tiny_parse import Delta, OutputParser
from orchard_proxy.policy.tiny_request import ChatRequest, Output
from orchard_proxy.policy.tiny_sampling import SamplingParams
from orchard_proxy.policy.tiny_wire import Head, Json


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that fits, and what to do with it."""

    ids: list[int]
    text: str
    params: SamplingParams
    forced: list[int] = []

    def shown_ids(self, output: Output) -> list[int] | None:
        """Return the prompt's ids as the answer shows them."""
        return self.ids if output.token_ids else None


class _Choice:
    """The folding state of one choice."""

    def __init__(self, *, tools: bool) -> None:
        self.parser = OutputParser(tools=tools)
        self.ids = wire.CallIds()
        self.pieces: list[Piece] = []
        self.deltas: list[Delta] = []

    def take(self, piece: Piece) -> Delta:
        """Add a piece; return what it adds to the message."""
        self.pieces.append(piece)
        delta = self.parser.feed(piece.text, last=piece.finish_reason is not None)
        self.deltas.append(delta)
        return delta

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, as chat says it."""
        reason = self.pieces[-1].finish_reason
        return "tool_calls" if reason == "stop" and self.parser.calls else reason


class ChatAnswer:
    """One chat request being answered."""

    def __init__(self, engine: TinyEngine, request: ChatRequest, job: Job, *, model: str) -> None:
        self._engine = engine
        self._request = request
        self._output = request.output
        self._job = job
        self._head: Head = wire.head("chatcmpl", model)
        self._logprobs = wire.Logprobs(engine.tokenizer, as_ids=request.output.tokens_as_ids)
        self._choices = [_Choice(tools=request.parse_tools) for _ in range(request.output.n)]

    async def whole(self) -> bytes:
        """Return the whole answer."""
        output, job = self._output, self._job
        prompt_logprobs = await prompt_rows(self._engine, job, output, self._logprobs)
        async for index, piece in self._engine.pieces(await self._start(), one_by_one=False):
            self._choices[index].take(piece)
        answer = wire.chat_whole(
            self._head,
            [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            wire.whole_usage(len(job.ids), self._said()),
            prompt_logprobs=prompt_logprobs,
            prompt_ids=job.shown_ids(output),
            prompt_text=job.text if output.prompt_text else None,
        )
        return await self._engine.run(lambda: wire.body(answer))

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        forced_call = self._request.tool_choice in {"required", "named"}
        shown = wire.message(choice.deltas, choice.ids, forced_call=forced_call, show_reasoning=self._output.reasoning)
        return wire.chat_choice(
            index, choice.pieces, shown, choice.finish_reason, logprobs=self._logprobs, output=self._output
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events; the last is [DONE]."""
        generations = await self._start()
        for index in range(self._output.n):
            yield wire.event(
                wire.first_chunk(
                    self._head,
                    index,
                    counted=self._counted(index),
                    prompt_ids=self._job.shown_ids(self._output),
                    prompt_text=self._job.text if self._output.prompt_text else None,
                )
            )
        async for index, piece in self._engine.pieces(generations, one_by_one=True):
            chunk = self._chunk(index, piece)
            if chunk is not None:
                yield wire.event(chunk)
        if self._output.include_usage:
            counted = wire.usage(len(self._job.ids), self._said())
            yield wire.event(wire.usage_chunk(self._head, "chat.completion.chunk", counted))
        yield wire.DONE

    def _chunk(self, index: int, piece: Piece) -> Json | None:
        choice, output = self._choices[index], self._output
        delta = wire.chat_delta(choice.take(piece), choice.ids, show_reasoning=output.reasoning)
        finish = choice.finish_reason
        if not delta and finish is None and not output.instrumented:
            return None
        with_logprobs = output.logprobs is not None and output.reasoning
        shown = {
            "logprobs": self._logprobs.chat([piece]) if with_logprobs else None,
            "token_ids": [piece.scored.token] if output.token_ids and output.reasoning else None,
        }
        return wire.chunk(
            self._head,
            "chat.completion.chunk",
            wire.stream_choice(index, delta, piece, finish, shown=shown),
            counted=self._counted(index),
            fingerprint=finish is not None and not output.include_usage,
        )

    def _counted(self, index: int) -> Json | None:
        if not self._output.continuous_usage:
            return None
        return wire.usage(len(self._job.ids), len(self._choices[index].pieces))

    def _said(self) -> int:
        return sum(len(choice.pieces) for choice in self._choices)

    async def _start(self) -> list[Generation]:
        job, output = self._job, self._output
        return await self._engine.start(job.ids, job.params, n=output.n, top=output.logprobs or 0, forced=job.forced)


async def prompt_rows(engine: TinyEngine, job: Job, output: Output, logprobs: wire.Logprobs) -> Any:
    """Return `prompt_logprobs`, or None when not asked."""
    if output.prompt_logprobs is None:
        return None
    rows = await engine.prompt_logprobs(job.ids, output.prompt_logprobs)
    return await engine.run(lambda: logprobs.prompt(rows))
