"""POST /v1/completions of the tiny policy: text or ids in, text and ids out. No template, no parser, no script."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from orchard_proxy.policy import tiny_wire as wire
from orchard_proxy.policy.tiny_chat import Job, prompt_rows
from orchard_proxy.policy.tiny_engine import TinyEngine
from orchard_proxy.policy.tiny_generate import Generation, Piece
from orchard_proxy.policy.tiny_request import Output
from orchard_proxy.policy.tiny_wire import Json


class CompletionAnswer:
    """One completions request being answered. Choice i belongs to prompt i // n."""

    def __init__(self, engine: TinyEngine, jobs: list[Job], output: Output, *, model: str) -> None:
        self._engine = engine
        self._jobs = jobs
        self._output = output
        self._head = wire.head("cmpl", model)
        self._logprobs = wire.Logprobs(engine.tokenizer, as_ids=output.tokens_as_ids)
        self._pieces: list[list[Piece]] = [[] for _ in range(len(jobs) * output.n)]
        self._offsets = [0] * len(self._pieces)

    async def whole(self) -> bytes:
        """Return the whole answer."""
        rows = [await prompt_rows(self._engine, job, self._output, self._logprobs) for job in self._jobs]
        async for index, piece in self._engine.pieces(await self._start(), one_by_one=False):
            self._pieces[index].append(piece)
        choices = [self._whole_choice(i, pieces, rows[i // self._output.n]) for i, pieces in enumerate(self._pieces)]
        answer = {
            **self._head.members("text_completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": wire.FINGERPRINT,
            "usage": wire.whole_usage(*self._counts()),
            **wire.NOTHING_MORE,
        }
        return await self._engine.run(lambda: wire.body(answer))

    def _whole_choice(self, index: int, pieces: list[Piece], prompt_logprobs: Any) -> Json:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._shown_logprobs(pieces, 0),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
            "token_ids": self._shown_ids(pieces),
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": self._job(index).shown_ids(self._output),
            "routed_experts": None,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events; the last is [DONE]."""
        async for index, piece in self._engine.pieces(await self._start(), one_by_one=True):
            yield wire.event(self._chunk(index, piece))
            self._pieces[index].append(piece)
            self._offsets[index] += len(piece.token_text)
        if self._output.include_usage:
            yield wire.event(wire.usage_chunk(self._head, "text_completion", wire.usage(*self._counts())))
        yield wire.DONE

    def _chunk(self, index: int, piece: Piece) -> Json:
        first = not self._pieces[index]
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": self._shown_logprobs([piece], self._offsets[index]),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": self._job(index).shown_ids(self._output) if first else None,
            "token_ids": self._shown_ids([piece]),
        }
        counted = None
        if self._output.continuous_usage:
            counted = wire.usage(len(self._job(index).ids), len(self._pieces[index]) + 1)
        last = piece.finish_reason is not None and not self._output.include_usage
        return wire.chunk(self._head, "text_completion", choice, counted=counted, fingerprint=last)

    def _job(self, index: int) -> Job:
        return self._jobs[index // self._output.n]

    def _shown_logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        return None if self._output.logprobs is None else self._logprobs.legacy(pieces, offset)

    def _shown_ids(self, pieces: Sequence[Piece]) -> list[int] | None:
        return [piece.scored.token for piece in pieces] if self._output.token_ids else None

    def _counts(self) -> tuple[int, int]:
        return sum(len(job.ids) for job in self._jobs), sum(len(pieces) for pieces in self._pieces)

    async def _start(self) -> list[Generation]:
        generations: list[Generation] = []
        for job in self._jobs:
            top = self._output.logprobs or 0
            generations += await self._engine.start(job.ids, job.params, n=self._output.n, top=top)
        return generations
