"""Values read as servers built on pydantic read them: 1, "true" or "on" where the API documents a boolean.

Not a normaliser: what the client sent goes up as it was spelt. The source of the table is pydantic's documentation of
its lax mode ("Conversion Table": bool from int, float and str).
"""

from typing import Any

_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def lax_bool(value: Any) -> bool | None:
    """Return the boolean that a value is taken for; None when it is refused (and for null)."""
    if isinstance(value, str):
        word = value.lower()
        return word in _TRUE if word in _TRUE or word in _FALSE else None
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None
