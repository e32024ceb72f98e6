"""Spaces of gymnasium as text: observations that a policy reads, actions that it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import AdapterError

MAX_NUMBERS = 400
"""Largest number of numbers in an observation or an action that is shown as text."""
MAX_DIGITS = 1000
"""Longest number that is read."""
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class InvalidActionError(Exception):
    """The text of a turn has no action of the space; the message says what one looks like."""


@dataclass(frozen=True)
class Actions:
    """Actions of a space."""

    wanted: str
    """Description of an action, which ends the sentence "Answer with ..."."""
    read: Callable[[str], Any]
    """Function that returns the action in a text; it raises InvalidActionError if there is none."""


def check_observations(space: Any) -> None:
    """Raise AdapterError for a space whose values are no use as text, such as pictures."""
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        inner = space.spaces.values() if kind == "Dict" else space.spaces
        for each in inner:
            check_observations(each)
    elif kind in ("Box", "MultiBinary", "MultiDiscrete"):
        count = 1
        for size in space.shape:
            count *= size
        if count > MAX_NUMBERS:
            raise AdapterError(
                f"its observations have {count} numbers, more than the {MAX_NUMBERS} that are "
                "shown as text; name a wrapper that makes text of them (adapter: {wrappers: "
                "['my_module:MyWrapper']})"
            )
    elif kind not in ("Text", "Discrete", "Sequence", "OneOf"):
        raise AdapterError(f"observations of the space {kind} cannot be shown as text")


def shown(value: Any) -> str:
    """Return an observation as text: a text as it is, numbers with at most four digits behind the
    point, one line for each key of a dict."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {shown(each)}" for key, each in value.items())
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        if value and isinstance(value[0], (tuple, list)):
            return "\n".join(shown(each) for each in value)
        return "[" + ", ".join(shown(each) for each in value) + "]"
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return str(value)


def actions_of(
    space: Any, names: Sequence[str] | None, pattern: str | None, to_array: Callable[..., Any]
) -> Actions:
    """Return how actions of a space are written.

    Args:
        space: action space of the environment.
        names: names of the actions of a Discrete space, in order; None for numbers.
        pattern: regular expression with one group, which holds the action; its last match counts.
            None: the whole text is looked at.
        to_array: numpy's `array`.

    Raises:
        AdapterError: the space has no actions that a text can hold, or the names do not fit.
    """
    kind = type(space).__name__
    if names is not None and kind != "Discrete":
        raise AdapterError(f"adapter.actions: names are for Discrete actions; these are {kind}")
    if kind == "Discrete":
        actions = _numbers_of(space) if names is None else _names_of(space, names)
    elif kind == "Text":
        actions = _text_of(space)
    elif kind in ("MultiDiscrete", "MultiBinary", "Box") or _is_discrete_tuple(space):
        actions = _arrays_of(space, to_array)
    else:
        raise AdapterError(
            f"actions of the space {kind} cannot be written as text; name a wrapper that takes "
            "text or numbers (adapter: {wrappers: ['my_module:MyWrapper']})"
        )
    return actions if pattern is None else _inside(actions, pattern)


def _is_discrete_tuple(space: Any) -> bool:
    return type(space).__name__ == "Tuple" and all(
        type(each).__name__ == "Discrete" for each in space.spaces
    )


def _numbers_of(space: Any) -> Actions:
    """Return actions of a Discrete space by number. The last whole number of a text counts."""
    first, last = int(space.start), int(space.start) + int(space.n) - 1
    wanted = f"one number from {first} to {last}"

    def read(text: str) -> Any:
        found = re.findall(r"(?<![\w.])-?\d+(?!\w|\.\d)", text)
        # Python refuses to read numbers of thousands of digits.
        number = int(found[-1]) if found and len(found[-1]) < MAX_DIGITS else last + 1
        if not first <= number <= last:
            raise InvalidActionError(wanted)
        return number

    return Actions(wanted, read)


def _names_of(space: Any, names: Sequence[str]) -> Actions:
    """Return actions of a Discrete space by name. The last name of a text counts.

    AdapterError unless there is one name for each action, all different.
    """
    if len(names) != space.n or len({name.lower() for name in names}) != len(names):
        raise AdapterError(
            f"adapter.actions: found {len(names)} names ({', '.join(names)}); the environment has "
            f"{space.n} actions, which need different names"
        )
    places = {name.lower(): int(space.start) + place for place, name in enumerate(names)}
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    word = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    wanted = f"one of: {', '.join(names)}"

    def read(text: str) -> Any:
        found = word.findall(text)
        if not found:
            raise InvalidActionError(wanted)
        return places[found[-1].lower()]

    return Actions(wanted, read)


def _text_of(space: Any) -> Actions:
    """Return actions of a Text space: the whole text, without spaces at its ends if only so it
    belongs to the space."""
    wanted = f"a text of {space.min_length} to {space.max_length} characters"
    if len(space.character_set) <= 64:
        wanted += f" of {''.join(sorted(space.character_set))!r}"

    def read(text: str) -> Any:
        for one in (text, text.strip()):
            if space.contains(one):
                return one
        raise InvalidActionError(wanted)

    return Actions(wanted, read)


def _arrays_of(space: Any, to_array: Callable[..., Any]) -> Actions:
    """Return actions of several numbers: the last ones of a text, as many as an action has.

    AdapterError if an action has more than `MAX_NUMBERS`.
    """
    several = type(space).__name__ == "Tuple"
    shape = (len(space.spaces),) if several else tuple(space.shape)
    count = 1
    for size in shape:
        count *= size
    if count > MAX_NUMBERS:
        raise AdapterError(f"its actions have {count} numbers, more than {MAX_NUMBERS}")
    whole = several or space.dtype.kind in "iub"
    wanted = f"{count} {'whole ' if whole else ''}numbers{_range_of(space)}"

    def read(text: str) -> Any:
        """Return the action of the last numbers in a text; InvalidActionError if they are too few
        or not in the space."""
        found = NUMBER.findall(text)[-count:]
        try:
            numbers = [int(each) if whole else float(each) for each in found]
            if len(numbers) != count:
                raise ValueError
            action = tuple(numbers) if several else to_array(numbers, space.dtype).reshape(shape)
        except (ValueError, OverflowError):
            raise InvalidActionError(wanted) from None
        if not space.contains(action):
            raise InvalidActionError(wanted)
        return action

    return Actions(wanted, read)


def _range_of(space: Any) -> str:
    """Return the smallest and the largest values of the numbers of an action, as text."""
    kind = type(space).__name__
    if kind == "MultiBinary":
        return ", each 0 or 1"
    if kind == "Box":
        return f" from {shown(space.low)} to {shown(space.high)}"
    if kind == "Tuple":
        low = [int(each.start) for each in space.spaces]
        high = [int(each.start) + int(each.n) - 1 for each in space.spaces]
    else:
        low = space.start.tolist()
        high = (space.start + space.nvec - 1).tolist()
    return f" from {shown(low)} to {shown(high)}"


def _inside(actions: Actions, pattern: str) -> Actions:
    """Return the same actions, read in the last match of a pattern alone.

    AdapterError unless the pattern is valid and has one group.
    """
    try:
        found = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise AdapterError(f"adapter.pattern: {pattern!r} is no pattern: {error}") from None
    if found.groups != 1:
        raise AdapterError(f"adapter.pattern: {pattern!r} must have one group, has {found.groups}")
    wanted = f"{actions.wanted}; inside of {pattern}"

    def read(text: str) -> Any:
        matches = found.findall(text)
        if not matches:
            raise InvalidActionError(wanted)
        return actions.read(matches[-1])

    return Actions(wanted, read)
