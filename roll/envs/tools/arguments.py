"""Arguments that a format writes as text, converted by the schema of the tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.envs.tools.formats.api import Call, loads


def typed_arguments(call: Call, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, each text read as JSON unless the schema allows a text.

    Only formats that write every argument as text need this. A text that is no JSON stays as it is.
    Whether a value has the type that the schema wants is not checked.
    """
    if call.typed:
        return dict(call.arguments)
    found = schema.get("properties")
    properties = found if isinstance(found, Mapping) else {}
    return {
        key: value if _may_be_text(properties.get(key, {})) else _value(value)
        for key, value in call.arguments.items()
    }


def _may_be_text(schema: Any) -> bool:
    """Return whether a parameter's JSON schema allows text. An empty schema does not; one that is
    no mapping does."""
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else _listed(kind)
    if "string" in kinds or any(isinstance(each, str) for each in _listed(schema.get("enum"))):
        return True
    return any(
        _may_be_text(each) and each
        for key in ("anyOf", "oneOf")
        for each in _listed(schema.get(key))
    )


def _listed(value: Any) -> Sequence[Any]:
    """Return a list as it is, and nothing for what is none: schemas come from outside."""
    return value if isinstance(value, list | tuple) else ()


def _value(text: Any) -> Any:
    """Return the JSON value that a text holds; unchanged if it is no JSON, or no text."""
    try:
        return loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
