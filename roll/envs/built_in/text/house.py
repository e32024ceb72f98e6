"""`house`: a task in a house that is told in words, with the commands of ALFWorld."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from roll.envs.built_in.text.rooms import (
    CLOSED,
    KINDS,
    LAMP,
    STATIONS,
    House,
    Task,
    into,
    kind_of,
    make_house,
)

YOU = "you"
"""Place of the object that is held."""
NOTHING = "Nothing happens."
_THING = r"([a-z]+ [0-9]{1,3})"
GO = re.compile(rf"(?:go|walk) to (?:the )?{_THING}")
TAKE = re.compile(rf"take (?:the )?{_THING} from (?:the )?{_THING}")
PUT = re.compile(rf"(?:put|move) (?:the )?{_THING} (?:in/on|in|on|to) (?:the )?{_THING}")
OPEN = re.compile(rf"open (?:the )?{_THING}")
CLOSE = re.compile(rf"close (?:the )?{_THING}")
TREAT = re.compile(rf"(heat|cool|clean) (?:the )?{_THING} with (?:the )?{_THING}")
USE = re.compile(rf"use (?:the )?{_THING}")
INVENTORY = re.compile(r"inventory")
LOOK = re.compile(r"look")


class TextHouse:
    """House with furniture and objects. The last line of a turn that is a command counts: `go to
    cabinet 1`, `open cabinet 1`, `close ...`, `take mug 1 from cabinet 1`, `put mug 1 on desk 1`,
    `heat mug 1 with microwave 1`, `cool ... with fridge 1`, `clean ... with sinkbasin 1`, `use
    desklamp 1`, `look`, `inventory`.

    The reward is 1 when the task is done, 0 before. House and task follow from the seed; every task
    can be done. A command that is not possible is answered `Nothing happens.`

    Args:
        tasks: kinds of tasks: `place`, `heat`, `cool`, `clean`, `look` (under a lamp), `two`.
        objects: number of objects besides those of the task.
        rules: explain the commands in the first observation.
    """

    def __init__(self, tasks: Sequence[str] = KINDS, objects: int = 8, rules: bool = True) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        unknown = [each for each in tasks if each not in KINDS]
        if unknown or not tasks or objects < 0:
            raise ValueError(
                f"tasks = {list(tasks)} must be some of {', '.join(KINDS)}, objects = {objects} at "
                "least 0"
            )
        self.tasks = tuple(tasks)
        self.objects = objects
        self.rules = rules
        self._invalid = 0
        self._at = ""
        self._done = False
        self._lit = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        made = make_house(random.Random(seed), self.tasks, self.objects)
        self._house: House = made[0]
        self._task: Task = made[1]
        rules = (
            "Commands: go to A, open A, close A, take B from A, put B in/on A, heat B with "
            "microwave 1, cool B with fridge 1, clean B with sinkbasin 1, use B, look, inventory. "
            "You can hold one thing. Answer with one command, such as: go to desk 1\n"
        )
        around = f"You are in a room with {_listed(self._house.furniture)}."
        task = f"Your task: {self._task.told()}."
        return (rules if self.rules else "") + f"{around}\n{task}", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._done:
            return NOTHING, 1.0, True, False, self._info()
        command = self._command(action)
        if command is None:
            self._invalid += 1
            return "That is no command.", 0.0, False, False, self._info()
        said = command()
        self._done = self._is_done()
        return said, float(self._done), self._done, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _command(self, action: str) -> Callable[[], str] | None:
        """Return the method call that the last line asks for that is a command; None if none is."""
        forms: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
            (GO, self._go),
            (TAKE, self._take),
            (PUT, self._put),
            (OPEN, self._open),
            (CLOSE, self._shut),
            (TREAT, self._treat),
            (USE, self._use),
            (INVENTORY, self._inventory),
            (LOOK, self._look),
        )
        for line in reversed(action[-10_000:].casefold().split("\n")):
            plain = " ".join(line.removeprefix("action:").strip(" \t>`*.").split())
            for form, do in forms:
                found = form.fullmatch(plain)
                if found:
                    return partial(do, *found.groups())
        return None

    def _go(self, place: str) -> str:
        """Walk to a place, and return what is seen there."""
        if place not in self._house.furniture or place == self._at:
            return NOTHING
        self._at, self._lit = place, False
        return self._look()

    def _look(self) -> str:
        """Return what is seen at the present place."""
        if not self._at:
            return f"You are in the middle of the room, with {_listed(self._house.furniture)}."
        if not self._reachable(self._at):
            return f"You are at {self._at}. It is closed."
        there = self._house.at(self._at)
        return f"You are at {self._at}. {into(kind_of(self._at)).title()} it: {_listed(there)}."

    def _inventory(self) -> str:
        """Return what is held."""
        return f"You hold {_listed(self._house.at(YOU))}."

    def _open(self, place: str) -> str:
        """Open the present place, and return what is in it; `NOTHING` if that is not possible."""
        if place != self._at or self._reachable(place):
            return NOTHING
        self._house.open.add(place)
        return f"You open {place}. In it: {_listed(self._house.at(place))}."

    def _shut(self, place: str) -> str:
        """Close the present place; `NOTHING` if that is not possible."""
        if place != self._at or place not in self._house.open:
            return NOTHING
        self._house.open.remove(place)
        return f"You close {place}."

    def _take(self, thing: str, place: str) -> str:
        """Take a thing from the present place; `NOTHING` if that is not possible."""
        here = place == self._at and self._reachable(place)
        free = not self._house.at(YOU) and kind_of(thing) != LAMP
        if not here or not free or self._house.places.get(thing) != place:
            return NOTHING
        self._house.places[thing] = YOU
        return f"You take {thing} from {place}."

    def _put(self, thing: str, place: str) -> str:
        """Put the thing that is held at the present place; `NOTHING` if that is not possible."""
        here = place == self._at and self._reachable(place)
        if not here or self._house.places.get(thing) != YOU:
            return NOTHING
        self._house.places[thing] = place
        return f"You put {thing} {into(kind_of(place))} {place}."

    def _treat(self, verb: str, thing: str, place: str) -> str:
        """Heat, cool or clean the thing that is held; `NOTHING` if that is not possible here."""
        station, state = STATIONS[verb]
        held = self._house.places.get(thing) == YOU
        if place != self._at or kind_of(place) != station or not held:
            return NOTHING
        self._house.states[thing] = state
        return f"You {verb} {thing} with {place}."

    def _use(self, thing: str) -> str:
        """Switch on the lamp at the present place; `NOTHING` if there is none of this name."""
        if kind_of(thing) != LAMP or self._house.places.get(thing) != self._at:
            return NOTHING
        self._lit = True
        return f"You switch on {thing}."

    def _reachable(self, place: str) -> bool:
        """Return whether one can reach into a place."""
        return kind_of(place) not in CLOSED or place in self._house.open

    def _is_done(self) -> bool:
        """Return whether the task is done in the present state of the house."""
        task, house = self._task, self._house
        if task.kind == "look":
            return self._lit and any(kind_of(each) == task.thing for each in house.at(YOU))
        there = [
            each
            for place in house.furniture
            if kind_of(place) == task.target
            for each in house.at(place)
            if kind_of(each) == task.thing
        ]
        if task.kind in STATIONS:
            wanted = STATIONS[task.kind][1]
            there = [each for each in there if house.states.get(each) == wanted]
        return len(there) >= (2 if task.kind == "two" else 1)

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the policy's place, what is open, the
        objects that matter, and the lamp."""
        house = self._house
        objects = " ".join(
            f"{each}@{place}{house.states.get(each, '')}"
            for each, place in sorted(house.places.items())
            if kind_of(each) == self._task.thing or place == YOU
        )
        opened = " ".join(sorted(house.open))
        return {
            "success": self._done,
            "invalid": self._invalid,
            "state": f"{self._at}|{opened}|{objects}|{int(self._lit)}",
        }


def _listed(things: Sequence[str]) -> str:
    return ", ".join(things) or "nothing"
