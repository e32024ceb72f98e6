"""Held-out evaluation by the training's own engines and rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from roll.config.sections.lifecycle import ValidationConfig
from roll.core.types import Prompt, Sample
from roll.rewards.execution.counters import Purpose
from roll.rewards.math.final_answer import find_answer
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.evaluate import evaluate
from roll.rollout.single_turn import SingleTurn
from roll.rollout.types import Group, GroupTask
from roll.runtime.reward_router import RewardRouter


@dataclass(frozen=True)
class Validator:
    """Generates and scores every held-out prompt."""

    config: ValidationConfig
    sets: Mapping[str, tuple[Prompt, ...]]
    single_turn: SingleTurn
    reward_router: RewardRouter
    extract: Callable[[Sample], str | None]
    """Sample to a normalised answer, for the majority vote."""
    max_in_flight: int

    async def run(self, step: int) -> dict[str, float]:
        """`val/<set>/mean@k`, `pass@k`, `maj@k` of the current weights."""
        tags = Counter(prompt.tag for prompts in self.sets.values() for prompt in prompts)
        # A budget of its own: with generation ahead, training groups are being scored meanwhile.
        expected = {tag: n * self.config.samples_per_prompt for tag, n in tags.items()}
        self.reward_router.begin_step(expected, Purpose.VALIDATION)
        room = asyncio.Semaphore(self.max_in_flight)
        results: dict[str, float] = {}
        for name, prompts in self.sets.items():
            groups = await all_or_first_error([self._one(room, p, step) for p in prompts])
            scores = evaluate(
                groups,
                pass_score=self.config.pass_score,
                extract=self.extract,
            )
            results |= {f"val/{name}/{key}": value for key, value in scores.items()}
        rates = self.reward_router.take_rates(Purpose.VALIDATION).values_by_name()
        return results | {f"val/{key}": rate for key, rate in rates.items() if rate}

    async def _one(self, room: asyncio.Semaphore, prompt: Prompt, step: int) -> Group:
        async with room:
            return await self.single_turn.run(GroupTask(prompt, step))


def answer_key(sample: Sample, *, math_tags: Collection[str]) -> str | None:
    """What the majority vote compares: the response, or in mathematics its final answer.

    Args:
        math_tags: what the built-in `math` reward scores; only there is a final answer defined.
    """
    text = sample.response_text.strip()
    if sample.tag not in math_tags:
        return text or None
    found = find_answer(text, prompt=sample.prompt.text, truncated=sample.truncated).text
    return found or text or None
