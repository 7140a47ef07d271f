"""Errors in OpenAI's shape, as a body and as a stream event."""

from orchard_proxy.wire import jsonbytes, sse


def error_body(message: str, *, type: str, code: str | int | None, param: str | None = None) -> bytes:  # noqa: A002 - the API's own word
    """Return `{"error": {message, type, param, code}}`."""
    return jsonbytes.dumps({"error": {"message": message, "type": type, "param": param, "code": code}})


def error_event(message: str, *, type: str, code: str | int | None) -> bytes:  # noqa: A002 - the API's own word
    """Return the error as an event, for a stream whose 200 is already sent."""
    return sse.encode(error_body(message, type=type, code=code))
