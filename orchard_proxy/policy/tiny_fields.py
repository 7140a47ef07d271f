"""Typed reading of request bodies, with vLLM's (pydantic's) errors for what cannot be read.

Not the meaning of any route: that is tiny_request. Null counts as absent, as in vLLM; lax where pydantic is lax
("5" is an integer, 1 is true).
"""

import json
from typing import Any

import msgspec

from orchard_proxy.errors import OrchardError

_BOOLS = {"true": True, "1": True, "on": True, "t": True, "y": True, "yes": True}
_BOOLS |= {"false": False, "0": False, "off": False, "f": False, "n": False, "no": False}


class RequestError(OrchardError):
    """The request is refused with this status, in vLLM's error shape."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error as vLLM prints it."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status},
        }


def refused(message: str, param: str, value: Any = msgspec.UNSET) -> RequestError:
    """Return the error for a parameter whose value cannot be served."""
    shown = "" if value is msgspec.UNSET else f", value={value}"
    return RequestError(f"{message} (parameter={param}{shown})", param=param)


def invalid(kind: str, where: str, message: str, value: Any) -> RequestError:
    """Return the error for a body that has the wrong form, worded as pydantic's."""
    detail = {"type": kind, "loc": where, "msg": message, "input": value}
    return RequestError(f"1 validation error:\n  {detail}", kind="Bad Request", param=where)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request body."""
    try:
        value = json.loads(body)
    except ValueError as error:
        position = getattr(error, "pos", 0)
        raise invalid("json_invalid", f"body.{position}", "JSON decode error", {}) from error
    except RecursionError as error:
        raise invalid("json_invalid", "body.0", "JSON decode error", {}) from error
    if not isinstance(value, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary", value)
    return value


class Fields:
    """Read members of a JSON object by name and type."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, float) and value in (0, 1):
            value = int(value)
        read = _BOOLS.get(str(value).lower()) if isinstance(value, str | int) else None
        if read is None:
            message = "Input should be a valid boolean, unable to interpret input"
            raise invalid("bool_parsing", f"body.{name}", message, value)
        return read

    def integer(self, name: str) -> int | None:
        """Return an integer, or None when absent."""
        value = self.body.get(name)
        if value is None:
            return None
        try:
            if isinstance(value, str | int) or (isinstance(value, float) and value.is_integer()):
                return int(value)
        except ValueError:
            pass
        raise invalid("int_parsing", f"body.{name}", "Input should be a valid integer", value)

    def number(self, name: str, default: float) -> float:
        """Return a float."""
        value = self.body.get(name)
        if value is None:
            return default
        try:
            if isinstance(value, str | int | float):
                return float(value)
        except (ValueError, OverflowError):
            pass
        raise invalid("float_parsing", f"body.{name}", "Input should be a valid number", value)

    def string(self, name: str) -> str | None:
        """Return a string, or None when absent."""
        value = self.body.get(name)
        if value is None or isinstance(value, str):
            return value
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; one string counts as a list of one."""
        value = self.body.get(name)
        if isinstance(value, str):
            return (value,)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise invalid("list_type", f"body.{name}", "Input should be a valid list of strings", value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers."""
        value = self.body.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(is_int(item) for item in value):
            return tuple(value)
        raise invalid("list_type", f"body.{name}", "Input should be a valid list of integers", value)

    def object(self, name: str) -> dict[str, Any]:
        """Return an object; empty when absent."""
        value = self.body.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise invalid("dict_type", f"body.{name}", "Input should be a valid dictionary", value)

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        """Return a list of objects, or None when absent."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return value
        raise invalid("list_type", f"body.{name}", "Input should be a valid list of objects", value)


def is_int(value: Any) -> bool:
    """Say whether a JSON value is an integer (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)
