"""Text cut at its tokens: the pieces are the text, whole characters, and the first entries in order."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from orchard_proxy.wire.chat_cut import cut


def entries(*tokens: bytes) -> list[Raw]:
    return [entry(token=token.decode("utf-8", "replace"), bytes=list(token)) for token in tokens]


def entry(**members: Any) -> Raw:
    return Raw(json.dumps({"id": 1, "logprob": -0.5, "top_logprobs": [], **members}).encode())


FOX = "🦊".encode()


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("The cat", [b"The", b" cat"], [("The", 1), (" cat", 1)]),
        ("The", [b"The", b""], [("The", 1)]),
        ("The", [b"The", b"<|im_end|>"], [("The", 1)]),
        ("a🦊b", [b"a", FOX[:2], FOX[2:], b"b"], [("a", 1), ("🦊", 2), ("b", 1)]),
        ("a🦊", [b"a" + FOX[:1], FOX[1:3], FOX[3:]], [("a🦊", 3)]),
        ("ab", [b"", b"a", b"", b"b", b""], [("a", 2), ("b", 2)]),
        ("The capital of ", [b"The", b" capital of", b" France"], [("The", 1), (" capital of", 1), (" ", 1)]),
        ("The capital of ", [b"The", b" capital of"], [("The", 1), (" capital of", 1), (" ", 0)]),
        ("Hi", [b"<think>", b"x"], None),
        ("Hi", [], None),
        ("Hi", [b""], None),
        ("Hi", [b"H", b"o"], None),
        ("\ud800", [b"x"], None),
    ],
)
def test_cut(text: str, tokens: list[bytes], expected: list[tuple[str, int]] | None) -> None:
    assert cut(text, entries(*tokens)) == expected


@pytest.mark.parametrize(
    "raw", [b"null", b"5", b'{"bytes":[300]}', b'{"bytes":"x"}', b'{"token":5}', b"{", b'{"logprob":NaN}']
)
def test_odd_entries_cut_nothing(raw: bytes) -> None:
    assert cut("Hi", [Raw(raw)]) is None


def test_without_bytes_the_token_text_counts() -> None:
    assert cut("Hi you", [entry(token="Hi"), entry(token=" you", bytes=None)]) == [("Hi", 1), (" you", 1)]


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.lists(st.integers(0, 40), max_size=8), st.data())
@settings(deadline=None)
def test_any_cut_of_the_bytes(text: str, cuts: list[int], data: st.DataObject) -> None:
    whole = text.encode()
    bounds = [0, *sorted(min(c, len(whole)) for c in cuts), len(whole)]
    tokens = [whole[a:b] for a, b in itertools.pairwise(bounds)]
    after = data.draw(st.lists(st.sampled_from([b"", b"<eos>"]), max_size=2))
    pieces = cut(text, entries(*tokens, *after))
    assert pieces is not None
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)
    at = 0
    for piece in pieces:
        assert b"".join(tokens[at : at + piece.entries]) == piece.text.encode()
        at += piece.entries
