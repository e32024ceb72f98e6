"""`Validator`: evaluates held-out prompts with the engines and rewards of training."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from roll.config.sections.lifecycle import ValidationConfig
from roll.core.errors import PictureError
from roll.core.types import Prompt, Sample
from roll.rewards.execution.counters import Purpose
from roll.rewards.math.final_answer import find_answer
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.evaluate import evaluate
from roll.rollout.types import Group, GroupTask, RunGroup
from roll.runtime.reward_router import RewardRouter


@dataclass(frozen=True)
class Validator:
    """Evaluation that generates and scores samples for every held-out prompt."""

    config: ValidationConfig
    sets: Mapping[str, Sequence[Prompt]]
    run_group: RunGroup
    begin_step: Callable[[Mapping[str, float]], None]
    """Function that begins to count failures anew, for a validation with so many samples of each
    tag."""
    reward_router: RewardRouter
    extract: Callable[[Sample], str | None]
    """Function that returns the normalised answer of a sample for the majority vote; None if the
    sample has no answer."""
    max_in_flight: int
    """Largest number of prompts that are generated and scored at the same time."""
    keep: Callable[[int, Mapping[str, Sequence[Group]]], None] | None = None
    """Function that keeps the samples of the validation after so many steps, by set; None: they
    are not kept."""

    async def run(self, step: int) -> dict[str, float]:
        """Return the scores `val/<set>/mean@k`, `val/<set>/pass@k` and `val/<set>/maj@k` of the
        current weights, and those failure rates `val/reward/<name>/...` that are not 0."""
        tags = Counter(prompt.tag for prompts in self.sets.values() for prompt in prompts)
        # Validation has its own error budget, because training groups may be scored meanwhile if
        # generation runs ahead of training.
        expected = {tag: n * self.config.samples_per_prompt for tag, n in tags.items()}
        # In a thread, as below: it waits for other processes.
        await asyncio.to_thread(self.begin_step, expected)
        room = asyncio.Semaphore(self.max_in_flight)
        results: dict[str, float] = {}
        kept: dict[str, list[Group]] = {}
        for name, prompts in self.sets.items():
            found = await all_or_first_error([self._one(room, p, step) for p in prompts])
            groups = [group for group in found if group is not None]
            if not groups:
                continue
            if self.keep is not None:
                kept[name] = groups
            # In a thread, because long responses are fetched from other processes.
            scores = await asyncio.to_thread(
                evaluate, groups, pass_score=self.config.pass_score, extract=self.extract
            )
            results |= {f"val/{name}/{key}": value for key, value in scores.items()}
        if self.keep is not None:
            await asyncio.to_thread(self.keep, step, kept)
        taken = await asyncio.to_thread(self.reward_router.take_rates, Purpose.VALIDATION)
        rates = taken.values_by_name()
        return results | {f"val/{key}": rate for key, rate in rates.items() if rate}

    async def _one(self, room: asyncio.Semaphore, prompt: Prompt, step: int) -> Group | None:
        """Generate and score one prompt, when `room` has a free place; None if it is left out
        because of a broken picture, which whoever makes patches has named."""
        async with room:
            with suppress(PictureError):
                return await self.run_group(GroupTask(prompt, step))
        return None


def answer_key(sample: Sample, *, math_tags: Collection[str]) -> str | None:
    """Return the text that the majority vote compares: the final answer of a mathematics sample
    (the whole response if it has no final answer), otherwise the response. Return None if that
    text is empty.

    Args:
        math_tags: tags that the built-in `math` reward scores. Only samples with these tags have
            final answers.
    """
    text = sample.response_text.strip()
    if sample.tag not in math_tags:
        return text or None
    found = find_answer(text, prompt=sample.prompt.text, truncated=sample.truncated).text
    return found or text or None
