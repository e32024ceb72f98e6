"""Which examples a step takes: a function of its number alone, so that a run that goes on takes
those that it would have taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Order:
    """Epochs lie behind each other; a step may take the end of one and the start of the next."""

    num_examples: int
    per_step: int
    num_steps: int
    last: int
    """Examples of the last step, which may be fewer."""
    seed: int | None
    """Of the shuffling; None: as they are in the file."""

    @classmethod
    def of_epochs(cls, epochs: int, num_examples: int, per_step: int, seed: int | None) -> Order:
        """All examples, so many times."""
        steps, left = divmod(epochs * num_examples, per_step)
        return cls(num_examples, per_step, steps + bool(left), left or per_step, seed)

    def __getitem__(self, step: int) -> list[int]:
        """The examples of a step, counted from 0."""
        start = step * self.per_step
        count = self.last if step == self.num_steps - 1 else self.per_step
        return [self._example(place) for place in range(start, start + count)]

    def _example(self, place: int) -> int:
        epoch, place = divmod(place, self.num_examples)
        if self.seed is None:
            return place
        return _permutation(self.num_examples, self.seed, epoch)[place]


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    shuffled: list[int] = torch.randperm(count, generator=generator).tolist()
    return shuffled
