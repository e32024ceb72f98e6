"""The order in which prompts are drawn: several sources by weight, endless, and resumable.

The position is one count per source. Which source comes next follows from the counts (the one
furthest behind its share), and which prompt of it follows from the seed and the count (a new
permutation each epoch), so nothing random is stored and a restored sampler goes on exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import Any

from roll.core.errors import CheckpointError
from roll.core.types import Prompt
from roll.data.datasets import PromptDataset, PromptSource


class PromptSampler(Iterator[Prompt]):
    """Endless prompts; at any time each source is fewer than `len(sources)` draws off its share."""

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool = True) -> None:
        self._sources = dataset.sources
        self._seed = seed
        self._shuffle = shuffle
        self._identity = {
            "data": dataset.fingerprint,
            "weights": [source.weight for source in dataset.sources],
            "seed": seed,
            "shuffle": shuffle,
        }
        self._shares = _integer_shares(dataset.sources)
        self._counts = [0] * len(dataset.sources)
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def __next__(self) -> Prompt:
        index = self._most_behind()
        source = self._sources[index]
        epoch, position = divmod(self._counts[index], len(source.prompts))
        self._counts[index] += 1
        return source.prompts[self._order(index, epoch)[position]]

    def state(self) -> dict[str, Any]:
        """The position, as plain JSON."""
        return {"identity": dict(self._identity), "counts": list(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: the state is not one of a sampler, or belongs to other data, weights,
                another seed or another order.
        """
        if state.keys() != {"identity", "counts"}:
            raise CheckpointError(f"not the state of a prompt sampler: keys {sorted(state)}")
        theirs = state["identity"]
        changed = [k for k, mine in self._identity.items() if theirs.get(k) != mine]
        if changed:
            raise CheckpointError(
                f"the checkpoint was made with another {' and '.join(_WORDS[k] for k in changed)}; "
                "restore it, or start anew with `resume: never` and another output_dir"
            )
        self._counts = list(state["counts"])

    def _most_behind(self) -> int:
        """The source with the largest gap between its share and its count; the first of equals."""
        total = sum(self._shares)
        drawn = sum(self._counts) + 1
        gaps = [
            share * drawn - count * total
            for share, count in zip(self._shares, self._counts, strict=True)
        ]
        return gaps.index(max(gaps))

    def _order(self, index: int, epoch: int) -> list[int]:
        cached = self._orders.get(index)
        if cached is None or cached[0] != epoch:
            source = self._sources[index]
            order = list(range(len(source.prompts)))
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


def _integer_shares(sources: tuple[PromptSource, ...]) -> list[int]:
    """Weights as integers in the same proportion, so that the schedule has no rounding."""
    # The text of a float is what the user wrote: 0.1 means one tenth.
    weights = [Fraction(repr(source.weight)) for source in sources]
    scale = lcm(*(weight.denominator for weight in weights))
    return [int(weight * scale) for weight in weights]
