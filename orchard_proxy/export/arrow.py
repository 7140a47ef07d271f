"""Arrow, rendered from the one list of columns: schemas, arrays from row values, and row values from arrays.

Not a place where a column is named: everything here follows `schema.columns`. Token arrays never become Python
numbers; packed bytes go into an Arrow buffer as they are and come out the same way. The two directions are inverse:
`to_rows(column, to_array(column, values)) == values`.
"""

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from orchard_proxy.schema.columns import TABLES, Column, Kind
from orchard_proxy.schema.packed import ITEM_BYTES

_SCALARS: dict[Kind, pa.DataType] = {
    Kind.STR: pa.string(),
    Kind.JSON: pa.string(),
    Kind.INT32: pa.int32(),
    Kind.INT64: pa.int64(),
    Kind.FLOAT64: pa.float64(),
    Kind.BOOL: pa.bool_(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
}
_ITEMS: dict[Kind, pa.DataType] = {
    Kind.STRS: pa.string(),
    Kind.IDS: pa.int32(),
    Kind.MASK: pa.int8(),
    Kind.LOGPROBS: pa.float32(),
}
_ITEM_BYTES = {Kind.IDS: ITEM_BYTES, Kind.MASK: 1, Kind.LOGPROBS: ITEM_BYTES}
_PLACEHOLDERS: dict[Kind, Any] = {Kind.STR: "", Kind.JSON: "null", Kind.BOOL: False, Kind.STRUCTS: [], Kind.STRS: []}
"""What stands under a null struct, whose members may be declared not null."""


def schema(table: str) -> pa.Schema:
    """Return the declared Arrow schema of `rollouts`, `calls` or `samples`."""
    return pa.schema([field(column) for column in TABLES[table]])


def field(column: Column) -> pa.Field:
    """Return the Arrow field of a column, nullability included."""
    return pa.field(column.name, _type(column), nullable=column.nullable)


def record_batch(table: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Build one batch of a table from rows that hold a value for every column."""
    arrays = [to_array(column, [row[column.name] for row in rows]) for column in TABLES[table]]
    return pa.RecordBatch.from_arrays(arrays, schema=schema(table))


def rows(columns: tuple[Column, ...], batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch; a column that the file lacks reads as null, one that another tool wrote is cast."""
    present = [column for column in columns if column.name in batch.schema.names]
    absent = {column.name: None for column in columns if column not in present}
    values = [to_rows(column, _as_declared(column, batch.column(column.name))) for column in present]
    names = [column.name for column in present]
    return [dict(zip(names, row, strict=True)) | absent for row in zip(*values, strict=True)]


def to_array(column: Column, values: list[Any]) -> pa.Array:
    """Build the Arrow array of one column."""
    if column.kind in _ITEM_BYTES:
        return _packed_array(column, values)
    if column.kind is Kind.STRUCT:
        return _struct_array(column, values)
    if column.kind is Kind.STRUCTS:
        flat = _struct_array(column, list(chain.from_iterable(values)))
        return pa.ListArray.from_arrays(_offsets([len(value) for value in values]), flat, type=_type(column))
    try:
        return pa.array(values, _type(column))
    except UnicodeEncodeError:  # a lone surrogate from a client's JSON: keep it readable, not lost
        return pa.array([_encodable(value) for value in values], _type(column))


def to_rows(column: Column, array: pa.Array) -> list[Any]:
    """Return one value per row; token arrays as packed bytes, times as microseconds."""
    if column.kind in _ITEM_BYTES:
        return _packed_rows(column, array)
    if column.kind is Kind.STRUCT:
        return _struct_rows(column, array)
    if column.kind is Kind.STRUCTS:
        flat = _struct_rows(column, array.values)
        bounds = array.offsets.to_pylist()
        return [flat[start:end] for start, end in pairwise(bounds)]
    if column.kind is Kind.TIME:
        array = array.cast(pa.int64())
    return array.to_pylist()  # type: ignore[no-any-return]


def _type(column: Column) -> pa.DataType:
    if column.kind in _SCALARS:
        return _SCALARS[column.kind]
    if column.kind in _ITEMS:
        return _list_of(_ITEMS[column.kind])
    struct = pa.struct([field(member) for member in column.fields])
    return struct if column.kind is Kind.STRUCT else _list_of(struct)


def _as_declared(column: Column, array: pa.Array) -> pa.Array:
    declared = _type(column)
    return array if array.type.equals(declared) else array.cast(_nullable(declared))


def _nullable(declared: pa.DataType) -> pa.DataType:
    """Return the type with nulls allowed at any depth, so that a wrong null is read and can be named."""
    if pa.types.is_list(declared):
        return pa.list_(pa.field("element", _nullable(declared.value_type)))
    if pa.types.is_struct(declared):
        return pa.struct([pa.field(member.name, _nullable(member.type)) for member in declared])
    return declared


def _list_of(item: pa.DataType) -> pa.DataType:
    # Parquet calls the member of a list "element"; the same name here makes the schema read back equal.
    return pa.list_(pa.field("element", item, nullable=False))


def _offsets(lengths: list[int]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.array(offsets)


def _packed_array(column: Column, values: list[bytes | None]) -> pa.Array:
    size = _ITEM_BYTES[column.kind]
    data = b"".join(value or b"" for value in values)
    items = pa.Array.from_buffers(_ITEMS[column.kind], len(data) // size, [None, pa.py_buffer(data)])
    offsets = _offsets([len(value or b"") // size for value in values])
    mask = pa.array([value is None for value in values], pa.bool_()) if column.nullable else None
    return pa.ListArray.from_arrays(offsets, items, type=_type(column), mask=mask)


def _packed_rows(column: Column, array: pa.Array) -> list[bytes | None]:
    size = _ITEM_BYTES[column.kind]
    items = array.values
    if items.null_count and column.kind is Kind.LOGPROBS:
        items = items.fill_null(float("nan"))  # pandas writes NaN as null
    if items.null_count:
        raise pa.ArrowInvalid(f"a list in {column.name} holds a null")
    _, buffer = items.buffers()
    data = memoryview(buffer or b"")[items.offset * size :]
    bounds = array.offsets.to_pylist()
    packed: list[bytes | None] = [bytes(data[start * size : end * size]) for start, end in pairwise(bounds)]
    if array.null_count:
        return [value if valid else None for value, valid in zip(packed, array.is_valid().to_pylist(), strict=True)]
    return packed


def _struct_array(column: Column, values: list[dict[str, Any] | None]) -> pa.Array:
    members = [
        to_array(member, [_PLACEHOLDERS.get(member.kind) if value is None else value[member.name] for value in values])
        for member in column.fields
    ]
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(members, fields=[field(member) for member in column.fields], mask=mask)


def _struct_rows(column: Column, array: pa.Array) -> list[dict[str, Any] | None]:
    names = [member.name for member in column.fields]
    members = [
        to_rows(member, array.field(member.name))
        if array.type.get_field_index(member.name) >= 0
        else [None] * len(array)
        for member in column.fields
    ]
    valid = array.is_valid().to_pylist()
    return [
        dict(zip(names, row, strict=True)) if here else None
        for here, row in zip(valid, zip(*members, strict=True), strict=True)
    ]


def _encodable(value: Any) -> Any:
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
