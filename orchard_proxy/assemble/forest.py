"""The forest of a rollout: which call extends which, by exact token prefix.

Not the samples, and not the catalog: ids in, a placement out. Nodes are (call, choice) and stand for the call's prompt
plus the choice's tokens. Invariants: a parent's tokens are a prefix of the child's prompt, token for token; the longest
parent wins, among equals the earliest added; calls are added in the order of their commit, and a forest built again by
the same additions places alike.

Node ends are found by their digest: one pass over the prompt, a lookup at every length at which some node ends. So the
cost of a call is linear in its prompt and does not grow with the number of calls of equal lengths.
"""

import hashlib
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from orchard_proxy.assemble.prefix import Recent
from orchard_proxy.schema.packed import ITEM_BYTES, Int32s
from orchard_proxy.schema.records import PromptRef

KEEP_RECENT = 3
"""Sequences kept to find what a root shares with the calls before it: the main chain and two sub-agents beside it."""

_NODE_COST_BYTES = 250
"""Measured size of one node in the tables, for the deriver's memory budget."""


class Node(NamedTuple):
    """One choice of one call."""

    call_id: str
    choice: int


class Sampled(NamedTuple):
    """A choice's index and its token ids."""

    choice: int
    token_ids: Int32s


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call hangs in the forest, and its prompt as a reference."""

    parent: Node | None
    prompt: PromptRef


class _Base(NamedTuple):
    """A recent call that others may share a prefix with."""

    call_id: str
    prompt_bytes: int
    choice: int | None


class Forest:
    """The calls of one rollout, added in commit order."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[bytes, Node]] = {}
        self._lengths: list[int] = []
        self._nodes = 0
        self._recent: Recent[_Base] = Recent(KEEP_RECENT)

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held."""
        return self._recent.size_bytes + self._nodes * _NODE_COST_BYTES

    def add(self, call_id: str, prompt_ids: Int32s, choices: Sequence[Sampled]) -> Placement:
        """Place a call and make each of its choices a node that later calls may extend. Empty choices make none."""
        parent, length, state = self._walk(prompt_ids)
        if parent is None:
            prompt = self._share(prompt_ids)
        else:
            prompt = _reference(parent.call_id, parent.choice, length, prompt_ids)
        for choice, token_ids in choices:
            if token_ids:
                self._grow(Node(call_id, choice), prompt_ids, token_ids, state)
        self._remember(call_id, prompt_ids, choices)
        return Placement(parent=parent, prompt=prompt)

    def refer(self, call_id: str, prompt_ids: Int32s) -> PromptRef:
        """Return a compact reference for a prompt that must not be joined: it gets no parent and makes no node."""
        prompt = self._share(prompt_ids)
        self._remember(call_id, prompt_ids, ())
        return prompt

    def _walk(self, prompt_ids: Int32s) -> "tuple[Node | None, int, hashlib.blake2b]":
        """Return the longest node that the prompt starts with, its length in bytes, and the whole prompt's digest."""
        state = hashlib.blake2b(digest_size=16)
        view = memoryview(prompt_ids)
        done, best, best_length = 0, None, 0
        for length in self._lengths[: bisect_right(self._lengths, len(prompt_ids))]:
            state.update(view[done:length])
            done = length
            node = self._ends[length].get(state.digest())
            if node is not None:
                best, best_length = node, length
        state.update(view[done:])
        return best, best_length, state

    def _grow(self, node: Node, prompt_ids: Int32s, token_ids: Int32s, prompt_state: "hashlib.blake2b") -> None:
        state = prompt_state.copy()
        state.update(token_ids)
        length = len(prompt_ids) + len(token_ids)
        if length not in self._ends:
            self._ends[length] = {}
            insort(self._lengths, length)
        self._ends[length].setdefault(state.digest(), node)
        self._nodes += 1

    def _share(self, prompt_ids: Int32s) -> PromptRef:
        """Refer to the recent call with the longest common prefix. This says how it is stored, not what it means."""
        match = self._recent.best(prompt_ids)
        if match is None or match.shared < ITEM_BYTES:
            return PromptRef(new_ids=prompt_ids)
        base, shared = match.key, match.shared - match.shared % ITEM_BYTES
        choice = base.choice if shared > base.prompt_bytes else None
        return _reference(base.call_id, choice, shared, prompt_ids)

    def _remember(self, call_id: str, prompt_ids: Int32s, choices: Sequence[Sampled]) -> None:
        longest = max(choices, key=lambda sampled: len(sampled.token_ids), default=None)
        if longest is None or not longest.token_ids:
            self._recent.add(_Base(call_id, len(prompt_ids), None), prompt_ids)
        else:
            self._recent.add(_Base(call_id, len(prompt_ids), longest.choice), prompt_ids + longest.token_ids)


def _reference(call_id: str, choice: int | None, shared_bytes: int, prompt_ids: Int32s) -> PromptRef:
    return PromptRef(
        base_call_id=call_id,
        base_choice=choice,
        shared_tokens=shared_bytes // ITEM_BYTES,
        new_ids=prompt_ids[shared_bytes:],
    )
