"""Where to cut a text into the pieces that a stream would have had: at the tokens of its logprobs entries.

The invariant: the pieces joined are the text, each is whole UTF-8, and the entries that the pieces count are the first
ones, in order; what follows them stands behind the text (an end-of-turn token). The last piece may be part of a token
or have no entry at all: a stop string cuts inside a token, and llama.cpp then leaves the entry out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Piece(NamedTuple):
    """Some text and how many entries it covers."""

    text: str
    entries: int


class _Entry(msgspec.Struct):
    token: str = ""
    bytes: list[int] | None = None


_ENTRY = msgspec.json.Decoder(_Entry)


def cut(text: str, entries: Sequence[msgspec.Raw]) -> list[Piece] | None:
    """Cut `text` at its entries; None when they are not the tokens of this text."""
    try:
        whole = text.encode()
        tokens = [_token_bytes(_ENTRY.decode(entry)) for entry in entries]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    pieces: list[Piece] = []
    at = end = count = 0
    for token in tokens:
        if at == len(whole):
            break
        if not whole.startswith(token, end) and not token.startswith(whole[end:]):
            return None
        end = min(end + len(token), len(whole))
        count += 1
        if token and _is_boundary(whole, end):
            pieces.append(Piece(whole[at:end].decode(), count))
            at, count = end, 0
    if not pieces:
        return None
    return pieces if at == len(whole) else [*pieces, Piece(whole[at:].decode(), count)]


def _is_boundary(whole: bytes, at: int) -> bool:
    """Say whether no character is cut at `at`: the next byte does not continue one."""
    return at == len(whole) or whole[at] & 0xC0 != 0x80


def _token_bytes(entry: _Entry) -> bytes:
    return entry.token.encode() if entry.bytes is None else bytes(entry.bytes)
