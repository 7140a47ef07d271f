"""The tiny policy's tokenizer: byte-level BPE with 2048 tokens, from data/tiny_tokenizer.json (ships with the package).

Not a chat template: that is tiny_template. Invariants: `decode(encode(text), special=True) == text` for any Unicode
text; a line feed is always a token of its own, so a text may be cut after one and encoded in two parts with the same
result, which is what makes one turn's ids a prefix of the next turn's prompt.
"""

import codecs
from importlib import resources

from tokenizers import Tokenizer, pre_tokenizers

START_ID = 1
END_ID = 2
SPECIAL_IDS = frozenset({0, START_ID, END_ID})
MARKER_IDS = frozenset(range(9))


class TinyTokenizer:
    """Text to ids and back. Thread-safe: encoding changes nothing."""

    def __init__(self) -> None:
        data = resources.files("orchard_proxy.policy").joinpath("data/tiny_tokenizer.json").read_bytes()
        self._tokenizer = Tokenizer.from_buffer(data)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        # ByteLevel spells each byte as one printable character; the table turns token strings back into bytes.
        byte_of = _byte_alphabet()
        self._strings = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]
        self._bytes = [
            s.encode() if i in MARKER_IDS else bytes(byte_of[c] for c in s) for i, s in enumerate(self._strings)
        ]

    def encode(self, text: str) -> list[int]:
        """Return the ids of any text; markers such as <|im_end|> in it become their ids. Raise on lone surrogates."""
        text.encode()  # UnicodeEncodeError here is clearer than what the tokenizer would raise
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], *, special: bool = True) -> str:
        """Return the text of ids. `special=False` leaves <|im_start|> and its kind out. Bad UTF-8 becomes U+FFFD."""
        kept = ids if special else [i for i in ids if i not in SPECIAL_IDS]
        return b"".join(self._bytes[i] for i in kept).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self._bytes[token]

    def token_string(self, token: int) -> str:
        """Return the token as the vocabulary spells it, e.g. "Ġthe"."""
        return self._strings[token]

    def rare_ids(self) -> list[int]:
        """Return ids that an untrained model should seldom say: markers and bytes that are no text by themselves."""
        lone = [i for i, b in enumerate(self._bytes) if len(b) == 1 and not (b == b"\n" or 0x20 <= b[0] < 0x7F)]
        return sorted(MARKER_IDS | set(lone))


class Detokenizer:
    """Turn ids into text one by one. Text of an unfinished character is held back and comes with its last id."""

    def __init__(self, tokenizer: TinyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = b""

    def push(self, token: int) -> tuple[str, bytes]:
        """Return (text, bytes) of what `token` completes: ("", b"") while a character is unfinished.

        A special id is its own text and does not end the character.
        """
        if token in SPECIAL_IDS:
            data = self._tokenizer.token_bytes(token)
            return data.decode(), data
        data = self._held + self._tokenizer.token_bytes(token)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if decoder.getstate()[0]:
            self._held = data
            return "", b""
        self._held = b""
        return text, data


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's table: printable Latin-1 bytes spell themselves, the others take code points from 256 on, in byte order.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    table = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("the tokenizers package spells bytes in another way: pin tokenizers>=0.23")
    return table
