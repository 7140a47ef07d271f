import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.policy.tiny_tokenizer import END_ID, MARKER_IDS, SPECIAL_IDS, START_ID, Detokenizer, TinyTokenizer

TOKENIZER = TinyTokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MARKED = st.lists(st.one_of(TEXT, st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "\n", "\r\n", "  "])))


@given(MARKED.map("".join))
@settings(max_examples=500)
def test_any_unicode_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(MARKED.map("".join), MARKED.map("".join))
@settings(max_examples=500)
def test_a_text_may_be_cut_after_a_line_feed(before, after):
    assert TOKENIZER.encode(before + "\n" + after) == TOKENIZER.encode(before + "\n") + TOKENIZER.encode(after)


@given(st.lists(st.integers(len(SPECIAL_IDS), TOKENIZER.vocab_size - 1)))
def test_streamed_text_is_the_whole_text(ids):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids]
    given_bytes = b"".join(data for _, data in pieces)
    assert b"".join(TOKENIZER.token_bytes(i) for i in ids).startswith(given_bytes)
    assert "".join(text for text, _ in pieces) == given_bytes.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_and_comes_whole():
    ids = TOKENIZER.encode(" 🦊")
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids]
    assert len(ids) > 2
    assert "".join(text for text, _ in pieces[:-1]).strip() == ""
    assert pieces[-1][0].endswith("🦊")


def test_a_special_id_within_a_character_is_its_own_text():
    detokenizer = Detokenizer(TOKENIZER)
    first, *rest = TOKENIZER.encode("漢")
    texts = [detokenizer.push(token)[0] for token in (first, END_ID, *rest)]
    assert "".join(texts) == "<|im_end|>漢"


def test_markers_are_single_tokens_and_only_three_are_special():
    markers = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    ids = [TOKENIZER.encode(marker) for marker in markers]
    assert all(len(found) == 1 and found[0] in MARKER_IDS for found in ids)
    assert ids[:2] == [[START_ID], [END_ID]]
    assert TOKENIZER.decode(TOKENIZER.encode("<|im_start|>a<tool_call>"), special=False) == "a<tool_call>"
    assert SPECIAL_IDS < MARKER_IDS


def test_a_lone_surrogate_is_refused():
    with pytest.raises(UnicodeEncodeError):
        TOKENIZER.encode("\ud800")


def test_the_shipped_file_is_small():
    assert TOKENIZER.vocab_size == 2048
    assert len({TOKENIZER.token_bytes(i) for i in range(2048)}) == 2048
