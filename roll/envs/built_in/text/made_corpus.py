"""Passages about people, companies and towns that do not exist, and questions that need several of
them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

_STARTS = "Bal Cor Dren Fal Gor Hel Kar Lum Mor Nev Or Pel Quil Ras Sel Tor Ul Vel Wen Yar Zan"
_MIDDLES = ("a", "e", "i", "o", "u", "ari", "eno", "ila", "oru", "umi")
_ENDS = {
    "person": ("dan", "kin", "ley", "mir", "nor", "ric", "son", "th", "vek", "wyn"),
    "company": (" Works", " Tools", " Mills", " Lines", " Foods", " Glass"),
    "town": ("bury", "dale", "ford", "haven", "mouth", "stead", "ton", "wick"),
    "river": ("ma", "na", "ra", "sa", "va"),
}
_JOBS = ("baker", "chemist", "mason", "farmer", "painter", "pilot", "teacher", "weaver")


@dataclass(frozen=True, slots=True)
class Relation:
    """Fact about one thing that names another."""

    of: str
    """Kind of the thing, a key of the names."""
    to: str
    """Kind of the thing that is named."""
    sentence: str
    question: str
    """Description of the named thing by the other one."""


RELATIONS = (
    Relation("company", "person", "{0} was founded by {1}.", "the founder of {0}"),
    Relation(
        "company", "town", "{0} has its head office in {1}.", "the town of the head office of {0}"
    ),
    Relation("person", "town", "{0} was born in {1}.", "the town in which {0} was born"),
    Relation("person", "person", "{0} learnt the trade from {1}.", "the teacher of {0}"),
    Relation("town", "river", "{0} lies on the river {1}.", "the river on which {0} lies"),
    Relation("town", "person", "The mayor of {0} is {1}.", "the mayor of {0}"),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages, and the facts in them."""

    passages: tuple[tuple[str, str], ...]
    """(title, text)."""
    names: dict[str, tuple[str, ...]]
    """Names by kind."""
    facts: dict[tuple[str, str], str]
    """(sentence of the relation, name) -> the other name."""

    def question(self, dice: random.Random, hops: int) -> tuple[str, str]:
        """Return a question and its answer, which is not the thing that the question names.

        Args:
            dice: source of the random choices.
            hops: number of facts that lead from the named thing to the answer, at least 1.
        """
        while True:
            first = dice.choice(RELATIONS)
            start = dice.choice(self.names[first.of])
            described, name, kind = start, start, first.of
            for number in range(hops):
                known = [each for each in RELATIONS if each.of == kind]
                if number < hops - 1:  # nothing is told of rivers: they only end a chain
                    known = [each for each in known if each.to != "river"]
                relation = first if number == 0 and first in known else dice.choice(known)
                described = relation.question.format(described)
                name, kind = self.facts[relation.sentence, name], relation.to
            if name != start:
                return f"What is the name of {described}?", name


def make_corpus(seed: int, size: int) -> Corpus:
    """Return a corpus of about `size` passages in random order: one about each person, company and
    town, of which there are at least three each. The same seed and size give the same corpus."""
    dice = random.Random(seed)
    shares = {"person": 0.4, "company": 0.3, "town": 0.3, "river": 0.1}
    taken: set[str] = set()
    names = {
        kind: tuple(_name(dice, kind, taken) for _ in range(max(3, round(size * share))))
        for kind, share in shares.items()
    }
    facts, passages = {}, []
    for kind in ("person", "company", "town"):
        for name in names[kind]:
            sentences = [_filler(dice, kind, name)]
            for relation in RELATIONS:
                if relation.of == kind:
                    other = dice.choice([each for each in names[relation.to] if each != name])
                    facts[relation.sentence, name] = other
                    sentences.append(relation.sentence.format(name, other))
            passages.append((name, " ".join(sentences)))
    dice.shuffle(passages)
    return Corpus(tuple(passages), names, facts)


def _name(dice: random.Random, kind: str, taken: set[str]) -> str:
    """Return a name that no other thing has."""
    for tries in itertools.count():
        name = dice.choice(_STARTS.split()) + "".join(dice.choices(_MIDDLES, k=1 + tries // 4))
        if kind == "person":
            name += f" {dice.choice(_STARTS.split())}{dice.choice(_MIDDLES)}"
        name += dice.choice(_ENDS[kind])
        if name not in taken:
            taken.add(name)
            return name
    raise AssertionError("the numbers have no end")


def _filler(dice: random.Random, kind: str, name: str) -> str:
    """Return a sentence about a thing that answers no question."""
    if kind == "person":
        return f"{name} is a {dice.choice(_JOBS)}."
    if kind == "company":
        return f"{name} is a company with {dice.randrange(20, 900)} workers."
    return f"{name} is a town of {dice.randrange(900, 90_000)} people."
