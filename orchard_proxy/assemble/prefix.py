"""Common prefixes of byte strings, and the few most recent strings to look for one in.

Knows nothing of tokens or calls. Invariant: which entries are kept depends only on the order of the calls made here,
so that a state built again from the same history chooses the same bases.
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")


def common_prefix(left: bytes, right: bytes) -> int:
    """Return how many leading bytes are equal. Linear, at the speed of memcmp."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Match(NamedTuple, Generic[Key]):
    """The entry that shares most with what was looked up, and how many bytes."""

    key: Key
    shared: int


class Recent(Generic[Key]):
    """The last few strings that no later one contains: in a chain of turns that is one, not one a turn."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._entries: list[tuple[Key, bytes]] = []

    def __iter__(self) -> Iterator[tuple[Key, bytes]]:
        return iter(self._entries)

    @property
    def size_bytes(self) -> int:
        """Return the memory that the entries hold."""
        return sum(len(data) for _, data in self._entries)

    def best(self, data: bytes) -> Match[Key] | None:
        """Return the entry with the longest common prefix; among equals the earliest. None: nothing in common."""
        found: Match[Key] | None = None
        for key, entry in self._entries:
            if found is not None and entry[: found.shared + 1] != data[: found.shared + 1]:
                continue
            shared = common_prefix(entry, data)
            if shared > (found.shared if found else 0):
                found = Match(key, shared)
        return found

    def add(self, key: Key, data: bytes, *, slack: int = 0) -> None:
        """Keep `data`; entries that it contains as a prefix, up to `slack` last bytes, are dropped for it."""
        self._entries = [(other, entry) for other, entry in self._entries if not _contains(data, entry, slack)]
        self._entries.append((key, data))
        del self._entries[: -self._keep]


def _contains(data: bytes, entry: bytes, slack: int) -> bool:
    stem = entry[: max(len(entry) - slack, 0)]
    return bool(stem) and data.startswith(stem)
