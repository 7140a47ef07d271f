"""The engines we know, by name. A new one is one file and one line here."""

from orchard_proxy.engines.base import Engine
from orchard_proxy.engines.llamacpp import LlamaCpp
from orchard_proxy.engines.openai import OpenAi
from orchard_proxy.engines.vllm import Vllm
from orchard_proxy.errors import UsageError

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), LlamaCpp(), OpenAi())}


def get(name: str) -> Engine:
    """Return an engine by name. Raise UsageError for one that does not exist."""
    try:
        return ENGINES[name]
    except KeyError:
        known = ", ".join(sorted(ENGINES))
        raise UsageError(f"There is no engine {name!r}. Use one of: {known}.") from None
