"""The tiny policy behind its HTTP face: model, tokenizer, weight version, and the jobs that run on them.

Not HTTP. All numpy work runs in one worker thread, in hops of a few milliseconds, so that the event loop and other
requests go on. Invariants: a job keeps the model it began with (a weight update is seen by later requests only); the
same seed and prompt give the same answer, whatever else is running.
"""

import asyncio
import io
import itertools
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from orchard_proxy.errors import UsageError
from orchard_proxy.policy.tiny_generate import Generation, Piece
from orchard_proxy.policy.tiny_model import SHAPES, VOCAB, Array, Model, State, seeded_weights
from orchard_proxy.policy.tiny_sampling import FLOOR, Sampler, SamplingParams
from orchard_proxy.policy.tiny_tokenizer import END_ID, TinyTokenizer

T = TypeVar("T")
PromptRow = list[tuple[int, float, int]]
SCORE_HOP = 2048
"""Prompt positions scored per hop: about 25 ms."""
STEP_HOP = 16
"""Ids per choice generated per hop when nobody waits for them one by one."""


class TinyEngine:
    """One model and its worker thread. `close` it."""

    def __init__(self, *, seed: int, processed_logprobs: bool, delay_s: float) -> None:
        self.tokenizer = TinyTokenizer()
        if self.tokenizer.vocab_size != VOCAB:
            raise UsageError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model {VOCAB}: reinstall Orchard"
            )
        weights = seeded_weights(seed, end_id=END_ID, rare_ids=self.tokenizer.rare_ids())
        self.model = Model(weights)
        self.weight_version = "default"
        self.running = 0
        self._updates = 0
        self._seed = seed
        self._requests = itertools.count()
        self._processed = processed_logprobs
        self._delay_s = delay_s
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tiny")

    def close(self) -> None:
        """Stop the worker thread."""
        self._pool.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def start(
        self, ids: list[int], params: SamplingParams, *, n: int, top: int, forced: Iterable[int] = ()
    ) -> list[Generation]:
        """Prefill a prompt once and return its n choices, ready to step."""
        model = self.model
        request = next(self._requests)
        state = State()
        logits = await self.run(lambda: model.prefill(state, ids))
        script = list(forced)
        return [
            Generation(
                model=model,
                tokenizer=self.tokenizer,
                state=state.copy(),
                logits=logits,
                sampler=Sampler(params, self._rng(params.seed, request, i), ids, processed=self._processed),
                params=params,
                forced=script,
                top=top,
            )
            for i in range(n)
        ]

    def _rng(self, seed: int | None, request: int, choice: int) -> np.random.Generator:
        if seed is None:
            return np.random.default_rng([self._seed % 2**64, request, choice, 1])
        return np.random.default_rng([seed % 2**64, choice])

    async def pieces(self, choices: list[Generation], *, one_by_one: bool) -> AsyncIterator[tuple[int, Piece]]:
        """Step all choices in turn until each has finished; yield (choice, piece)."""
        hop = 1 if one_by_one or self._delay_s else STEP_HOP
        while any(not choice.finished for choice in choices):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            for item in await self.run(lambda: _steps(choices, hop)):
                yield item

    async def prompt_logprobs(self, ids: list[int], top: int) -> list[PromptRow]:
        """Score every prompt position but the first: rows of (id, log-probability, rank), the id itself first."""
        model, state = self.model, State()
        rows: list[PromptRow] = []
        for start in range(0, len(ids) - 1, SCORE_HOP):
            end = min(start + SCORE_HOP, len(ids) - 1)
            rows += await self.run(lambda s=start, e=end: _score(model, state, ids[s:e], ids[s + 1 : e + 1], top))  # type: ignore[misc]
        return rows

    def weights_npz(self) -> bytes:
        """Return the weights as an npz file."""
        buffer = io.BytesIO()
        np.savez(buffer, **self.model.weights)  # type: ignore[arg-type]
        return buffer.getvalue()

    async def load_weights(self, npz: bytes, version: str | None) -> str:
        """Swap the weights and return the new version: the given one, or a counter's next value."""
        self.model = await self.run(lambda: Model(read_weights(npz)))
        self._updates += 1
        self.weight_version = str(self._updates) if version is None else version
        return self.weight_version


def _steps(choices: list[Generation], hop: int) -> list[tuple[int, Piece]]:
    out = []
    for _ in range(hop):
        out += [(i, choice.step()) for i, choice in enumerate(choices) if not choice.finished]
    return out


def _score(model: Model, state: State, ids: list[int], targets: list[int], top: int) -> list[PromptRow]:
    rows: list[PromptRow] = []
    for logits in model.extend(state, ids):
        wanted = targets[len(rows) : len(rows) + len(logits)]
        rows += _score_block(logits, np.array(wanted), top)
    return rows


def _score_block(logits: Array, targets: np.ndarray, top: int) -> list[PromptRow]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_norm = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    every = np.arange(len(targets))
    own = shifted[every, targets]
    logprobs = np.maximum((own - log_norm).astype(np.float32), FLOOR)
    ranks = 1 + (shifted > own[:, None]).sum(axis=1)
    rows: list[PromptRow] = [[row] for row in zip(targets.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)]
    if top:
        order = _best_columns(shifted, top)
        best = np.maximum((np.take_along_axis(shifted, order, 1) - log_norm[:, None]).astype(np.float32), FLOOR)
        for row, tokens, values in zip(rows, order.tolist(), best.tolist(), strict=True):
            pairs = zip(tokens, values, itertools.count(1))
            row += [(token, value, rank) for token, value, rank in pairs if token != row[0][0]]
    return rows


def _best_columns(values: Array, top: int) -> np.ndarray:
    """Return the columns of the `top` highest values of each row, best first, (rows, top)."""
    some = np.argpartition(values, -top, axis=1)[:, -top:]
    order = np.argsort(-np.take_along_axis(values, some, 1), axis=1, kind="stable")
    return np.take_along_axis(some, order, 1)


def read_weights(npz: bytes) -> dict[str, Array]:
    """Read and check an npz file: every array of tiny_model.SHAPES, with its shape, finite."""
    try:
        with np.load(io.BytesIO(npz), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"the body is not an npz file: {error}") from error
    wrong = sorted(set(arrays) ^ set(SHAPES))
    if wrong:
        raise UsageError(f"the npz file must hold exactly {', '.join(SHAPES)}; differing: {', '.join(wrong)}")
    for name, shape in SHAPES.items():
        array = arrays[name]
        if array.shape != shape or array.dtype.kind != "f":
            raise UsageError(f"{name} must be floats of shape {shape}, not {array.dtype} of shape {array.shape}")
        arrays[name] = array.astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            raise UsageError(f"{name} holds NaN or infinity as float32")
    return arrays
