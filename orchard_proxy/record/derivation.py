"""The derivation itself: frames in, rows out, one transaction a batch.

It holds no lock and decides nothing about when to read; `deriver` does. Invariants: every frame takes effect exactly
once, because the rows and the position behind the frames they come from are one transaction, and frames before that
position are only gathered again for calls that were open there. A call closes at its END, or as crashed when its
session is over.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchard_proxy.record import bounds, open_call, rollout_state
from orchard_proxy.record.catalog import Batch, Catalog
from orchard_proxy.record.held_states import HeldStates
from orchard_proxy.record.open_call import OpenCall, ReadCall
from orchard_proxy.record.queries import Progress
from orchard_proxy.record.reader import Damage, Read
from orchard_proxy.record.rollout_state import RolloutState
from orchard_proxy.record.segments import CONTROL_ID, Position, list_segments
from orchard_proxy.record.stored import SharedText, call_row
from orchard_proxy.record.tail import Step, Tail
from orchard_proxy.schema.enums import Delivery
from orchard_proxy.schema.frames import EndFrame, FinishFrame, FrameType, RolloutFrame
from orchard_proxy.schema.records import JournalDamage, Rollout

logger = logging.getLogger(__name__)

BATCH_CALLS = 256
BATCH_BYTES = 32 << 20
"""Journal bytes a transaction: at 150 KB a call, about as many calls as BATCH_CALLS."""
STATE_BYTES = 256 << 20
"""Memory for the states of open rollouts: 600 with 50k tokens each. One without room is built again when needed."""
LOOKS_PER_LISTING = 64
"""A worker that is new shows within some seconds; listing a long journal at every look would cost more than that."""

_ROLLOUT = msgspec.msgpack.Decoder(RolloutFrame)
_FINISH = msgspec.msgpack.Decoder(FinishFrame)
_END = msgspec.msgpack.Decoder(EndFrame)


class Stride(NamedTuple):
    """What one step did: frames read, and whether there may be more."""

    frames: int
    more: bool


class Derivation:
    """Reads one data folder's journal into its catalog, from where the catalog stands."""

    def __init__(self, data_dir: Path, catalog: Catalog, *, state_bytes: int = STATE_BYTES) -> None:
        self._data_dir = Path(data_dir)
        self._catalog = catalog
        known = catalog.progress()
        self._done = {worker: one.done for worker, one in known.items()}
        self._commits = max((one.commits for one in known.values()), default=0)
        self._tails = {worker: Tail(self._data_dir, worker, one.resume) for worker, one in known.items()}
        self._open: dict[str, dict[bytes, OpenCall]] = {worker: {} for worker in known}
        self._states = HeldStates(catalog, state_bytes)
        self._batch = Batch()
        self._rows: dict[str, int] = {}
        self._touched: set[str] = set()
        self._looks = 0

    @property
    def open_calls(self) -> int:
        """Return how many calls have begun and not ended."""
        return sum(map(len, self._open.values()))

    def step(self) -> "Stride":
        """Derive what there is, up to one batch."""
        budget, frames = BATCH_BYTES, 0
        for tail in self._current_tails():
            for step in tail.steps():
                self._take(tail.worker, step)
                frames += 1
                budget -= len(step.read.payload) if step.read else 0
                if budget <= 0 or len(self._batch.calls) >= BATCH_CALLS:
                    self._flush()
                    return Stride(frames=frames, more=True)
        self._flush()
        return Stride(frames=frames, more=False)

    def close_open(self, sessions_but: bytes | None) -> None:
        """Close the calls of sessions that are over as crashed; `sessions_but` is the one that lives, if any."""
        for tail in self._tails.values():
            if sessions_but is None or tail.session != sessions_but:
                self._crash(tail.worker)
        self._flush()

    def _current_tails(self) -> list[Tail]:
        if not self._tails or self._looks % LOOKS_PER_LISTING == 0:
            for worker in list_segments(self._data_dir):
                self._tails.setdefault(worker, Tail(self._data_dir, worker, None))
                self._open.setdefault(worker, {})
        self._looks += 1
        return [tail for tail in self._tails.values() if not tail.idle]

    def _take(self, worker: str, step: Step) -> None:
        if step.damage is not None:
            self._damage(worker, step.damage)
            return
        if step.read is None:
            self._crash(worker)
            return
        done = self._done.get(worker)
        try:
            self._frame(worker, step, step.read, again=done is not None and step.end <= done)
        except msgspec.DecodeError as error:
            logger.error("a %s frame before %s cannot be decoded: %s", step.read.kind.name, step.end, error)  # noqa: TRY400

    def _frame(self, worker: str, step: Step, read: Read, *, again: bool) -> None:
        """Take one frame; `again`: it is read only to gather a call that was open where we stopped."""
        opened = self._open[worker]
        if read.kind is FrameType.BEGIN:
            opened[read.call_id] = OpenCall.of(read.call_id, step.start, read.payload)
        elif read.kind is FrameType.END:
            one = opened.pop(read.call_id, None)
            if not again:
                self._end(read.call_id.hex(), one, _END.decode(read.payload))
        elif read.call_id in opened:
            opened[read.call_id].add(read.kind, read.payload)
        elif not again:
            self._settled(read)

    def _damage(self, worker: str, damage: Damage) -> None:
        """Keep what was lost, and mark every open call that may have had frames there."""
        lost = JournalDamage(segment=damage.path.name, offset=damage.start, bytes=damage.end - damage.start)
        self._batch.damages.append(lost)
        opened, owner = self._open[worker], damage.call_id
        if owner in opened:
            opened[owner].damaged = True
        elif owner is None or not self._knows(owner):
            for one in opened.values():
                one.damaged = True

    def _knows(self, call_id: bytes) -> bool:
        """Say whether frames of this id concern no open call: control frames, and calls that have ended."""
        name = call_id.hex()
        return call_id == CONTROL_ID or name in self._rows or self._catalog.call_exists(name)

    def finish_tails(self) -> None:
        """Look at what is left at the end of each segment that nobody writes any more."""
        for tail in self._tails.values():
            for step in tail.end():
                self._take(tail.worker, step)

    def _settled(self, read: Read) -> None:
        if read.kind is FrameType.ROLLOUT:
            frame = _ROLLOUT.decode(read.payload)
            state = self._state(frame.rollout_id, frame.created_us)
            state.rollout = _fitting(rollout_state.created(frame, state.rollout))
        elif read.kind is FrameType.FINISH:
            self._finish(_FINISH.decode(read.payload))
        elif read.kind is FrameType.DELIVERED:
            self._confirm(read.call_id.hex())

    def _end(self, call_id: str, one: OpenCall | None, end: EndFrame) -> None:
        if one is not None:
            self._close(one, end)
        elif call_id in self._rows:
            row = self._batch.calls[self._rows[call_id]]
            row.update(outcome=str(end.outcome), delivery=str(Delivery.NONE))
        else:
            # A second END: the first could not be made durable, and the client was told so.
            self._batch.failed_calls[call_id] = end.outcome

    def _close(self, one: OpenCall, end: EndFrame) -> None:
        state = self._state(one.begin.rollout_id, one.begin.begun_us)
        call, text = state.place(_storable(open_call.read(one, end, self._commits)))
        self._commits += 1
        self._rows[call.call_id] = len(self._batch.calls)
        self._batch.calls.append(call_row(call, text))
        if call.parent_call_id is not None:
            self._confirm(call.parent_call_id)

    def _crash(self, worker: str) -> None:
        for one in list(self._open[worker].values()):
            self._close(one, one.crashed())
        self._open[worker].clear()

    def _finish(self, frame: FinishFrame) -> None:
        state = self._state(frame.rollout_id, frame.finished_us)
        state.rollout = _fitting(rollout_state.finished(frame, state.rollout))
        self._batch.confirmed_rollouts.add(frame.rollout_id)
        for row in self._batch.calls:
            if row["rollout_id"] == frame.rollout_id and not row["late"]:
                _confirm(row)

    def _confirm(self, call_id: str) -> None:
        if call_id in self._rows:
            _confirm(self._batch.calls[self._rows[call_id]])
        else:
            self._batch.confirmed_calls.add(call_id)

    def _state(self, rollout_id: str, seen_us: int) -> RolloutState:
        self._touched.add(rollout_id)
        return self._states.get(rollout_id, seen_us)

    def _flush(self) -> None:
        """Write the batch with the position that it reaches; then let go of what memory has no room for."""
        places = {tail.worker: tail.position for tail in self._tails.values() if tail.position >= self._before(tail)}
        moved = any(self._done.get(worker) != place for worker, place in places.items())
        if not moved and not self._touched and not self._batch.damages:
            return
        self._batch.progress = {worker: self._progress(worker, place) for worker, place in places.items()}
        self._batch.rollouts = [self._states.held(rollout_id).row() for rollout_id in sorted(self._touched)]
        self._catalog.write(self._batch)
        self._done |= places
        self._states.trim(self._touched)
        self._batch, self._rows, self._touched = Batch(), {}, set()

    def _before(self, tail: Tail) -> Position:
        """Return the place that is written; a tail that gathers open calls again is still before it."""
        return self._done.get(tail.worker, tail.position)

    def _progress(self, worker: str, done: Position) -> Progress:
        first = next(iter(self._open[worker].values()), None)
        return Progress(done=done, resume=first.began_at if first else done, commits=self._commits)


def _storable(read: ReadCall) -> ReadCall:
    """Try before the call takes its place in the forest whether it can be stored; later calls build on it there."""
    try:
        call_row(read.call, SharedText())
    except Exception:  # one record that no store takes must not stop the derivation of all the others
        logger.exception("call %s of rollout %s could not be stored", read.call.call_id, read.call.rollout_id)
        return open_call.unread(read.call)
    return read


def _fitting(rollout: Rollout) -> Rollout:
    fits, odd = bounds.rollout(rollout)
    if odd:
        logger.warning("rollout %s: %s does not fit its column and was cut down to it", rollout.rollout_id, odd)
    return fits


def _confirm(row: dict[str, object]) -> None:
    if row["delivery"] == str(Delivery.UNCERTAIN):
        row["delivery"] = str(Delivery.CONFIRMED)
