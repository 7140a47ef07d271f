"""Where to cut a text into the pieces that a stream would have had: at the tokens of its logprobs entries.

The invariant: the pieces joined are the text, each is whole UTF-8, and every entry is counted to one piece or to the
rest behind the text (an end-of-turn token, a token that held a stop string).
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
    """Cut `text` at its entries; None when the entries' bytes are not exactly the text, plus what may follow it."""
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
        if not whole.startswith(token, end):
            return None
        end += len(token)
        count += 1
        if token and _is_boundary(whole, end):
            pieces.append(Piece(whole[at:end].decode(), count))
            at, count = end, 0
    return pieces if at == len(whole) else None


def _is_boundary(whole: bytes, at: int) -> bool:
    """Say whether no character is cut at `at`: the next byte does not continue one."""
    return at == len(whole) or whole[at] & 0xC0 != 0x80


def _token_bytes(entry: _Entry) -> bytes:
    return entry.token.encode() if entry.bytes is None else bytes(entry.bytes)
