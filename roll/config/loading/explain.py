"""Explanation of validation errors: lines with file, line, key, value and similar known key."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag, ValidationError

from roll.config.base import Config
from roll.config.errors import nearest
from roll.config.loading.layers import Origins
from roll.config.user_code.own import BUILT_IN, OWN, OrOwn, OwnPart

MANY = 8

RENAMED = {"track.wandb_project": "track.trackers: [{kind: wandb, project: NAME}]"}
"""Key of earlier versions -> what took its place."""


def describe(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], origins: Origins
) -> str:
    """Return the problems of a config as text, one line each, in order; after `MANY` only a count.

    Args:
        error: result of validating `data` as `model`.
        origins: place of each key of `data`.
    """
    found: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    items = _of_one_form(found, model, data)
    places = [item["loc"] for item in items]
    lines: list[str] = []
    for item in items:
        # Pydantic also reports a list as too short if its items are wrong, because it does not
        # count them.
        inner = any(p != item["loc"] and p[: len(item["loc"])] == item["loc"] for p in places)
        if not (item["type"] == "too_short" and inner):
            lines += _describe_one(item, model, data, origins)
    lines = list(dict.fromkeys(lines))
    if len(lines) > MANY:
        lines = [*lines[:MANY], f"... and {len(lines) - MANY} more"]
    return "\n".join(lines)


def _of_one_form(
    items: list[dict[str, Any]], model: type[BaseModel], data: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the errors without those about forms of a value that the user did not mean.

    Where a key takes values of several forms, such as a text or a list, Pydantic tells of each form
    why it does not fit. If a value has one of the forms, only what is wrong with that one stays; if
    it has none, one error names all.
    """
    kept: list[dict[str, Any]] = []
    unfit: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for item in items:
        if _locate(item["loc"], model, data).is_form and _form(item) is not None:
            unfit.setdefault(item["loc"][:-1], []).append(item)
        else:
            kept.append(item)
    for loc, forms in unfit.items():
        if not any(item["loc"][: len(loc)] == loc for item in kept):
            names = dict.fromkeys(str(_form(item)) for item in forms)
            kept.append(forms[0] | {"type": "forms", "msg": f"must be {' or '.join(names)}"})
    return kept


def _form(item: Mapping[str, Any]) -> str | None:
    """Return the form that a value would need, of which an error says that it has another one; None
    if the error is about something else."""
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"])
    return FORMS.get(item["type"])


FORMS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""Form that a value must have, by the type of the error if it has another one."""


def _describe_one(
    item: dict[str, Any], model: type[BaseModel], data: Mapping[str, Any], origins: Origins
) -> Iterator[str]:
    """Yield the lines on one validation error: place, key, value, reason and known keys; a check
    may name several problems."""
    place = _locate(item["loc"], model, data)
    keys, owner = place.keys, place.owner
    key = ".".join(keys)
    where = origins.where(key)
    kind, message = item["type"], item["msg"]
    if kind == "extra_forbidden" and key in RENAMED:
        yield f"{where}: {key} = {_short(item['input'])}: now it is `{RENAMED[key]}`"
    elif kind == "extra_forbidden" and owner and keys[-1] in _absent(owner):
        yield f"{where}: {key} = {_short(item['input'])}: {_absent(owner)[keys[-1]]}"
    elif kind == "extra_forbidden":
        known = owner.model_fields if owner else {}
        own = _of_own(owner)
        hint = nearest(keys[-1], known) or ("" if own else _elsewhere(key, model))
        if not hint and known:
            names = sorted(name for name in known if not (own and name == "kind"))
            hint = f" ({'its options' if own else 'known here'}: {', '.join(names)})"
        yield f"{where}: {key} = {_short(item['input'])}: unknown key{own}{hint}"
    elif kind == "missing":
        yield f"{where}: {key}: missing; it must be set"
    elif kind == "value_error" and not keys:
        for problem in str(item["ctx"]["error"]).splitlines():
            named = problem.split(":", 1)[0]
            yield f"{origins.where(named)}: {problem}"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        choices = [c.strip().strip("'") for c in item["ctx"].get("expected_tags", "").split(",")]
        tag = item["ctx"].get("tag")
        if tag is None:
            yield f"{where}: {key}: needs a `kind`"
        else:
            yield (
                f"{origins.where(key + '.kind')}: {key}.kind = {tag!r}: unknown"
                f"{nearest(tag, choices)} (known: {', '.join(choices)}"
                f"{'; or your own, my_module:MyClass' if BUILT_IN in item['loc'] else ''})"
            )
    elif kind in ("model_type", "model_attributes_type"):
        wanted = _class_of(place.annotation, {})
        named = f" with the keys {', '.join(wanted.model_fields)}" if wanted else ""
        yield f"{where}: {key} = {_short(item['input'])}: must be a mapping{named}"
    else:
        message = message.removeprefix("Value error, ")
        if kind == "value_error":
            # The error is about a mapping. Its message begins with the key in the mapping that is
            # wrong, if there is such a key.
            where = origins.where(f"{key}.{message.split(':', 1)[0]}")
        message = _in_words(item) or message[:1].lower() + message[1:]
        yield f"{where}: {key} = {_short(item['input'])}: {message}"


def _in_words(item: Mapping[str, Any]) -> str:
    """Return what is wrong in the words of YAML; empty where those of pydantic, which are of JSON,
    are good enough."""
    kind, value = item["type"], item["input"]
    if kind in ("tuple_type", "list_type"):
        return "must be a list, such as [a, b]"
    if kind == "dict_type":
        return "must be a mapping of keys to values"
    if kind.startswith("datetime"):
        return "must be a date with a time, such as 2030-01-31 18:00"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return f"{FORMS[kind]} without quotes is wanted"
    return ""


_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")


def _absent(owner: type[BaseModel]) -> Mapping[str, str]:
    """Return the keys that a class has on purpose not, with the reason for each."""
    return owner.absent if issubclass(owner, Config) else {}


def _of_own(owner: type[BaseModel] | None) -> str:
    """Return ` of my_module:MyClass` for a class that the user brought; else an empty text."""
    if owner is None or not issubclass(owner, OwnPart):
        return ""
    return f" of {owner.__module__}:{owner.__qualname__}"


def _short(value: Any) -> str:
    """Return the value as Python text, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class _Place:
    """Place of a problem in a config."""

    keys: list[str]
    """Keys as the user wrote them."""
    owner: type[BaseModel] | None
    """Class that the last key belongs to."""
    annotation: Any
    """Type of the value there."""
    is_form: bool
    """True if the problem is about one of several forms that the value may have."""


def _locate(loc: tuple[int | str, ...], model: type[BaseModel], data: Any) -> _Place:
    """Return the place of a problem.

    Pydantic puts the tag of a union (`vllm`), or the type of the form that it tries
    (`tuple[TurnConfig, ...]`), between the keys of a location; they are left out here.
    """
    keys: list[str] = []
    owner: type[BaseModel] | None = model
    annotation: Any = model
    is_form = False
    for part in loc:
        is_form = _names_form(part, annotation, data)
        if (
            part in (BUILT_IN, OWN)
            or _is_tag(part, annotation, data)
            or is_form
            or (isinstance(part, str) and part.endswith("Config") and part not in data)
        ):
            continue
        if isinstance(part, int):
            annotation = _list_in(annotation)
        owner = _class_of(annotation, data)
        keys.append(str(part))
        if owner and part in owner.model_fields:
            field = owner.model_fields[str(part)]
            annotation = field.annotation
            for choice in field.metadata:
                if isinstance(choice, OrOwn | Discriminator):
                    annotation = Annotated[annotation, choice]
        elif owner is None:
            arguments = [a for a in get_args(_strip_none(annotation)) if a is not Ellipsis]
            annotation = arguments[-1] if arguments else None
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = None
    return _Place(keys, owner, annotation, is_form)


def _is_tag(part: int | str, annotation: Any, data: Any) -> bool:
    """Return whether a part of a location is no key but the `kind` of a section, which may be left
    out where there is a usual one."""
    if isinstance(data, dict) and part in data:
        return False
    named = data.get("kind") if isinstance(data, dict) else None
    union = _strip_none(annotation)
    members = get_args(getattr(union, "__origin__", union))
    marks = [mark for member in members for mark in getattr(member, "__metadata__", ())]
    return named == part or any(isinstance(m, Tag) and m.tag == part for m in marks)


def _names_form(part: int | str, annotation: Any, data: Any) -> bool:
    """Return whether a part of a location is no key but one of several types of a value."""
    if not isinstance(part, str) or (isinstance(data, dict) and part in data):
        return False
    return "[" in part or (part in PLAIN_TYPES and len(_members(annotation)) > 1)


PLAIN_TYPES = ("str", "int", "float", "bool", "none")


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union but `None`; of another annotation, itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for each in get_args(annotation) if each is not types.NoneType]
    return [annotation]


def _list_in(annotation: Any) -> Any:
    """Return the type of a list in a union that has one; another annotation unchanged."""
    lists = [each for each in _members(annotation) if get_origin(each) in (tuple, list)]
    return lists[0] if len(lists) == 1 else annotation


def _strip_none(annotation: Any) -> Any:
    """Return the type X of `X | None`; every other annotation unchanged."""
    kept = _members(annotation)
    return kept[0] if len(kept) == 1 else annotation


def _class_of(annotation: Any, data: Any) -> type[BaseModel] | None:
    """Return the config class that `annotation` means for `data`; `kind` selects the class of a
    union. Return None if there is no such class."""
    annotation = _strip_none(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if hasattr(annotation, "__metadata__"):
        for choice in annotation.__metadata__:
            if isinstance(choice, OrOwn) and (own := choice.named_by(data)) is not None:
                return own
            if isinstance(choice, Discriminator) and callable(choice.discriminator):
                return _tagged(annotation.__origin__, choice.discriminator(data))
        return _class_of(annotation.__origin__, data)
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            found = _class_of(member, data)
            if found is None:
                continue
            kind = found.model_fields.get("kind")
            if kind is not None and isinstance(data, dict) and data.get("kind") == kind.default:
                return found
    return None


def _tagged(union: Any, tag: Any) -> type[BaseModel] | None:
    """Return the member of a union that carries the tag; None if none does."""
    for member in get_args(union):
        if any(isinstance(one, Tag) and one.tag == tag for one in member.__metadata__):
            return _class_of(member, None)
    return None


def _elsewhere(key: str, model: type[BaseModel]) -> str:
    """Return a hint with up to two other places in the config where a key of the same name as `key`
    exists; an empty text if there is none, or if a section of another kind has the key itself."""
    name = key.rpartition(".")[2]
    paths = dict.fromkeys(_all_keys(model, ()))
    places = [path for path in paths if path.rpartition(".")[2] == name]
    if not places or key in places:
        return ""
    return f"; a key of this name exists at {' and '.join(places[:2])}"


def _all_keys(model: type[BaseModel], seen: tuple[type[BaseModel], ...]) -> Iterator[str]:
    """Yield the dotted keys of `model`. Classes in `seen`, which contain it, are not entered."""
    for name, field in model.model_fields.items():
        yield name
        for child in _classes_in(field.annotation):
            if child not in seen:
                for key in _all_keys(child, (*seen, model)):
                    yield f"{name}.{key}"


def _classes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every config class that a type annotation contains, also within unions and
    containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes_in(argument)
