"""The order in which rows are drawn: several sources by weight, endless, and resumable.

The position is a few counts per source. Which source comes next follows from the counts (the one
furthest behind its share), and which row of it follows from the seed and the count (a new
permutation each epoch), so nothing random is stored and a restored sampler goes on exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, Generic, TypeVar

from roll.core.errors import CheckpointError
from roll.data.datasets import Dataset, Item, Source

Row = TypeVar("Row", bound=Item)


class Sampler(Iterator[Row], Generic[Row]):
    """Endless rows. Of those that were settled, and of those settled and under way together,
    each source is at any time fewer than `len(sources)` off its share: a row that came to
    nothing is replaced by one of the same source."""

    def __init__(self, dataset: Dataset[Row], *, seed: int, shuffle: bool = True) -> None:
        self._sources = dataset.sources
        self._seed = seed
        self._shuffle = shuffle
        self._identity = {
            "data": dataset.fingerprint,
            "weights": [source.weight for source in dataset.sources],
            "seed": seed,
            "shuffle": shuffle,
        }
        self._numbers = {source.name: index for index, source in enumerate(dataset.sources)}
        self._shares = _integer_shares(dataset.sources)
        self._settled = [0] * len(dataset.sources)
        self._under_way = [0] * len(dataset.sources)
        self._drawn = [0] * len(dataset.sources)
        self._returned: list[list[Row]] = [[] for _ in dataset.sources]
        """The last one is offered first."""
        self._owed: list[int] = []
        """Sources of rows that came to nothing and have no successor yet, first come first."""
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def __next__(self) -> Row:
        if self._owed:
            index = self._owed.pop(0)
        else:
            turns = [a + b for a, b in zip(self._settled, self._under_way, strict=True)]
            index = self._most_behind(turns)
        self._under_way[index] += 1
        if self._returned[index]:
            return self._returned[index].pop()
        source = self._sources[index]
        epoch, position = divmod(self._drawn[index], len(source.items))
        self._drawn[index] += 1
        return source.items[self._order(index, epoch)[position]]

    def settle(self, item: Row) -> None:
        """It was used: it counts for its source's share."""
        self._under_way[self._numbers[item.source]] -= 1
        self._settled[self._numbers[item.source]] += 1

    def replace(self, item: Row) -> None:
        """It came to nothing: it is its source's turn again."""
        self._under_way[self._numbers[item.source]] -= 1
        self._owed.append(self._numbers[item.source])

    def put_back(self, item: Row) -> None:
        """It was not used: it is its source's turn again, and this one comes first."""
        self.replace(item)
        self._returned[self._numbers[item.source]].append(item)

    def schedule(self, count: int) -> list[str]:
        """The sources of the next `count` rows to be settled."""
        turns, names = list(self._settled), []
        for _ in range(count):
            index = self._most_behind(turns)
            turns[index] += 1
            names.append(self._sources[index].name)
        return names

    def state(self) -> dict[str, Any]:
        """The position, as plain JSON. What is under way must be settled, replaced or put back in
        the sampler that takes it up, too."""
        return {
            "identity": dict(self._identity),
            "settled": list(self._settled),
            "under_way": list(self._under_way),
            "drawn": list(self._drawn),
            "returned": [[item.id for item in items] for items in self._returned],
            "owed": list(self._owed),
        }

    def restore(self, state: Mapping[str, Any], find: Callable[[str], Row]) -> None:
        """Go on where `state` was taken.

        Args:
            find: row of an id.

        Raises:
            CheckpointError: the state is not one of a sampler, or belongs to other data, weights,
                another seed or another order.
        """
        # Earlier versions kept no account of what is owed.
        if state.keys() | {"owed"} != self.state().keys():
            raise CheckpointError(f"not the state of a sampler: keys {sorted(state)}")
        theirs = state["identity"]
        changed = [k for k, mine in self._identity.items() if theirs.get(k) != mine]
        if changed:
            raise CheckpointError(
                f"the checkpoint was made with another {' and '.join(_WORDS[k] for k in changed)}; "
                "restore it, or start anew with `resume: never` and another output_dir"
            )
        self._settled = list(state["settled"])
        self._under_way = list(state["under_way"])
        self._drawn = list(state["drawn"])
        self._returned = [[find(name) for name in names] for names in state["returned"]]
        self._owed = list(state.get("owed", []))

    def _most_behind(self, turns: Sequence[int]) -> int:
        """The source with the largest gap between its share and its turns; the first of equals."""
        total = sum(self._shares)
        drawn = sum(turns) + 1
        gaps = [
            share * drawn - count * total for share, count in zip(self._shares, turns, strict=True)
        ]
        return gaps.index(max(gaps))

    def _order(self, index: int, epoch: int) -> list[int]:
        cached = self._orders.get(index)
        if cached is None or cached[0] != epoch:
            source = self._sources[index]
            order = list(range(len(source.items)))
            if self._shuffle:
                # A text seed is hashed with SHA-512, the same in every process.
                random.Random(f"{self._seed}:{source.name}:{epoch}").shuffle(order)
            cached = self._orders[index] = (epoch, order)
        return cached[1]


_WORDS = {
    "data": "content of the data files",
    "weights": "set of source weights",
    "seed": "seed",
    "shuffle": "value of `data.shuffle`",
}


def _integer_shares(sources: tuple[Source[Any], ...]) -> list[int]:
    """Weights as integers in the same proportion, so that the schedule has no rounding."""
    # The text of a float is what the user wrote: 0.1 means one tenth.
    weights = [Fraction(repr(source.weight)) for source in sources]
    scale = lcm(*(weight.denominator for weight in weights))
    return [int(weight * scale) for weight in weights]
