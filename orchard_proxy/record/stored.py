"""Calls and rollouts as rows of the catalog, and back.

A harness sends the whole conversation with each call; stored as sent, n turns would cost n squared. So a call's
messages are kept as (earlier call of the rollout, bytes shared, the rest), byte-true, as its prompt ids are.

JSON travels in a msgpack blob as a byte string: msgspec would write a Raw as if it were msgpack.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from orchard_proxy.errors import BrokenPromptError, CatalogDamagedError
from orchard_proxy.record import tables
from orchard_proxy.schema.enums import Delivery, Outcome
from orchard_proxy.schema.records import Call, Rollout


class SharedText(msgspec.Struct, frozen=True, array_like=True):
    """The first bytes of an earlier call's messages."""

    call_id: str | None = None
    length: int = 0


class _StoredCall(msgspec.Struct, frozen=True, array_like=True):
    call: Call
    text: SharedText


_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_CALL = msgspec.msgpack.Decoder(_StoredCall)
_ROLLOUT = msgspec.msgpack.Decoder(Rollout)
_BYTES = msgspec.msgpack.Decoder(bytes)


def call_row(call: Call, text: SharedText) -> dict[str, Any]:
    """Return the row of a call whose messages begin with `text`."""
    stored = _recoded(call, _packed, _packed(bytes(call.messages)[text.length :]))
    return {
        "call_id": call.call_id,
        "rollout_id": call.rollout_id,
        "seq": call.seq,
        "commit_seq": call.commit_seq,
        "dialect": call.dialect,
        "engine": call.engine,
        "stream": call.stream,
        "model": call.model,
        "outcome": str(call.outcome),
        "delivery": str(call.delivery),
        "late": call.late,
        "begun_at": call.begun_us,
        "ended_at": call.ended_us,
        "ttft_s": call.ttft_s,
        "duration_s": call.duration_s,
        "parent_call_id": call.parent_call_id,
        "parent_choice": call.parent_choice,
        "prompt_known": call.prompt is not None,
        "prompt_base_call_id": call.prompt.base_call_id if call.prompt else None,
        "prompt_base_choice": call.prompt.base_choice if call.prompt else None,
        "prompt_shared": call.prompt.shared_tokens if call.prompt else 0,
        "prompt_tokens": call.prompt_tokens,
        "usage_prompt_tokens": call.usage.prompt_tokens,
        "usage_completion_tokens": call.usage.completion_tokens,
        "evidence_rejected": call.evidence_rejected,
        "http_status": call.http_status,
        "record": _ENCODER.encode(_StoredCall(stored, text)),
    }


def calls_of(rows: Iterable[sa.Row[Any]]) -> Iterator[Call]:
    """Yield the calls of one rollout from its rows, which come in commit order."""
    texts: dict[str, bytes] = {}
    for row in rows:
        stored = _decoded(_CALL, row.record)
        tail = _decoded(_BYTES, stored.call.messages)
        messages = _shared(stored, texts) + tail
        texts[stored.call.call_id] = messages
        call = _recoded(stored.call, _unpacked, msgspec.Raw(messages))
        yield msgspec.structs.replace(call, outcome=Outcome(row.outcome), delivery=Delivery(row.delivery))


def _shared(stored: _StoredCall, texts: dict[str, bytes]) -> bytes:
    if stored.text.call_id is None:
        return b""
    try:
        return texts[stored.text.call_id][: stored.text.length]
    except KeyError:
        raise BrokenPromptError(
            f"the messages of call {stored.call.call_id} begin like those of {stored.text.call_id}, which is missing; "
            "`orchard derive --rebuild` makes the catalog again"
        ) from None


def rollout_row(rollout: Rollout, *, calls: int, sampled_tokens: int) -> dict[str, Any]:
    """Return the row of a rollout."""
    stored = msgspec.structs.replace(rollout, metadata=_packed(bytes(rollout.metadata)))
    return {
        **{name: getattr(rollout, name) for name in _SAME_NAME},
        "status": str(rollout.status),
        "calls": calls,
        "sampled_tokens": sampled_tokens,
        "started_at": rollout.started_us,
        "finished_at": rollout.finished_us,
        "record": _ENCODER.encode(stored),
    }


def rollout_of(row: sa.Row[Any]) -> Rollout:
    """Return the rollout of a row."""
    stored = _decoded(_ROLLOUT, row.record)
    return msgspec.structs.replace(stored, metadata=_unpacked(stored.metadata))


_SAME_NAME = tuple(
    column.name
    for column in tables.rollouts.columns
    if column.name in Rollout.__struct_fields__ and column.name != "status"
)


def _recoded(call: Call, recode: Callable[[msgspec.Raw], msgspec.Raw], messages: msgspec.Raw) -> Call:
    """Return the call with each JSON text recoded; messages come recoded, because only a part of them may be kept."""
    return msgspec.structs.replace(
        call,
        sampling=recode(call.sampling),
        tools=recode(call.tools),
        messages=messages,
        choices=[msgspec.structs.replace(choice, message=recode(choice.message)) for choice in call.choices],
    )


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CatalogDamagedError(
            f"a record of the catalog cannot be read ({error}); `orchard derive --rebuild` makes the catalog again"
        ) from error


def _packed(text: bytes | msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(bytes(text)))


def _unpacked(stored: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(_BYTES.decode(stored))
