"""Furniture and objects of the house, and tasks with them, made by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

HEATED, COOLED, CLEANED = "hot", "cold", "clean"
STATIONS = {"heat": ("microwave", HEATED), "cool": ("fridge", COOLED)}
STATIONS["clean"] = ("sinkbasin", CLEANED)
"""Verb -> the furniture that does it, and what an object then is."""
LAMP = "desklamp"
_FURNITURE = {
    "cabinet": (2, 4),
    "countertop": (1, 2),
    "drawer": (1, 3),
    "shelf": (1, 2),
    "diningtable": (1, 1),
    "desk": (1, 1),
    "garbagecan": (1, 1),
    "fridge": (1, 1),
    "microwave": (1, 1),
    "sinkbasin": (1, 1),
}
"""Smallest and largest number of pieces."""
CLOSED = ("cabinet", "drawer", "fridge", "microwave")
"""Furniture that has to be opened."""
_OBJECTS = {
    "apple": "food",
    "bread": "food",
    "egg": "food",
    "potato": "food",
    "tomato": "food",
    "bowl": "dish",
    "cup": "dish",
    "mug": "dish",
    "plate": "dish",
    "fork": "tool",
    "knife": "tool",
    "spoon": "tool",
    "book": "thing",
    "cellphone": "thing",
    "keychain": "thing",
    "pencil": "thing",
    "vase": "thing",
    LAMP: "lamp",
}
_SUITABLE = {"heat": ("food", "dish"), "cool": ("food", "dish"), "clean": ("food", "dish", "tool")}
KINDS = ("place", "heat", "cool", "clean", "look", "two")
"""Kinds of tasks, those of ALFWorld: put an object somewhere; heat, cool or clean it before; look
at it under a lamp; put two of them somewhere."""


@dataclass(frozen=True, slots=True)
class Task:
    """Goal of an episode."""

    kind: str
    thing: str
    """Kind of object."""
    target: str
    """Kind of furniture on or in which the object must be; of a lamp for `look`."""

    def told(self) -> str:
        """Return the task as a sentence."""
        thing, place = self.thing, f"{into(self.target)} {self.target}"
        if self.kind == "look":
            return f"look at {thing} under the {self.target}"
        if self.kind == "two":
            return f"put two {thing} {place}"
        done = {"place": "", **{verb: f"{state} " for verb, (_, state) in STATIONS.items()}}
        described = f"{done[self.kind]}{thing}"
        article = "an" if described[0] in "aeiou" else "a"
        return f"put {article} {described} {place}"


@dataclass(slots=True)
class House:
    """Furniture, and where everything is."""

    furniture: tuple[str, ...]
    """Names such as `cabinet 2`."""
    places: dict[str, str]
    """Object such as `mug 1` -> furniture; or `you` for what is held."""
    open: set[str] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)
    """Objects that are hot, cold or clean."""

    def at(self, place: str) -> list[str]:
        """Return the objects at a place."""
        return sorted(each for each, where in self.places.items() if where == place)


def kind_of(name: str) -> str:
    """Return the kind of a thing: `mug` of `mug 1`."""
    return name.rpartition(" ")[0]


def into(kind: str) -> str:
    """Return `in` or `on`, as fits a kind of furniture."""
    return "in" if kind in (*CLOSED, "garbagecan", "sinkbasin") else "on"


def make_house(dice: random.Random, kinds: tuple[str, ...], objects: int) -> tuple[House, Task]:
    """Return a house and a task that can be done in it and is not done yet.

    Args:
        dice: source of random numbers.
        kinds: kinds of tasks to choose from.
        objects: number of objects besides those of the task.
    """
    furniture = tuple(
        f"{kind} {number + 1}"
        for kind, (least, most) in _FURNITURE.items()
        for number in range(dice.randint(least, most))
    )
    kind = dice.choice(kinds)
    fitting = _SUITABLE.get(kind, ("food", "dish", "tool", "thing"))
    thing = dice.choice([each for each, group in _OBJECTS.items() if group in fitting])
    # Machines and the sink are no targets: an object must not be where it belongs by being treated.
    plain = [each for each in _FURNITURE if each not in ("fridge", "microwave", "sinkbasin")]
    target = LAMP if kind == "look" else dice.choice(plain)
    away = [each for each in furniture if kind_of(each) != target]
    places = {f"{thing} {i + 1}": dice.choice(away) for i in range(2 if kind == "two" else 1)}
    places[f"{LAMP} 1"] = dice.choice([each for each in furniture if kind_of(each) not in CLOSED])
    others = [each for each in _OBJECTS if each not in (thing, LAMP)]
    for _ in range(objects):
        other = dice.choice(others)
        number = 1 + sum(kind_of(each) == other for each in places)
        places[f"{other} {number}"] = dice.choice(furniture)
    return House(furniture, places), Task(kind, thing, target)
