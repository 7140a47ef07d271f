import json

import pytest

from orchard_proxy.engines.lax import lax_bool
from orchard_proxy.engines.registry import ENGINES
from orchard_proxy.policy.tiny_fields import Fields, RequestError
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.wire import chat

VALUES = [
    *(True, False, None, 0, 1, 2, -1, 0.0, 1.0, 0.5, float("nan"), 2**70, [], {}, [1]),
    *("true", "TRUE", "t", "y", "Yes", "on", "1", "false", "f", "N", "no", "OFF", "0", "", "x", "2", " true", "1.0"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_it_is_what_the_tiny_policy_takes_it_for(value):
    try:
        taken = Fields({"x": value}).boolean("x") if value is not None else None
    except RequestError:
        taken = None
    assert lax_bool(value) is taken


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("mode", list(UpstreamStream))
@pytest.mark.parametrize("messages", [..., None, "hi", {}, 5, True], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_messages_fails_in_the_engines_own_words(name, mode, messages, stream):
    asked = {"model": "m", "stream": stream} | ({} if messages is ... else {"messages": messages})
    request = chat.decode(json.dumps(asked).encode())
    prepared = ENGINES[name].prepare(request, mode)
    assert (prepared.body, prepared.edits) == (request.body, [])
    assert list(ENGINES[name].side(request)) == []
