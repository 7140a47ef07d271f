"""Tool calls from fragments: two ids are two calls, whatever the indexes say."""

from typing import Any

import pytest

from orchard_proxy.wire.chat_tools import ToolCallFold


def f(index: int | None, id_: str | None = None, name: str | None = None, args: Any = None) -> dict[str, Any]:
    function = {k: v for k, v in (("name", name), ("arguments", args)) if v is not None}
    out: dict[str, Any] = {"function": function}
    if index is not None:
        out["index"] = index
    if id_ is not None:
        out |= {"id": id_, "type": "function"}
    return out


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        pytest.param(
            [f(0, "a", "x", ""), f(0, args='{"k"'), f(0, args=":1}")], [("a", "x", '{"k":1}')], id="one call in pieces"
        ),
        pytest.param(
            [f(0, "a", "x", "{"), f(1, "b", "y", "["), f(0, args="}"), f(1, args="]")],
            [("a", "x", "{}"), ("b", "y", "[]")],
            id="parallel, interleaved",
        ),
        pytest.param(
            [f(0, "a", "x", "{"), f(0, args="}"), f(0, "b", "x", "["), f(0, args="]")],
            [("a", "x", "{}"), ("b", "x", "[]")],
            id="two ids on one index",
        ),
        pytest.param(
            [f(0, "a", "x", "{"), f(0, "b", "y", "["), f(0, "a", args="}"), f(0, "b", args="]")],
            [("a", "x", "{}"), ("b", "y", "[]")],
            id="two ids on one index, interleaved by id",
        ),
        pytest.param(
            [f(0, "a", "x", "{"), f(0, "a", "x", "}")], [("a", "x", "{}")], id="id and name repeated in each fragment"
        ),
        pytest.param([f(1, "b", "y", "1"), f(0, "a", "x", "2")], [("a", "x", "2"), ("b", "y", "1")], id="index order"),
        pytest.param(
            [f(None, "a", "x", "1"), f(None, "b", "y", "2")], [("a", "x", "1"), ("b", "y", "2")], id="no index"
        ),
        pytest.param([f(None, "a", "x", "{"), f(None, args="}")], [("a", "x", "{}")], id="no index, continued"),
        pytest.param(
            [f(0, None, "x", "{}"), f(0, None, "y", "{}")], [(None, "x", "{}"), (None, "y", "{}")], id="no ids"
        ),
        pytest.param(
            [f(0, None, "x", "{}"), f(0, None, "x", "{}")],
            [(None, "x", "{}"), (None, "x", "{}")],
            id="no ids, one name",
        ),
        pytest.param([f(0, None, "x"), f(0, "a", args="{}")], [("a", "x", "{}")], id="id comes late"),
        pytest.param([f(0, "a", "get_"), f(0, None, "weather")], [("a", "get_weather", "")], id="name in pieces"),
        pytest.param([f(0, "", "x", "{}"), f(0, "", args="")], [(None, "x", "{}")], id="empty ids"),
        pytest.param([f(0, "a", "x", {"k": 1})], [("a", "x", '{"k":1}')], id="arguments as an object"),
        pytest.param([{"index": "0", "id": 5, "function": "x"}], [(None, "", "")], id="nonsense"),
    ],
)
def test_merge(fragments: list[dict[str, Any]], expected: list[tuple[str | None, str, str]]) -> None:
    fold = ToolCallFold()
    for fragment in fragments:
        fold.add(fragment)
    got = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in fold.calls()]
    assert got == expected
    assert {c["type"] for c in fold.calls()} == {"function"}
