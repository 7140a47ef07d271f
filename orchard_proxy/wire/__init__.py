"""Formats on the wire: SSE framing, JSON edited by bytes, the dialects. Bytes in, bytes out; no I/O."""
