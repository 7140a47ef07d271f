"""docs/columns.md says what the list of columns says."""

from pathlib import Path

from orchard_proxy.schema.columns import TABLES
from orchard_proxy.schema.render_docs import render

PAGE = Path(__file__).parents[2] / "docs" / "columns.md"


def test_the_page_is_rendered_from_the_list() -> None:
    command = "python -m orchard_proxy.schema.render_docs > docs/columns.md"
    assert PAGE.read_text() == render(), f"columns changed; run {command}"


def test_every_column_and_member_is_on_the_page() -> None:
    page = render()
    for columns in TABLES.values():
        for column in columns:
            assert f"| `{column.name}` | {column.kind}" in page
            for member in column.fields:
                assert f"| `{column.name}.{member.name}` |" in page
