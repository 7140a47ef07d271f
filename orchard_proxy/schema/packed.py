"""Token arrays as packed bytes.

Token ids travel between rooms as little-endian int32, log-probabilities as little-endian float32, both in plain
`bytes`. A list of Python ints costs 36 bytes a token and cannot be compared by prefix; packed, "B extends A" is
`bytes.startswith`, Arrow takes the buffer as it is, and msgspec writes it without a hook.
"""

import sys
from array import array
from collections.abc import Iterable

Int32s = bytes
"""Packed little-endian int32, 4 bytes a token."""

Float32s = bytes
"""Packed little-endian float32, 4 bytes a token. NaN means "not known"."""

ITEM_BYTES = 4


def pack_ids(ids: Iterable[int]) -> Int32s:
    """Pack token ids. Raise OverflowError for an id outside int32."""
    return _little_endian(array("i", ids))


def unpack_ids(packed: Int32s) -> list[int]:
    """Return the token ids as a list."""
    return _unpack("i", packed).tolist()


def pack_floats(values: Iterable[float]) -> Float32s:
    """Pack log-probabilities as float32."""
    return _little_endian(array("f", values))


def unpack_floats(packed: Float32s) -> list[float]:
    """Return the log-probabilities as a list."""
    return _unpack("f", packed).tolist()


def count(packed: bytes) -> int:
    """Return the number of tokens in a packed array."""
    return len(packed) // ITEM_BYTES


def _little_endian(values: array) -> bytes:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpack(typecode: str, packed: bytes) -> array:  # type: ignore[type-arg]
    values = array(typecode)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
