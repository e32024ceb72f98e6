"""One key of a run file in plain words: its type, its unit, its default and its meaning."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll.config.user_code.own import OrOwn

SCALARS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    datetime: "date and time",
    Any: "any value",
}
UNITS_OF_NAMES = (
    (r".*_s$", "seconds"),
    (r".*_gb$", "GiB"),
    (r".*_tflops$", "TFLOP/s"),
    (r".*_mb$", "MiB"),
    (r"(.*_)?tokens(_per_\w+)?$|max_model_len$", "tokens"),
    (r"(.*_)?token_ids$", "token ids"),
    (r"(.*_)?pixels$", "pixels"),
    (r"(.*_)?elements$", "elements"),
    (r"(.*_)?steps$", "steps"),
    (r"(.*_)?epochs$", "passes"),
)
"""Pattern of a key -> its unit."""
UNIT_IN_TEXT = re.compile(r"\bin (seconds|tokens|pixels|characters|GiB|MiB|nats)\b")
COUNT = re.compile(
    r"(?:[Nn]umber|[Cc]opies|[Rr]ange) of "
    r"(?:these |the |likeliest |newest |best |last |tried |\w+'s )*"
    r"([a-z][\w-]*)"
)
"""Text that begins a description of something that is counted; the group is what is counted."""
SIZE = re.compile(r"(Tensor|Pipeline) parallel size")
PURE = {
    "a share": r"Share|Largest share|Chance|Probability mass|Dropout probability|Range within 0",
    "a factor": r"Factors?|Weights? of|Divisor|Scale|Strength|Smallest weight|Largest weight|"
    r"Steepness|Reward lost per nat",
    "units of the reward": r"Reward|(Smallest|Largest) (mean )?reward|Mean reward|Total reward|"
    r"Scores?|Largest penalty, in units|Largest distance of a value",
    "a pure number": r"Lambda|Discount|Lower bound|Upper bound|Smallest ratio|Largest ratio|Rank\b|"
    r"Sampling temperature|Inverse temperature|Margin|Peak learning rate|Decoupled weight decay|"
    r"Decay rates|Largest global norm|Largest loss|Largest absolute|Numbers? added|"
    r"Number subtracted|Number that|Exponent|Largest root mean square|"
    r"Value (above|below)|Replaces|Seed|First of these seeds|Recent pass rate|Mean of these",
    "a port": r"Port\b",
    "steps": r"Steps? (to|after)",
    "ranks": r"Ranks of",
    "a price": r"Price of",
}
"""What a number is that has no unit -> how its description begins."""


def type_of(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """Return the type of a value, and its limits, in words."""
    if get_origin(annotation) is typing.Annotated:
        inner, *more = get_args(annotation)
        return type_of(inner, [*more, *metadata])
    return " ".join([_plain(annotation), *_limits(metadata)])


def _plain(annotation: Any) -> str:
    """Return the type of a value in words, without its limits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in SCALARS:
        return SCALARS[annotation]
    if annotation is types.NoneType:
        return "`null`"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(f"`{one.value}`" for one in annotation)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(literal, arguments))
    if origin in (Union, types.UnionType):
        if all(classes_in(one) for one in arguments if one is not types.NoneType):
            null = " or `null`" if types.NoneType in arguments else ""
            return "section" + null
        return " or ".join(type_of(one) for one in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return "list [" + ", ".join(type_of(one) for one in arguments) + "]"
    if origin in (tuple, list, frozenset):
        return f"list of {_many(type_of(arguments[0]))}"
    if origin is dict:
        names = "names" if arguments[0] is str else _many(type_of(arguments[0]))
        return f"mapping of {names} to {_many(type_of(arguments[1]))}"
    if classes_in(annotation):
        return "section"
    raise TypeError(f"no words for the type {annotation}")


def _many(words: str) -> str:
    """Return the words for several values of a type."""
    known = {"section": "sections", "text": "texts", "any value": "any values"}
    known |= {"integer": "integers", "number": "numbers"}
    first, *rest = words.split(" ", 1)
    return known.get(words) or " ".join([known.get(first, first), *rest])


def _limits(metadata: tuple[Any, ...] | list[Any]) -> Iterator[str]:
    """Yield what limits a value: `>= 1`, `at least 1 entry`."""
    for one in metadata:
        match one:
            case limits.Ge():
                yield f"≥ {one.ge}"
            case limits.Gt():
                yield f"> {one.gt}"
            case limits.Le():
                yield f"≤ {one.le}"
            case limits.Lt():
                yield f"< {one.lt}"
            case limits.MinLen():
                yield f"(at least {one.min_length})" if one.min_length > 1 else "(not empty)"
            case limits.MaxLen():
                yield f"(at most {one.max_length})"
            case _ if isinstance(getattr(one, "pattern", None), str):
                yield f"of the form `{one.pattern}`"


def literal(value: Any) -> str:
    """Return a value as it stands in a run file, as code."""
    return (
        f"`{json.dumps(value, ensure_ascii=False)}`" if not isinstance(value, str) else f"`{value}`"
    )


def classes_in(annotation: Any) -> list[type[BaseModel]]:
    """Return every config class that a type contains, in order, each once."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = [each for one in get_args(annotation) for each in classes_in(one)]
    return list(dict.fromkeys(found))


def takes_own(field: FieldInfo) -> bool:
    """Return whether a class of the user's may stand in for the built-in choices."""

    def inside(annotation: Any) -> bool:
        return isinstance(annotation, OrOwn) or any(map(inside, _parts(annotation)))

    return any(map(inside, field.metadata)) or inside(field.annotation)


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Return what a type is made of, its metadata included."""
    return (*get_args(annotation), *getattr(annotation, "__metadata__", ()))


def is_number(annotation: Any) -> bool:
    """Return whether a value is a number, or a list or mapping of numbers."""
    if annotation in (int, float):
        return True
    if isinstance(annotation, type) or get_origin(annotation) is Literal:
        return False
    return any(map(is_number, get_args(annotation)))


def unit_of(name: str, meaning: str) -> str | None:
    """Return the unit of a number, by its key or its description; None if neither says it."""
    for pattern, unit in UNITS_OF_NAMES:
        if re.fullmatch(pattern, name):
            return unit
    for unit, beginning in PURE.items():
        if re.match(beginning, meaning):
            return unit
    first = meaning.split(". ", 1)[0]
    if found := UNIT_IN_TEXT.search(first):
        return found[1]
    if found := re.match(f"(?:Largest |Smallest )?{COUNT.pattern}", meaning):
        return found[1]
    return "ranks" if SIZE.match(meaning) else None


def meaning_of(model: type[BaseModel], name: str) -> str:
    """Return what a key means: its own description, that of a base, or that of the section that
    stands there; empty if there is none."""
    for base in model.__mro__:
        field = getattr(base, "__pydantic_fields__", {}).get(name)
        if field is not None and field.description:
            return one_line(field.description)
    sections = classes_in(model.model_fields[name].annotation)
    annotation = model.model_fields[name].annotation
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return one_line(inspect.getdoc(annotation) or "")
    return one_line((sections[0].__doc__ or "").split("\n\n")[0]) if len(sections) == 1 else ""


def default_of(field: FieldInfo) -> str:
    """Return the default of a key, as it stands in a run file; `required` if it has none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        raise TypeError("a default that only the other keys tell")
    return shown(value)


def shown(value: Any) -> str:
    """Return a value as code; a section by its `kind`."""
    match value:
        case BaseModel():
            kind = getattr(value, "kind", None)
            return f"`{kind}`" if kind else "its own defaults"
        case enum.Enum():
            return f"`{value.value}`"
        case ():
            return "`[]`"
        case tuple() if isinstance(value[0], BaseModel):
            return ", ".join(map(shown, value))
        case tuple():
            return literal(list(value))
        case _:
            return literal(value)


def one_line(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("||", "to").replace("|", "\\|")
