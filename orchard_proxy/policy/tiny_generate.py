"""One choice of one request: sample or force ids one after another until something ends it.

Not the wire and not HTTP: it gives `Piece`s, and runs in whichever thread calls it. Invariants: every id, the last one
included, is in exactly one piece; text that ends at a stop string is cut, ids never are; the concatenated `text` of the
pieces is the choice's text.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from orchard_proxy.policy.tiny_model import Array, Model, State
from orchard_proxy.policy.tiny_sampling import Sampler, SamplingParams, Scored
from orchard_proxy.policy.tiny_tokenizer import END_ID, SPECIAL_IDS, Detokenizer, TinyTokenizer


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One id, and the text that it lets go. `token_text` and `token_bytes` are the id's own, for the logprobs entry."""

    scored: Scored
    token_text: str
    token_bytes: bytes
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Generation:
    """Generate one choice. Call `step` until it gives a piece with a finish reason."""

    def __init__(
        self,
        *,
        model: Model,
        tokenizer: TinyTokenizer,
        state: State,
        logits: Array,
        sampler: Sampler,
        params: SamplingParams,
        forced: Iterable[int] = (),
        top: int = 0,
    ) -> None:
        self._model = model
        self._state = state
        self._logits = logits
        self._sampler = sampler
        self._params = params
        self._forced = deque(forced)
        self._top = top
        self._detokenizer = Detokenizer(tokenizer)
        self._count = 0
        self._text = ""
        self._given = 0
        # As vLLM: keep back what could be the beginning of a stop string, counted in characters.
        self._hold = 0 if params.include_stop_str_in_output else max((len(s) - 1 for s in params.stop), default=0)
        self.finished = False

    def step(self) -> Piece:
        """Give the next id. Raise RuntimeError when the choice has finished."""
        if self.finished:
            raise RuntimeError("this choice has finished")
        scored = self._next()
        self._count += 1
        token_text, token_bytes = self._detokenizer.push(scored.token)
        finish, reason = self._ended(scored.token, "" if scored.token in SPECIAL_IDS else token_text)
        if finish is None:
            self._logits = self._model.step(self._state, scored.token)
        else:
            self.finished = True
        return Piece(
            scored=scored,
            token_text=token_text,
            token_bytes=token_bytes,
            text=self._release(),
            finish_reason=finish,
            stop_reason=reason,
        )

    def _next(self) -> Scored:
        forced = self._forced.popleft() if self._forced else None
        params = self._params
        early = self._count < params.min_tokens
        banned = [END_ID, *params.stop_token_ids] if early else []
        return self._sampler.pick(self._logits, forced=forced, banned=banned, top=self._top)

    def _ended(self, token: int, text: str) -> tuple[str | None, str | int | None]:
        params = self._params
        if token == END_ID and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
        searched_from = len(self._text) - max((len(s) for s in params.stop), default=0)
        self._text += text
        if self._count > params.min_tokens:
            stop = self._cut(max(searched_from, 0))
            if stop is not None:
                return "stop", stop
        if self._count >= params.max_tokens:
            return "length", None
        return None, None

    def _cut(self, start: int) -> str | None:
        found = [(self._text.find(s, start), s) for s in self._params.stop]
        hits = [(at, s) for at, s in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: hit[0] + len(hit[1]))
        keep = at + len(stop) if self._params.include_stop_str_in_output else at
        self._text = self._text[:keep]
        return stop

    def _release(self) -> str:
        end = len(self._text) if self.finished else max(len(self._text) - self._hold, self._given)
        text, self._given = self._text[self._given : end], max(end, self._given)
        return text
