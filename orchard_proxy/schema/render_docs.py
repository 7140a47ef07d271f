"""docs/columns.md, rendered from the one list of columns.

`python -m orchard_proxy.schema.render_docs > docs/columns.md` writes it;
a test fails when the file differs from what this renders.
"""

from collections.abc import Iterator
from enum import StrEnum

from orchard_proxy.schema import enums
from orchard_proxy.schema.columns import SCHEMA_VERSION, TABLES, Column

_VOCABULARIES: tuple[type[StrEnum], ...] = (
    enums.RolloutStatus,
    enums.Outcome,
    enums.Delivery,
    enums.IdsGrade,
    enums.LogprobsGrade,
    enums.BranchReason,
    enums.MaskedReason,
    enums.Blame,
    enums.Phase,
)
_ABOUT = {
    "rollouts": "One row a rollout: one attempt of one harness at one task.",
    "calls": "One row a call: one model request of the harness and its answer, with n choices.",
    "samples": "One row a training sample: a path from a root to a leaf of the rollout's forest.",
}


def render() -> str:
    """Return the page as Markdown."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    version = ".".join(map(str, SCHEMA_VERSION))
    yield "# Columns"
    yield ""
    yield "<!-- Rendered from orchard_proxy/schema/columns.py by `python -m orchard_proxy.schema.render_docs`. -->"
    yield ""
    yield f"Schema version {version}. A new nullable column raises the minor number; what an old reader would misread"
    yield "raises the major one, and a reader refuses a newer major. A type with `?` may be null."
    for table, columns in TABLES.items():
        yield from ("", f"## {table}", "", _ABOUT[table], "", "| column | type | meaning |", "|---|---|---|")
        yield from _rows(columns)
    yield from ("", "## Words", "", "| vocabulary | values |", "|---|---|")
    for words in _VOCABULARIES:
        yield f"| {words.__name__} | {', '.join(f'`{word}`' for word in words)} |"


def _rows(columns: tuple[Column, ...], prefix: str = "") -> Iterator[str]:
    for column in columns:
        kind = f"{column.kind}{'?' if column.nullable else ''}"
        yield f"| `{prefix}{column.name}` | {kind} | {column.doc.replace('|', chr(92) + '|')} |"
        yield from _rows(column.fields, f"{prefix}{column.name}.")


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201 (its one purpose)
