"""Prompts back from their references.

Invariant: a base was committed before the call that refers to it, so that every chain of references ends.
"""

from collections.abc import Iterable

from orchard_proxy.errors import BrokenPromptError
from orchard_proxy.schema.packed import ITEM_BYTES, Int32s
from orchard_proxy.schema.records import Call, PromptRef


class PromptResolver:
    """The full prompts of calls that are stored as (base, shared length, new ids)."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._calls = {call.call_id: call for call in calls}

    def add(self, call: Call) -> None:
        """Make one more call known."""
        self._calls[call.call_id] = call

    @staticmethod
    def length(call: Call) -> int:
        """Return the length of a known prompt, in tokens."""
        assert call.prompt is not None
        return call.prompt.shared_tokens + len(call.prompt.new_ids) // ITEM_BYTES

    def prompt_ids(self, call: Call) -> Int32s:
        """Return the prompt's token ids. Raise BrokenPromptError when the ids are unknown or a base does not fit.

        Linear in the prompt plus the length of the chain of references.
        """
        if call.prompt is None:
            raise BrokenPromptError(f"the prompt ids of call {call.call_id} are not known")
        pieces = [call.prompt.new_ids]
        wanted = call.prompt.shared_tokens
        while wanted:
            base, ref = self._base(call)
            own = ref.shared_tokens + len(ref.new_ids) // ITEM_BYTES
            if wanted > own:
                pieces.append(_sampled(base, call, wanted - own))
                wanted = own
            if wanted > ref.shared_tokens:
                pieces.append(ref.new_ids[: (wanted - ref.shared_tokens) * ITEM_BYTES])
                wanted = ref.shared_tokens
            call = base
        return b"".join(reversed(pieces))

    def _base(self, call: Call) -> tuple[Call, PromptRef]:
        assert call.prompt is not None
        base = self._calls.get(call.prompt.base_call_id or "")
        if base is None or base.prompt is None or base.commit_seq >= call.commit_seq:
            raise BrokenPromptError(
                f"the prompt of call {call.call_id} refers to call {call.prompt.base_call_id}, "
                "which is missing, has no prompt, or was committed later"
            )
        return base, base.prompt


def _sampled(base: Call, call: Call, tokens: int) -> Int32s:
    """Return the first sampled tokens of the base's choice that the prompt runs through."""
    assert call.prompt is not None
    for choice in base.choices:
        if choice.index == call.prompt.base_choice and len(choice.token_ids) >= tokens * ITEM_BYTES:
            return choice.token_ids[: tokens * ITEM_BYTES]
    raise BrokenPromptError(
        f"the prompt of call {call.call_id} runs through {tokens} tokens of choice {call.prompt.base_choice} "
        f"of call {base.call_id}, which has no such choice or a shorter one"
    )
