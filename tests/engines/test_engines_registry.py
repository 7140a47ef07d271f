import pytest

from orchard_proxy.engines.registry import ENGINES, get
from orchard_proxy.errors import UsageError


def test_engines_are_known_by_their_names():
    assert {name: engine.name for name, engine in ENGINES.items()} == {n: n for n in ("vllm", "llamacpp", "openai")}


def test_an_unknown_engine_is_a_usage_error():
    with pytest.raises(UsageError, match="llamacpp, openai, vllm"):
        get("nope")
