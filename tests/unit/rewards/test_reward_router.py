"""Samples go to their rewards: budgets by what is routed, workers in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason
from roll.core.errors import WaitTimeoutError
from roll.core.types import Prompt, Sample
from roll.data.datasets import Dataset, Source
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalCluster, LocalLauncher
from roll.rewards.api import Reward
from roll.rewards.execution.counters import Purpose, Scored
from roll.runtime.reward_router import RewardCluster, RewardRouter
from roll.runtime.run_data import samples_by_tag, tag_shares
from roll.workers.reward import RewardWorker


class Noting(RewardWorker):
    """Notes what it is asked."""

    def __init__(self, spec: Any, name: str, config: RewardConfig) -> None:
        super().__init__(spec, name, config)
        self.expected = 0
        self.groups = 0

    async def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        self.expected = expected_samples

    async def score_samples(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        self.groups += 1
        return [Scored(Reward(1.0)) for _ in samples]


def hosted(
    launcher: LocalLauncher, name: str, *tags: str, workers: int = 1
) -> tuple[RewardCluster, LocalCluster[Noting]]:
    config = RewardConfig(worker="x:Noting", tags=tags, workers=workers)
    place = Placement(Role.REWARD, pool="all", workers=workers, label=name)
    cluster = launcher.start(Noting, place, name, config)
    return RewardCluster(config, cluster), cluster  # type: ignore[arg-type]


def prompt(number: int, tag: str) -> Prompt:
    return Prompt(id=f"s:{number}", tokens=(1,), text="?", answer="", tag=tag)


def sample(tag: str) -> Sample:
    completion = Completion.of((1,), (0.0,), (0,), FinishReason.STOP)
    return Sample("s:0/0", "s:0", prompt(0, tag), completion, "")


def test_a_budget_is_of_the_samples_that_are_routed_to_the_reward() -> None:
    with LocalLauncher() as launcher:
        math, math_workers = hosted(launcher, "math", "math", workers=3)
        both, both_workers = hosted(launcher, "both", "math", "code")
        never, never_workers = hosted(launcher, "never", "rare")
        scorer = RewardRouter({"math": math, "both": both, "never": never})
        scorer.begin_step({"math": 16.0, "code": 48.0})
        assert [worker.expected for worker in math_workers.workers] == [6, 6, 6]
        assert both_workers.workers[0].expected == 64
        assert never_workers.workers[0].expected == 1  # never zero


def test_each_reward_takes_turns_of_its_own() -> None:
    with LocalLauncher() as launcher:
        one, one_workers = hosted(launcher, "one", "a", workers=2)
        other, other_workers = hosted(launcher, "other", "b", workers=2)
        scorer = RewardRouter({"one": one, "other": other})

        async def score_alternately() -> None:
            for _ in range(4):
                await scorer.score([sample("a")])
                await scorer.score([sample("b")])

        asyncio.run(score_alternately())
        assert [worker.groups for worker in one_workers.workers] == [2, 2]
        assert [worker.groups for worker in other_workers.workers] == [2, 2]


class Endless(Noting):
    async def score_samples(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        await asyncio.sleep(60)
        return []


def test_a_reward_that_never_answers_is_named_beside_one_that_may_wait() -> None:
    with LocalLauncher() as launcher:
        config = RewardConfig(worker="x:Noting", tags=("a",))
        place = Placement(Role.REWARD, pool="all", label="hangs", replaceable=True)
        hanging: Any = launcher.start(Endless, place, "hangs", config)
        rewards = {"hangs": RewardCluster(config, hanging), "one": hosted(launcher, "one", "a")[0]}
        router = RewardRouter(rewards, limits_s={"hangs": 0.05})
        with pytest.raises(WaitTimeoutError, match=r"^reward 'hangs' did not finish within 0\.05"):
            asyncio.run(router.score([sample("a")]))
        hanging.end(0)


def test_expected_tags_follow_weights_and_rows() -> None:
    mixed = tuple(prompt(i, "a" if i < 3 else "b") for i in range(4))
    pure = tuple(prompt(i, "b") for i in range(100))
    sources = (Source("mixed", 3.0, mixed), Source("pure", 1.0, pure))
    shares = tag_shares(Dataset(sources, (), ""))
    assert shares == {"a": 0.5625, "b": 0.4375}
    assert samples_by_tag(shares, 64) == {"a": 36, "b": 28}
