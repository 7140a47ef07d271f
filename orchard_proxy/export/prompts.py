"""Prompts of an export, put together again from (base call, shared length, new ids).

Reads rows, not records, and trusts none of them: a reference that leads nowhere, runs in a circle or takes more than
its base has is named, not followed. Memory is that of the stored ids, which grows with turns, not with their square.
"""

from typing import Any, NamedTuple

from orchard_proxy.errors import ExportError
from orchard_proxy.schema.packed import ITEM_BYTES, Int32s


class PromptError(ExportError):
    """A prompt cannot be put together. `circular` says that its references run in a circle."""

    def __init__(self, message: str, *, circular: bool = False) -> None:
        super().__init__(message)
        self.circular = circular


class _Part(NamedTuple):
    base: str | None
    base_choice: int | None
    shared: int
    new_ids: Int32s
    choices: dict[int, Int32s]

    @property
    def tokens(self) -> int:
        return self.shared + len(self.new_ids) // ITEM_BYTES


class PromptIndex:
    """The stored prompt parts of all calls."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._parts: dict[str, _Part] = {}

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._known

    def add(self, row: dict[str, Any]) -> None:
        """Take a row of `calls`."""
        self._known[row["call_id"]] = row["prompt_known"]
        self._parts[row["call_id"]] = _Part(
            row["prompt_base_call_id"],
            row["prompt_base_choice"],
            row["prompt_shared"],
            row["prompt_new_ids"],
            {choice["index"]: choice["token_ids"] for choice in row["choices"]},
        )

    def prompt_ids(self, call_id: str) -> Int32s | None:
        """Return a call's whole prompt; None when its ids are not known. Raise PromptError when it does not resolve."""
        if call_id not in self._known:
            raise PromptError(f"there is no call {call_id}")
        if not self._known[call_id]:
            return None
        part, pieces, seen = self._parts[call_id], [], {call_id}
        wanted = part.tokens
        while True:
            pieces.append(part.new_ids[: max(wanted - part.shared, 0) * ITEM_BYTES])
            wanted = min(wanted, part.shared)
            if not wanted:
                return b"".join(reversed(pieces))
            base_id, base = self._base(part, call_id, seen)
            if wanted > base.tokens:
                pieces.append(_sampled(base, part, wanted - base.tokens, base_id))
                wanted = base.tokens
            part = base

    def _base(self, part: _Part, call_id: str, seen: set[str]) -> tuple[str, _Part]:
        base_id = part.base
        if base_id is None or not self._known.get(base_id):
            raise PromptError(f"the prompt of {call_id} builds on {base_id}, which has no known prompt")
        if base_id in seen:
            raise PromptError(f"the prompt of {call_id} builds on itself through {base_id}", circular=True)
        seen.add(base_id)
        return base_id, self._parts[base_id]


def _sampled(base: _Part, part: _Part, tokens: int, base_id: str) -> Int32s:
    ids = b"" if part.base_choice is None else base.choices.get(part.base_choice, b"")
    if len(ids) < tokens * ITEM_BYTES:
        raise PromptError(
            f"it shares {part.shared} tokens with {base_id}, whose prompt and choice {part.base_choice} "
            f"have {base.tokens + len(ids) // ITEM_BYTES}"
        )
    return ids[: tokens * ITEM_BYTES]
