"""Order of the examples of a run.

The examples of a step depend only on the number of the step, so that a resumed run takes the same
examples that it would have taken without the interruption.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Order:
    """Order of the examples of all steps. `order[step]` lists the examples of a step.

    Epochs follow one another without a gap: a step may take the last examples of one epoch and the
    first examples of the next.
    """

    num_examples: int
    """Number of examples of the dataset."""
    per_step: int
    """Number of examples of each step except the last."""
    num_steps: int
    """Number of steps of the run."""
    last: int
    """Number of examples of the last step, at most `per_step`."""
    seed: int | None
    """Seed of the shuffling; None: the order of the file."""
    missing: int = 0
    """Number of examples that an earlier step had less than `per_step`, because it was the last one
    of fewer epochs. The steps before it are not asked for any more."""

    @classmethod
    def of_epochs(
        cls, epochs: int, num_examples: int, per_step: int, seed: int | None, missing: int = 0
    ) -> Order:
        """Return the order in which every example is taken `epochs` times."""
        steps, left = divmod(epochs * num_examples + missing, per_step)
        return cls(num_examples, per_step, steps + bool(left), left or per_step, seed, missing)

    def __getitem__(self, step: int) -> list[int]:
        """Return the numbers of the examples of a step. Steps are counted from 0."""
        return [self._example(place) for place in range(self.taken(step), self.taken(step + 1))]

    def taken(self, steps: int) -> int:
        """Return the number of examples that so many first steps take."""
        short = self.per_step - self.last if steps == self.num_steps else 0
        return steps * self.per_step - self.missing - short

    def _example(self, place: int) -> int:
        """Return the number of the example at `place`, counted over all epochs."""
        epoch, place = divmod(place, self.num_examples)
        if self.seed is None:
            return place
        return _permutation(self.num_examples, self.seed, epoch)[place]


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    """Return the numbers 0 to `count` - 1 in the shuffled order of one epoch."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(count, generator=generator).tolist()
