"""The rollouts that this server knows, in memory: who a key belongs to, and whether it still may call.

Filled from the journal at start (record.recovery) and kept by the control plane. Token data is not here, so that a
hundred thousand finished rollouts cost megabytes, not gigabytes.
"""

from dataclasses import dataclass

import msgspec

from orchard_proxy.record.recovery import RolloutState
from orchard_proxy.server import keys


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not let in, for the dialect to spell."""

    status: int
    code: str
    message: str


@dataclass(slots=True)
class Entry:
    """One rollout. `finished_us` is None while it accepts calls."""

    rollout_id: str
    key_sha256: str
    implicit: bool
    body_sha256: str
    next_seq: int = 0
    finished_us: int | None = None
    finish_version: int = 0

    def take_seq(self) -> int:
        """Give the next call its number."""
        self.next_seq += 1
        return self.next_seq - 1


class Registry:
    """Rollouts by id and by key hash."""

    def __init__(self, *, open_mode: bool, admin_sha256: str) -> None:
        self.open_mode = open_mode
        self._admin_sha256 = admin_sha256
        self._by_id: dict[str, Entry] = {}
        self._by_key: dict[str, Entry] = {}

    def restore(self, states: dict[str, RolloutState]) -> None:
        """Take over what an earlier server recorded."""
        for state in states.values():
            self.add(
                Entry(
                    rollout_id=state.rollout_id,
                    key_sha256=state.key_sha256,
                    implicit=state.implicit,
                    body_sha256=state.body_sha256,
                    next_seq=state.next_seq,
                    finished_us=state.finished_us,
                    finish_version=state.finish_version,
                )
            )

    def add(self, entry: Entry) -> None:
        """Make a rollout known."""
        self._by_id[entry.rollout_id] = entry
        if entry.key_sha256:
            self._by_key[entry.key_sha256] = entry

    def remove(self, entry: Entry) -> None:
        """Forget a rollout that could not be recorded."""
        self._by_id.pop(entry.rollout_id, None)
        self._by_key.pop(entry.key_sha256, None)

    def get(self, rollout_id: str) -> Entry | None:
        """Find a rollout by its id."""
        return self._by_id.get(rollout_id)

    def by_key(self, key: str) -> Entry | None:
        """Find the rollout whose capability this is."""
        return self._by_key.get(keys.digest(key))

    def identify(self, key: str | None) -> Entry | Refusal:
        """Say whose call this is. In open mode an unknown key names an implicit rollout."""
        if not key:
            return _NO_KEY_OPEN if self.open_mode else _NO_KEY
        if keys.digest(key) == self._admin_sha256:
            return _ADMIN_KEY
        entry = self.by_key(key)
        if entry is None:
            return self._labelled(key) if self.open_mode else _WRONG_KEY
        if entry.finished_us is not None and not entry.implicit:
            return _FINISHED
        return entry

    def _labelled(self, key: str) -> Entry | Refusal:
        name = keys.label(key)
        entry = self._by_id.get(name)
        if entry is None:
            return Entry(rollout_id=name, key_sha256="", implicit=True, body_sha256="")
        return entry if entry.implicit else _NOT_YOURS


_NO_KEY = Refusal(
    401, "missing_api_key", "No API key. Send the api_key that POST /rollouts returned, as Authorization: Bearer."
)
_NO_KEY_OPEN = Refusal(401, "missing_api_key", "No API key. Set OPENAI_API_KEY to any name; it labels the rollout.")
_WRONG_KEY = Refusal(
    401,
    "invalid_api_key",
    "Unknown API key. Create a rollout with POST /rollouts and use the api_key it returns.",
)
_ADMIN_KEY = Refusal(
    403,
    "admin_key_on_data_plane",
    "This is the admin key; it makes no calls and belongs in no harness. Use a rollout's api_key.",
)
_NOT_YOURS = Refusal(
    403, "not_your_rollout", "This name belongs to a rollout with a key of its own. Use that key or another name."
)
_FINISHED = Refusal(
    410, "rollout_finished", "This rollout is finished and takes no more calls. Create a new one: POST /rollouts."
)
