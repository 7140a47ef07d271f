"""Arrow schemas and arrays follow the one list of columns, both ways."""

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.export import arrow
from orchard_proxy.schema.columns import TABLES, Column, Kind

EXAMPLES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.STR: st.text(max_size=5),
    Kind.JSON: st.sampled_from(["{}", "null", "[1]"]),
    Kind.INT32: st.integers(-(2**31), 2**31 - 1),
    Kind.INT64: st.integers(-(2**63), 2**63 - 1),
    Kind.FLOAT64: st.floats(allow_nan=False),
    Kind.BOOL: st.booleans(),
    Kind.TIME: st.integers(0, 2**52),
    Kind.STRS: st.lists(st.text(max_size=3), max_size=3),
    Kind.IDS: st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: array("i", ids).tobytes()),
    Kind.MASK: st.binary(max_size=5),
    Kind.LOGPROBS: st.lists(st.floats(width=32), max_size=4).map(lambda values: array("f", values).tobytes()),
}


def values(column: Column) -> st.SearchStrategy[Any]:
    if column.kind in (Kind.STRUCT, Kind.STRUCTS):
        member = st.fixed_dictionaries({field.name: values(field) for field in column.fields})
        inner = member if column.kind is Kind.STRUCT else st.lists(member, max_size=3)
    else:
        inner = EXAMPLES[column.kind]
    return st.none() | inner if column.nullable else inner


ALL = [(table, column) for table, columns in TABLES.items() for column in columns]


@pytest.mark.parametrize("column", [column for _, column in ALL], ids=[f"{table}.{c.name}" for table, c in ALL])
def test_round_trip(column: Column) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(st.lists(values(column), max_size=5))
    def check(rows: list[Any]) -> None:
        built = arrow.to_array(column, rows)
        built.validate(full=True)
        assert built.type == arrow.field(column).type
        assert arrow.to_rows(column, built) == rows

    check()


@pytest.mark.parametrize("column", [column for _, column in ALL], ids=[f"{table}.{c.name}" for table, c in ALL])
def test_a_slice_reads_as_the_slice(column: Column) -> None:
    @settings(max_examples=5, deadline=None, database=None)
    @given(st.lists(values(column), min_size=3, max_size=5))
    def check(rows: list[Any]) -> None:
        assert arrow.to_rows(column, arrow.to_array(column, rows).slice(1, 2)) == rows[1:3]

    check()


def test_public_types_are_those_of_the_contract() -> None:
    samples = arrow.schema("samples")
    assert samples.field("token_ids").type.value_type == pa.int32()
    assert samples.field("loss_mask").type.value_type == pa.int8()
    assert samples.field("logprobs").type.value_type == pa.float32()
    assert arrow.schema("calls").field("begun_at").type == pa.timestamp("us", tz="UTC")


def test_nullability_is_declared() -> None:
    for table, columns in TABLES.items():
        assert {f.name: f.nullable for f in arrow.schema(table)} == {c.name: c.nullable for c in columns}


def test_a_lone_surrogate_in_a_string_column_stays_readable() -> None:
    text, names = Column("x", Kind.STR, ""), Column("y", Kind.STRS, "")
    assert arrow.to_array(text, ["a\ud800b", "c"]).to_pylist() == ["a\\ud800b", "c"]
    assert arrow.to_array(names, [["a\ud800b"]]).to_pylist() == [["a\\ud800b"]]


def test_a_column_that_a_file_lacks_reads_as_null() -> None:
    wanted = (Column("a", Kind.STR, ""), Column("b", Kind.STR, "", nullable=True))
    batch = pa.RecordBatch.from_pydict({"a": ["x"]})
    assert arrow.rows(wanted, batch) == [{"a": "x", "b": None}]
