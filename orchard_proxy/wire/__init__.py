"""Dialects: bytes and meaning, one file each, plus SSE framing. Pure: no I/O."""
