"""One call, gathered frame by frame, and read by its engine into a `Call` once it has ended.

Not the forest: parent and prompt reference are filled in by `rollout_state`. Invariant: whatever a frame or an engine's
reader holds, a call that began becomes a `Call`; a bug in a reader costs that call its evidence and is logged.
"""

import logging
from dataclasses import dataclass, field

import msgspec

from orchard_proxy.engines import registry
from orchard_proxy.engines.base import Exchange
from orchard_proxy.record import bounds
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.enums import Delivery, Outcome
from orchard_proxy.schema.frames import BeginFrame, Edit, EditFrame, EndFrame, EvidenceFrame, FrameType, HeadFrame
from orchard_proxy.schema.records import Call, CallEvidence, Usage
from orchard_proxy.wire import chat

logger = logging.getLogger(__name__)

DIALECTS = {chat.DIALECT: chat}
_CUT = frozenset({Outcome.CLIENT_GONE, Outcome.CRASHED})
_BEGIN = msgspec.msgpack.Decoder(BeginFrame)
_EDIT = msgspec.msgpack.Decoder(EditFrame)
_HEAD = msgspec.msgpack.Decoder(HeadFrame)
_EVIDENCE = msgspec.msgpack.Decoder(EvidenceFrame)
_TIME_BYTES = 8
_NULL = msgspec.Raw(b"null")
DAMAGED = "journal_damaged"


@dataclass(slots=True)
class OpenCall:
    """A call whose END has not been read yet."""

    call_id: bytes
    began_at: Position
    """Before its BEGIN frame: where to read again if we stop now."""
    begin: BeginFrame
    edit: EditFrame | None = None
    head: HeadFrame | None = None
    chunks: list[bytes] = field(default_factory=list)
    side: list[EvidenceFrame] = field(default_factory=list)
    first_chunk_us: int | None = None
    last_us: int = 0
    damaged: bool = False
    """Frames of it may be missing: the journal is damaged where they lay."""

    @classmethod
    def of(cls, call_id: bytes, began_at: Position, payload: bytes) -> "OpenCall":
        """Begin with a BEGIN frame. Raise msgspec.DecodeError."""
        begin = _BEGIN.decode(payload)
        return cls(call_id, began_at, begin, last_us=begin.begun_us)

    def add(self, kind: FrameType, payload: bytes) -> None:
        """Take in one more frame. Raise msgspec.DecodeError."""
        if kind is FrameType.CHUNK:
            self._chunk(payload)
        elif kind is FrameType.EDIT:
            self.edit = _EDIT.decode(payload)
        elif kind is FrameType.HEAD:
            self.head = _HEAD.decode(payload)
            self.last_us = max(self.last_us, self.head.received_us)
        elif kind is FrameType.EVIDENCE:
            self.side.append(_EVIDENCE.decode(payload))

    def _chunk(self, payload: bytes) -> None:
        at_us = int.from_bytes(payload[:_TIME_BYTES], "little")
        self.chunks.append(payload[_TIME_BYTES:])
        self.first_chunk_us = self.first_chunk_us or at_us
        self.last_us = max(self.last_us, at_us)

    def crashed(self) -> EndFrame:
        """Return the END that the call never got, because its server died."""
        return EndFrame(outcome=Outcome.CRASHED, ended_us=self.last_us)


class ReadCall(msgspec.Struct, frozen=True):
    """A call without its place in the forest, and the prompt ids to find it by."""

    call: Call
    evidence: CallEvidence


def read(one: OpenCall, end: EndFrame, commit_seq: int) -> ReadCall:
    """Read an ended call. Never raises for anything that a client, an engine or a reader's bug may bring."""
    begin = one.begin
    evidence = _evidence(one, end)
    request = _request(one)
    edits = [*(one.edit.edits if one.edit else []), *end.edits]
    call = Call(
        call_id=one.call_id.hex(),
        rollout_id=begin.rollout_id,
        seq=begin.seq,
        commit_seq=commit_seq,
        dialect=begin.dialect,
        engine=one.edit.engine if one.edit else "none",
        stream=request.stream,
        model=evidence.model or request.model,
        outcome=end.outcome,
        delivery=Delivery.NONE if end.outcome in _CUT else Delivery.UNCERTAIN,
        late=end.late,
        failure=end.failure,
        begun_us=begin.begun_us,
        ended_us=end.ended_us,
        ttft_s=None if one.first_chunk_us is None else (one.first_chunk_us - begin.begun_us) / 1e6,
        duration_s=(end.ended_us - begin.begun_us) / 1e6,
        parent_call_id=None,
        parent_choice=None,
        prompt=None,
        prompt_tokens=None if evidence.prompt_ids is None else len(evidence.prompt_ids) // 4,
        choices=evidence.choices,
        usage=evidence.usage,
        sampling=request.sampling,
        messages=request.messages,
        tools=request.tools,
        edits=[_named(edit) for edit in edits],
        problems=[*evidence.problems, *request.problems],
        evidence_rejected=evidence.rejected,
        http_status=one.head.status if one.head else None,
    )
    return ReadCall(bounds.call(call), evidence)


def unread(whole: Call) -> ReadCall:
    """Return a call of which nothing is kept but that it was: for one that could not be placed or stored."""
    bare = msgspec.structs.replace(
        whole,
        model=None,
        failure=None,
        parent_call_id=None,
        parent_choice=None,
        prompt=None,
        prompt_tokens=None,
        choices=[],
        usage=Usage(),
        sampling=msgspec.Raw(b"{}"),
        messages=_NULL,
        tools=_NULL,
        edits=[],
        problems=["derive_failed"],
        evidence_rejected=True,
    )
    return ReadCall(bare, CallEvidence(problems=bare.problems, rejected=True))


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked, as far as its dialect could be read."""

    model: str | None = None
    stream: bool = False
    sampling: msgspec.Raw = msgspec.Raw(b"{}")
    messages: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    problems: list[str] = []


def _request(one: OpenCall) -> _Request:
    dialect = DIALECTS.get(one.begin.dialect)
    if dialect is None:
        return _Request(problems=["unknown_dialect"])
    try:
        request = dialect.decode(one.begin.body)
        return _Request(
            model=request.model,
            stream=request.stream,
            sampling=_own(dialect.sampling(request)),
            messages=_own(dialect.messages(request)),
            tools=_own(dialect.tools(request)),
        )
    except Exception:  # a bug of ours in one dialect must not stop the derivation of all the others' calls
        logger.exception("the request of call %s could not be read", one.call_id.hex())
        return _Request(problems=["derive_failed"])


def _evidence(one: OpenCall, end: EndFrame) -> CallEvidence:
    """Return what the answer proves; where the journal lost some of it, nothing may be held against the engine."""
    read = _evidence_as_read(one, end)
    if not one.damaged:
        return read
    choices = [msgspec.structs.replace(choice, problems=[]) for choice in read.choices]
    return msgspec.structs.replace(read, choices=choices, problems=[DAMAGED], rejected=True)


def _evidence_as_read(one: OpenCall, end: EndFrame) -> CallEvidence:
    edit = one.edit
    if edit is None or edit.engine not in registry.ENGINES:
        return CallEvidence()  # the call never got as far as an engine
    try:
        evidence = registry.get(edit.engine).evidence(_exchange(one, edit, end))
    except Exception:  # as above: the journal keeps the bytes, and the next derive may know better
        logger.exception("the evidence of call %s could not be read", one.call_id.hex())
        return CallEvidence(problems=["derive_failed"], rejected=True)
    return _distinct(bounds.evidence(evidence))


def _exchange(one: OpenCall, edit: EditFrame, end: EndFrame) -> Exchange:
    return Exchange(
        request=one.begin.body,
        upstream_stream=edit.upstream_stream,
        status=one.head.status if one.head else None,
        content_type=_content_type(one.head),
        answer=b"".join(one.chunks),
        side=one.side,
        outcome=str(end.outcome),
        logprobs_mode=edit.logprobs_mode,
        n_vocab=edit.n_vocab,
    )


def _content_type(head: HeadFrame | None) -> str:
    headers = head.headers if head else {}
    return next((value for name, value in headers.items() if name.lower() == "content-type"), "")


def _distinct(evidence: CallEvidence) -> CallEvidence:
    """Refuse two choices of one index: nothing could tell which of them a later call extends."""
    indexes = [choice.index for choice in evidence.choices]
    if len(set(indexes)) == len(indexes):
        return evidence
    problems = [*evidence.problems, "duplicate_choice_index"]
    return msgspec.structs.replace(evidence, problems=problems, rejected=True)


def _named(edit: Edit) -> str:
    return f"{edit.name}: {edit.detail}" if edit.detail else edit.name


def _own(raw: msgspec.Raw) -> msgspec.Raw:
    """Copy, so that a small part does not keep the whole request body alive."""
    return msgspec.Raw(bytes(raw))
