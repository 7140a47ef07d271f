"""Templates of a manifest: `{name}` stands for a value, and nothing else does.

Not a template language: no conditions, no loops, one pass. A value is never looked at again, so a prompt that contains
`{api_key}` stays as it is. Braces that hold no plain name stay too, so that JSON and shell text can be written as they
are; `{{name}}` is the text `{name}`.
"""

import re
from collections.abc import Mapping

import msgspec

_PLACE = re.compile(r"\{\{(?P<kept>[a-z_]+(?::[a-z]+)?)\}\}|\{(?P<name>[a-z_]+)(?::(?P<form>[a-z]+))?\}")


def _shell(value: str) -> str:
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _json(value: str) -> str:
    return msgspec.json.encode(value).decode()


FORMS = {"json": _json, "shell": _shell}
"""`{name:form}`: the value as a JSON (and TOML) string with its quotes, or as one quoted word of a shell command."""


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put the values in. Every name of the text must be among them: `problems` tells beforehand."""
    return _PLACE.sub(lambda place: _value(place, values), text)


def problems(text: str, names: frozenset[str]) -> list[str]:
    """Say what is wrong with a template that may use these names."""
    found = []
    for place in _PLACE.finditer(text):
        name, form = place["name"], place["form"]
        if name is not None and name not in names:
            found.append(f"{{{name}}} is no placeholder (there are {listed(names)}); the text itself is {{{{{name}}}}}")
        elif form is not None and form not in FORMS:
            found.append(f"{place[0]} has no form `{form}` (there are {listed(FORMS)})")
    return found


def listed(names: Mapping[str, object] | frozenset[str]) -> str:
    """Return names for an error message, in a stable order."""
    return ", ".join(sorted(names))


def _value(place: re.Match[str], values: Mapping[str, str]) -> str:
    if place["kept"] is not None:
        return "{" + place["kept"] + "}"
    value = values[place["name"]]
    return FORMS[place["form"]](value) if place["form"] else value
