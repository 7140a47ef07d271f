"""From logits to the next id: vLLM's sampling parameters over the tiny policy's vocabulary.

Not generation: it knows one position at a time. Invariant: the reported log-probability is of the distribution that the
server's --logprobs-mode names: raw = the model's own; processed = after bias, penalties, temperature and truncations,
which is what the id was drawn from.
"""

from collections import Counter

import msgspec
import numpy as np

from orchard_proxy.policy.tiny_model import Array, Array64

FLOOR = -9999.0
"""vLLM prints this instead of -inf."""

GREEDY_BELOW = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample; names and defaults are vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One id with its log-probability and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draw ids for one choice. Same params and rng, same ids."""

    def __init__(
        self, params: SamplingParams, rng: np.random.Generator, prompt_ids: list[int], *, processed: bool
    ) -> None:
        self._params = params
        self._rng = rng
        self._processed = processed
        self._prompt = np.unique(np.array(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None
        self._said: Counter[int] = Counter()

    def pick(self, logits: Array, *, forced: int | None, banned: list[int], top: int) -> Scored:
        """Draw an id, or score the forced one; `banned` ids cannot be drawn; `top` alternatives are listed."""
        raw = logits.astype(np.float64)
        effective = self._effective(raw, banned)
        if forced is not None:
            token = forced
        elif self._params.temperature < GREEDY_BELOW:
            token = int(effective.argmax())
        else:
            token = self._draw(effective)
        self._said[token] += 1
        logprobs = log_softmax(effective if self._processed else raw)
        return Scored(token=token, logprob=as_float32(logprobs[token]), top=best(logprobs, top))

    def _effective(self, raw: Array64, banned: list[int]) -> Array64:
        logits = raw.copy()
        for token, bias in self._params.logit_bias.items():
            logits[token] += bias
        self._penalise(logits)
        logits[banned] = -np.inf
        if self._params.temperature < GREEDY_BELOW:
            return logits
        return self._truncate(logits / self._params.temperature)

    def _penalise(self, logits: Array64) -> None:
        params = self._params
        said = np.fromiter(self._said.keys(), np.int64, len(self._said))
        if self._prompt is not None:
            seen = np.union1d(self._prompt, said)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if len(said) and (params.presence_penalty or params.frequency_penalty):
            counts = np.fromiter(self._said.values(), np.float64, len(self._said))
            logits[said] -= params.presence_penalty + params.frequency_penalty * counts

    def _truncate(self, logits: Array64) -> Array64:
        params = self._params
        if 0 < params.top_k < len(logits):
            logits[logits < np.partition(logits, -params.top_k)[-params.top_k]] = -np.inf
        if params.min_p > 0:
            logits[logits < logits.max() + np.log(params.min_p)] = -np.inf
        if params.top_p < 1:
            order = np.argsort(-logits, kind="stable")
            probabilities = np.exp(log_softmax(logits))[order]
            before = np.cumsum(probabilities) - probabilities
            logits[order[1:][before[1:] >= params.top_p]] = -np.inf
        return logits

    def _draw(self, logits: Array64) -> int:
        cumulative = np.cumsum(np.exp(log_softmax(logits)))
        point = self._rng.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, point, side="right").clip(0, len(logits) - 1))


def log_softmax(logits: Array64) -> Array64:
    """Return log-probabilities of one position, float64 (V,)."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


def best(logprobs: Array64, top: int) -> tuple[tuple[int, float], ...]:
    """Return the `top` most likely (id, log-probability), best first; ties go to the lower id."""
    if top <= 0:
        return ()
    order = np.argsort(-logprobs, kind="stable")[:top]
    return tuple((int(i), as_float32(logprobs[i])) for i in order)


def as_float32(value: float) -> float:
    """Return a log-probability as vLLM prints it: a float32, never below -9999."""
    return max(float(np.float32(value)), FLOOR)
