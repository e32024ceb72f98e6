"""Bases of filters and rollout loops that users bring; `roll.extend` exports them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.config.sections.rollout import OwnFilterConfig, OwnLoopConfig
from roll.core.completion import Completion
from roll.rollout.types import Group

if TYPE_CHECKING:
    from roll.rollout.own.writing import Writing


class Filter(OwnFilterConfig, ABC):
    """Filter that rejects groups which are not worth training on; a new prompt of the same source
    takes the place of a rejected one."""

    @abstractmethod
    def __call__(self, group: Group) -> str | None:
        """Return why the group is rejected, in a few words that are counted, or None to keep it.

        Args:
            group: `group.rewards` are those of the samples that have one, `group.prompt` is the
                prompt, and `group.samples` the scored samples.
        """


class RolloutLoop(OwnLoopConfig, ABC):
    """Maker of the responses to a prompt, for training and for validation.

    It may ask the engine several times for one response, put text of its own between two answers,
    or choose among more responses than are wanted. Rewards, filters and training follow as usual.
    """

    @abstractmethod
    async def responses(self, writing: Writing) -> Sequence[Completion]:
        """Return `writing.wanted` responses to `writing.prompt`.

        Many prompts are worked on at the same time in one thread, so everything that waits must be
        awaited. A run is reproducible if this method is: seeds come from `writing`.
        """
