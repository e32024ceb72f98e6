"""Held-out evaluation by the training's own engines and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll.config.lifecycle import ValidationConfig
from roll.core.types import Prompt
from roll.pipeline.scoring import Scorer
from roll.rollout.evaluate import evaluate
from roll.rollout.single_turn import SingleTurn
from roll.rollout.types import Group, GroupTask


@dataclass(frozen=True)
class Validator:
    """Generates and scores every held-out prompt."""

    config: ValidationConfig
    sets: Mapping[str, tuple[Prompt, ...]]
    single_turn: SingleTurn
    scorer: Scorer
    extract: Callable[[str], str | None]
    """Response to a normalised answer, for the majority vote."""
    max_in_flight: int

    def due(self, step: int, *, last: int) -> bool:
        """Whether the policy after `step` steps is validated."""
        if not self.sets:
            return False
        if step == 0:
            return self.config.at_start
        return step == last or step % self.config.every == 0

    async def run(self, step: int) -> dict[str, float]:
        """`val/<set>/mean@k`, `pass@k`, `maj@k` of the current weights."""
        total = sum(len(prompts) for prompts in self.sets.values())
        self.scorer.begin_step(total * self.config.samples_per_prompt)
        room = asyncio.Semaphore(self.max_in_flight)
        results: dict[str, float] = {}
        for name, prompts in self.sets.items():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._one(room, p, step)) for p in prompts]
            scores = evaluate(
                [task.result() for task in running],
                pass_score=self.config.pass_score,
                extract=self.extract,
            )
            results |= {f"val/{name}/{key}": value for key, value in scores.items()}
        return results

    async def _one(self, room: asyncio.Semaphore, prompt: Prompt, step: int) -> Group:
        async with room:
            return await self.single_turn.run(GroupTask(prompt, step))
