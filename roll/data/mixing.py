"""Endless, resumable order of drawing rows from several sources by weight.

The state of the sampler is a few counts per source. The counts determine the next source (the one
furthest behind its share). The seed and the count of a source determine its next row, with a new
permutation in each epoch. No random state is stored, and a restored sampler continues exactly.

With a curriculum, rows may be skipped when their turn comes, and the shares of sources may change.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, Generic, Protocol, TypeVar

from roll.core.errors import CheckpointError
from roll.data.datasets import Dataset, Item, Source
from roll.data.turns import ChangingTurns

Row = TypeVar("Row", bound=Item)
Row_contra = TypeVar("Row_contra", bound=Item, contravariant=True)


class Preferences(Protocol[Row_contra]):
    """Preferences of a sampler; their state is saved with that of the sampler."""

    @property
    def changes_shares(self) -> bool:
        """True if `source_preference` may return anything else than 1."""
        ...

    def takes(self, row: Row_contra, epoch: int) -> bool:
        """Return whether a row is drawn when its turn comes in this epoch."""
        ...

    def source_preference(self, name: str) -> float:
        """Return the present factor of the weight of a source, above zero."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; CheckpointError if it is of something else."""
        ...


class Sampler(Iterator[Row], Generic[Row]):
    """Endless iterator over rows, which keeps each source close to its share.

    A drawn row is under way until the caller settles it (it was used), replaces it (it was useless)
    or puts it back. A replaced row is followed by another row of the same source. Therefore each
    source is always fewer than `len(sources)` rows off its share, both among the settled rows and
    among settled rows and rows under way together.

    With `preferences` that change shares, this holds for the time since the shares changed last.
    """

    def __init__(
        self,
        dataset: Dataset[Row],
        *,
        seed: int,
        shuffle: bool = True,
        preferences: Preferences[Row] | None = None,
    ) -> None:
        """Begin at the first row.

        Args:
            dataset: sources, each with at least one row.
            seed: seed of the order of the rows.
            shuffle: True for a new order in each epoch; False for the order of the source.
            preferences: preferences for rows and sources; None if all rows are drawn and shares are
                fixed.
        """
        self._sources = dataset.sources
        self._seed = seed
        self._shuffle = shuffle
        self._identity = {
            "data": dataset.fingerprint,
            "weights": [source.weight for source in dataset.sources],
            "seed": seed,
            "shuffle": shuffle,
        }
        if preferences is not None:
            self._identity["curriculum"] = {"sources": preferences.changes_shares}
        self._numbers = {source.name: index for index, source in enumerate(dataset.sources)}
        self._shares = _integer_shares(dataset.sources)
        self._total_share = sum(self._shares)
        self._settled = [0] * len(dataset.sources)
        self._under_way = [0] * len(dataset.sources)
        self._drawn = [0] * len(dataset.sources)
        self._returned: list[list[Row]] = [[] for _ in dataset.sources]
        """Rows that were put back, by source; the last one is drawn first."""
        self._due_sources: deque[int] = deque()
        """Sources of rows that were replaced or put back, and for which no other row was drawn
        yet; the first entry is drawn first."""
        self._orders: dict[int, tuple[int, array[int]]] = {}
        self._preferences = preferences
        self._turns: ChangingTurns | None = None
        """Order of the sources where their shares change."""
        if preferences is not None and preferences.changes_shares:
            self._turns = ChangingTurns([source.weight for source in dataset.sources])

    def __next__(self) -> Row:
        """Return the next row, which is then under way; never raise StopIteration."""
        if self._due_sources:
            index = self._due_sources.popleft()
        elif self._turns is not None:
            index = self._turns.source_of(sum(self._under_way), self._factors)
        else:
            turns = [a + b for a, b in zip(self._settled, self._under_way, strict=True)]
            index = self._most_behind(turns)
        self._under_way[index] += 1
        if self._returned[index]:
            return self._returned[index].pop()
        return self._drawn_row(index)

    def _drawn_row(self, index: int) -> Row:
        """Return the next row of a source. Rows that the preferences do not take are skipped, but
        never all rows of an epoch one after another."""
        source = self._sources[index]
        for skipped in range(len(source.items)):
            epoch, position = divmod(self._drawn[index], len(source.items))
            self._drawn[index] += 1
            row = source.items[self._order(index, epoch)[position]]
            last = skipped == len(source.items) - 1
            if last or self._preferences is None or self._preferences.takes(row, epoch):
                return row
        raise AssertionError("a source has at least one row")

    def _factors(self) -> list[float]:
        """Return the present factor of the weight of each source."""
        assert self._preferences is not None
        return [self._preferences.source_preference(source.name) for source in self._sources]

    def settle(self, item: Row) -> None:
        """Mark a drawn row as used, so that it counts for the share of its source."""
        self._under_way[self._numbers[item.source]] -= 1
        self._settled[self._numbers[item.source]] += 1
        if self._turns is not None:
            self._turns.end(self._numbers[item.source])

    def replace(self, item: Row) -> None:
        """Mark a drawn row as useless; another row of its source is drawn instead."""
        self._under_way[self._numbers[item.source]] -= 1
        self._due_sources.append(self._numbers[item.source])

    def put_back(self, item: Row) -> None:
        """Take back a drawn row that was not used; it is the next row of its source."""
        self.replace(item)
        self._returned[self._numbers[item.source]].append(item)

    def schedule(self, count: int) -> list[str]:
        """Return the names of the sources of the next `count` rows to be settled, in order.

        No row is drawn. But where `preferences` change the shares of sources, those of these rows
        are settled now: later changes do not concern them.
        """
        if self._turns is not None:
            turns = [self._turns.source_of(i, self._factors) for i in range(count)]
            return [self._sources[index].name for index in turns]
        settled, names = list(self._settled), []
        for _ in range(count):
            index = self._most_behind(settled)
            settled[index] += 1
            names.append(self._sources[index].name)
        return names

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON.

        Rows that are under way must be settled, replaced or put back in the restored sampler.
        """
        state = {
            "identity": dict(self._identity),
            "settled": list(self._settled),
            "under_way": list(self._under_way),
            "drawn": list(self._drawn),
            "returned": [[item.id for item in items] for items in self._returned],
            "owed": list(self._due_sources),
        }
        if self._preferences is not None:
            state["curriculum"] = self._preferences.state()
        if self._turns is not None:
            state["turns"] = self._turns.state()
        return state

    def restore(self, state: Mapping[str, Any], find: Callable[[str], Row]) -> None:
        """Restore the result of `state`.

        Args:
            find: function that returns the row with a given id.

        Raises:
            CheckpointError: the state is not that of a sampler, or belongs to other data, other
                weights, another seed or another value of `shuffle`.
        """
        # States of earlier versions have no key "owed".
        optional = {"owed", "curriculum", "turns"}
        if state.keys() | optional != self.state().keys() | optional:
            raise CheckpointError(f"not the state of a sampler: keys {sorted(state)}")
        theirs = state["identity"]
        keys = [*self._identity, *(key for key in theirs if key not in self._identity)]
        changed = [k for k in keys if theirs.get(k) != self._identity.get(k)]
        if changed:
            raise CheckpointError(
                f"the checkpoint was made with another {' and '.join(_WORDS[k] for k in changed)}; "
                "restore it, or start anew with `resume: never` and another output_dir"
            )
        self._settled = list(state["settled"])
        self._under_way = list(state["under_way"])
        self._drawn = list(state["drawn"])
        self._returned = [[find(name) for name in names] for names in state["returned"]]
        self._due_sources = deque(state.get("owed", []))
        if self._preferences is not None:
            self._preferences.restore(state["curriculum"])
        if self._turns is not None:
            self._turns.restore(state["turns"])

    def _most_behind(self, turns: Sequence[int]) -> int:
        """Return the index of the source furthest behind its share; the first one of equals."""
        total = self._total_share
        drawn = sum(turns) + 1
        gaps = [
            share * drawn - count * total for share, count in zip(self._shares, turns, strict=True)
        ]
        return gaps.index(max(gaps))

    def _order(self, index: int, epoch: int) -> Sequence[int]:
        """Return the order of a source's rows in an epoch, shuffled the same way in every process;
        the latest one is cached."""
        cached = self._orders.get(index)
        if cached is None or cached[0] != epoch:
            source = self._sources[index]
            order = array("q", range(len(source.items)))  # a list takes four times the memory
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
    "curriculum": "choice of `data.curriculum` and its `sources`",
}


def _integer_shares(sources: tuple[Source[Any], ...]) -> list[int]:
    """Return integers in the proportion of the weights, so that the schedule has no rounding."""
    # The text of a float is what the user wrote, so 0.1 is exactly one tenth.
    weights = [Fraction(repr(source.weight)) for source in sources]
    scale = lcm(*(weight.denominator for weight in weights))
    return [int(weight * scale) for weight in weights]
