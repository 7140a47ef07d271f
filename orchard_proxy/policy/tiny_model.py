"""The tiny language model: one causal block in numpy, seeded, with float32 weights.

Not a good model: it is random until somebody trains it. It is an honest one: every answer is sampled from the
distribution that it reports, and the ids fed again give the same log-probabilities (within 1e-5, float32 rounding).

Shapes: V tokens, D width, TAPS = 4, HEADS of D/HEADS each, W = 64 positions of window, B buckets, F inner width.

    x_t      = norm(Σ_j embed[id_{t-j}] @ taps[j])                    j = 0…3, ids before the start count as zero
    local_t  = Σ_{t-W < s ≤ t} softmax_s(q_t·k_s / √dh + bias[h, t-s]) v_s          q, k, v = x @ wq, x @ wk, x @ wv
    far_t    = Σ_b softmax(x_t @ far_q)_b · mean_b(s ≤ t)             mean_b = Σ_s p_sb (x_s @ far_v) / Σ_s p_sb,
                                                                      p_s = softmax(x_s @ far_k): B running means
    h_t      = x_t + local_t @ wo + far_t @ far_o
    y_t      = h_t + relu(norm(h_t) @ up) @ down
    logits_t = norm(y_t) @ unembed + unembed_bias                     norm(z) = z / √(mean(z²) + 1e-6)

Everything that a position needs from its past is: 3 ids, W-1 keys and values, and the B sums. So a prompt costs linear
time, and the next token bounded work. Invariant: `extend` in pieces of any sizes equals `extend` at once; the long sums
are kept in float64 for that.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Array64 = NDArray[np.float64]

VOCAB = 2048
D = 64
TAPS = 4
HEADS = 2
WINDOW = 64
BUCKETS = 16
INNER = 128
BLOCK = 128
"""Positions computed at once: big enough for BLAS, small enough for the cache."""

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, D),
    "taps": (TAPS, D, D),
    "wq": (D, D),
    "wk": (D, D),
    "wv": (D, D),
    "wo": (D, D),
    "bias": (HEADS, WINDOW),
    "far_q": (D, BUCKETS),
    "far_k": (D, BUCKETS),
    "far_v": (D, D),
    "far_o": (D, D),
    "up": (D, INNER),
    "down": (INNER, D),
    "unembed": (D, VOCAB),
    "unembed_bias": (VOCAB,),
}

Weights = Mapping[str, Array]


def seeded_weights(seed: int, *, end_id: int, rare_ids: list[int], typical_answer_tokens: int = 48) -> dict[str, Array]:
    """Return random weights. `end_id` gets a bias that ends answers; `rare_ids` (markers, lone bytes) are damped."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["embed"] = rng.normal(0, 1, SHAPES["embed"]).astype(np.float32)
    scale = np.array([1.0, 0.7, 0.4, 0.2]).reshape(TAPS, 1, 1)
    weights["taps"] = (rng.normal(0, D**-0.5, SHAPES["taps"]) * scale).astype(np.float32)
    weights["bias"] = np.zeros(SHAPES["bias"], np.float32)
    # A logit spread of 1.5 leaves sampling lively and greedy text not quite a loop.
    weights["unembed"] *= np.float32(1.5)
    bias = np.zeros(VOCAB, np.float32)
    bias[rare_ids] = -8.0
    bias[end_id] = np.log(VOCAB / typical_answer_tokens)
    weights["unembed_bias"] = bias
    return weights


class State:
    """What the next positions need from all earlier ones. Small (≈ 50 KB); `copy` it to branch."""

    def __init__(self) -> None:
        self.last_ids: list[int] = []
        self.keys: Array = np.zeros((0, D), np.float32)
        self.values: Array = np.zeros((0, D), np.float32)
        self.far_weight: Array64 = np.zeros(BUCKETS)
        self.far_sum: Array64 = np.zeros((BUCKETS, D))

    def copy(self) -> "State":
        """Return a copy; arrays are replaced, never changed in place, so they can be shared."""
        twin = State()
        twin.__dict__.update(self.__dict__)
        return twin


class Model:
    """The weights, ready to compute. Immutable: a weight update makes a new Model."""

    def __init__(self, weights: Weights) -> None:
        self.weights: dict[str, Array] = {name: np.asarray(weights[name], np.float32) for name in SHAPES}
        # Row V is "before the start": zero. embed @ taps[j] is looked up instead of multiplied, position by position.
        padded = np.vstack([self.weights["embed"], np.zeros((1, D), np.float32)])
        self._tap_tables = [padded @ tap for tap in self.weights["taps"]]
        self._biases: dict[tuple[int, int], Array] = {}

    def absorb(self, state: State, ids: list[int]) -> None:
        """Move the state past `ids` without computing their outputs: the cheap part of a prompt."""
        for start in range(0, len(ids), BLOCK * 16):
            x = self._inputs(state, ids[start : start + BLOCK * 16])
            tail = x[-WINDOW:]
            state.keys = np.vstack([state.keys, tail @ self.weights["wk"]])[-(WINDOW - 1) :]
            state.values = np.vstack([state.values, tail @ self.weights["wv"]])[-(WINDOW - 1) :]
            p, v = self._far_writes(x)
            state.far_weight = state.far_weight + p.sum(axis=0)
            state.far_sum = state.far_sum + p.T @ v

    def extend(self, state: State, ids: list[int]) -> Iterator[Array]:
        """Move the state past `ids`; yield the logits after each, float32 (≤ BLOCK, V), in order."""
        for start in range(0, len(ids), BLOCK):
            hidden = self._block(state, ids[start : start + BLOCK])
            yield hidden @ self.weights["unembed"] + self.weights["unembed_bias"]

    def prefill(self, state: State, ids: list[int]) -> Array:
        """Move the state past a prompt; return the logits after its last id, float32 (V,)."""
        self.absorb(state, ids[:-1])
        return self.step(state, ids[-1])

    def step(self, state: State, token: int) -> Array:
        """Move the state past one id; return the logits after it, float32 (V,)."""
        logits: Array = next(self.extend(state, [token]))[0]
        return logits

    def _inputs(self, state: State, ids: list[int]) -> Array:
        history = ([VOCAB] * TAPS + state.last_ids + ids)[-(len(ids) + TAPS - 1) :]
        padded = np.array(history)
        length = len(ids)
        x = self._tap_tables[0][padded[TAPS - 1 :]]
        for j in range(1, TAPS):
            x = x + self._tap_tables[j][padded[TAPS - 1 - j : TAPS - 1 - j + length]]
        state.last_ids = (state.last_ids + ids)[-(TAPS - 1) :]
        return _norm(x)

    def _block(self, state: State, ids: list[int]) -> Array:
        x = self._inputs(state, ids)
        h = x + self._local(state, x) @ self.weights["wo"] + self._far(state, x) @ self.weights["far_o"]
        y = h + np.maximum(_norm(h) @ self.weights["up"], 0) @ self.weights["down"]
        return _norm(y)

    def _local(self, state: State, x: Array) -> Array:
        keys = np.vstack([state.keys, x @ self.weights["wk"]])
        values = np.vstack([state.values, x @ self.weights["wv"]])
        state.keys, state.values = keys[-(WINDOW - 1) :], values[-(WINDOW - 1) :]
        q = _heads(x @ self.weights["wq"] * np.float32((D // HEADS) ** -0.5))
        scores: Array = q @ _heads(keys).swapaxes(1, 2) + self._bias(len(x), len(keys))
        mixed: Array = _softmax(scores) @ _heads(values)
        return np.asarray(mixed.swapaxes(0, 1).reshape(len(x), D), np.float32)

    def _bias(self, queries: int, keys: int) -> Array:
        """Return the bias of each key for each query, -inf outside the window: (HEADS, queries, keys)."""
        found = self._biases.get((queries, keys))
        if found is not None:
            return found
        offset = np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None, :]
        inside = self.weights["bias"][:, np.clip(offset, 0, WINDOW - 1)]
        bias: Array = np.where((offset < 0) | (offset >= WINDOW), np.float32(-np.inf), inside).astype(np.float32)
        if queries in {1, BLOCK}:  # the common forms; the last block of a prompt has any length and is not kept
            self._biases[queries, keys] = bias
        return bias

    def _far_writes(self, x: Array) -> tuple[Array64, Array64]:
        p = _softmax(x @ self.weights["far_k"]).astype(np.float64)
        return p, (x @ self.weights["far_v"]).astype(np.float64)

    def _far(self, state: State, x: Array) -> Array:
        p, v = self._far_writes(x)
        weight = state.far_weight + np.cumsum(p, axis=0)
        share = _softmax(x @ self.weights["far_q"]) / weight
        read = share @ state.far_sum + np.tril(share @ p.T) @ v
        state.far_weight = weight[-1]
        state.far_sum = state.far_sum + p.T @ v
        return read.astype(np.float32)


def _heads(x: Array) -> Array:
    return x.reshape(len(x), HEADS, D // HEADS).swapaxes(0, 1)


def _norm(x: Array) -> Array:
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return np.asarray(x / root, np.float32)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), np.float32)
