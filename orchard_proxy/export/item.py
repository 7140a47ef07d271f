"""What the writer takes: a rollout with everything that belongs to it."""

from typing import NamedTuple

from orchard_proxy.schema.records import Accounting, Call, Rollout, Sample


class Item(NamedTuple):
    """One rollout, its calls in commit order, its samples, and the accounting of its tokens."""

    rollout: Rollout
    calls: list[Call]
    samples: list[Sample]
    accounting: Accounting
