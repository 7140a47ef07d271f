"""Errors have OpenAI's four members."""

import json

from orchard_proxy.wire import chat


def test_body() -> None:
    assert json.loads(chat.error_body("no", type="invalid_request_error", code="bad", param="n")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "bad"}
    }


def test_event_is_one_line_of_data() -> None:
    event = chat.error_event("a\nb\u2028c", type="upstream_error", code=None)
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
