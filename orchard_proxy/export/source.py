"""What a data folder has recorded, rollout by rollout: the bridge from the catalog to the writer.

Derives the journal to its end first (or waits for the deriver of a running server), so that what a client saw end is
in what is read. Memory is one page of rollouts and the calls of one.
"""

from collections.abc import Iterator
from pathlib import Path

from orchard_proxy.assemble import samples
from orchard_proxy.export.item import Item
from orchard_proxy.record import deriver
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.schema.records import JournalDamage


def derived(data_dir: Path) -> bool:
    """Derive everything that is recorded; False when the folder is there, but nothing was ever recorded in it."""
    return deriver.derive(data_dir)


def damages(data_dir: Path) -> list[JournalDamage]:
    """Return what of the journal could not be derived, as far as it is derived."""
    if not any(data_dir.iterdir()):
        return []
    with Catalog.open(data_dir) as catalog:
        return catalog.damages()


def items(data_dir: Path) -> Iterator[Item]:
    """Yield every rollout of a data folder with its calls and samples."""
    if not derived(data_dir):
        return
    with Catalog.open(data_dir) as catalog:
        for rollout in catalog.iter_rollouts():
            calls = catalog.calls(rollout.rollout_id)
            yield Item(rollout, calls, *samples.build(rollout, calls))
