"""Rewards that see all samples of a prompt: after the last one, with limits, beside other
rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll.config import load_config
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.errors import ConfigError, RewardError, WaitTimeoutError
from roll.core.types import Sample
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.rewards.api import Reward
from roll.rewards.contract import check_reward, sample_of
from roll.rewards.execution.counters import Purpose
from roll.rewards.execution.pool import RewardPool
from roll.rollout.types import GroupTask, ScoredSample
from roll.runtime.reward_router import RewardCluster, RewardRouter
from roll.workers.reward import FunctionReward
from tests.fakes import ScriptedEngine, prompt, score_by_token, single_turn
from tests.runs import write_task
from tests.unit.rewards.reward_functions import rank, rank_async

HERE = "tests.unit.rewards.reward_functions"
TASK = GroupTask(prompt("p0"), step=4)


def _group(*responses: str) -> list[Sample]:
    return [
        replace(sample_of(text, answer=""), id=f"g/{i}", group="g")
        for i, text in enumerate(responses)
    ]


def _config(fn: str, **settings: Any) -> RewardConfig:
    return RewardConfig.model_validate({"fn": f"{HERE}:{fn}", "per": "group", **settings})


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("fn", ["rank", "rank_async"])
def test_every_sample_gets_the_reward_of_its_place(fn: str, in_process: bool) -> None:
    pool = RewardPool.from_config("r", _config(fn, in_process=in_process), seed=0)
    try:
        pool.begin_step(5)
        groups = [_group("aaa", "a", "aa"), _group("b", "bb")]
        scored = asyncio.run(pool.score_groups(groups))
        found = [[each.reward.score if each.reward else None for each in g] for g in scored]
        assert found == [[2, 0, 1], [0, 1]]
        metrics = pool.take_metrics().values_by_name()
        assert metrics["reward/r/size"] == pytest.approx((3 * 3 + 2 * 2) / 5)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("too few", "returned 1 rewards for a group of 2 samples"),
        ("number", "must return a list of 2 rewards"),
        ("nan", "must be finite"),
        ("raise", "KeyError"),
        ("hang", "no result within timeout_s"),
    ],
)
def test_a_failure_is_one_of_each_sample(response: str, why: str) -> None:
    config = _config("obey_group", max_error_rate=1.0, timeout_s=0.2)
    pool = RewardPool.from_config("r", config, seed=0)
    try:
        pool.begin_step(2)
        [scored] = asyncio.run(pool.score_groups([_group(response, "x")]))
        assert [each.reward for each in scored] == [None, None]
        assert all(why in str(each.failure) for each in scored)
        rates = pool.take_metrics().values_by_name()
        assert rates["reward/r/error_rate"] + rates["reward/r/timeout_rate"] == 1.0
    finally:
        pool.close()


def test_too_many_failures_stop_the_run() -> None:
    pool = RewardPool.from_config("r", _config("obey_group"), seed=0)
    try:
        pool.begin_step(2)
        with pytest.raises(RewardError, match="failed on 1 of the first 1 samples"):
            asyncio.run(pool.score_groups([_group("raise", "x")]))
    finally:
        pool.close()


def _router(launcher: LocalLauncher, **configs: RewardConfig) -> RewardRouter:
    hosted = {}
    for name, config in configs.items():
        place = Placement(Role.REWARD, pool="all", workers=1, label=name)
        cluster = launcher.start(FunctionReward, place, name, config)
        cluster.call(FunctionReward.start)
        hosted[name] = RewardCluster(config, cluster)  # type: ignore[arg-type]
    return RewardRouter(hosted)


def test_scores_of_groups_are_added_to_those_of_samples() -> None:
    async def both(router: RewardRouter) -> list[ScoredSample]:
        return await router.score_group(await router.score(_group("aa", "a")))

    with LocalLauncher() as launcher:
        length = RewardConfig(fn=f"{HERE}:length")
        router = _router(launcher, length=length, rank=_config("rank", weight=10.0))
        assert router.scores_groups
        router.begin_step({"default": 2.0})
        first, second = asyncio.run(both(router))
        assert (first.reward, second.reward) == (12.0, 1.0)
        assert first.by_name == {"length": 2.0, "rank": 1.0}
        assert first.parts == {"rank/size": 2.0}
        names = ("length", "rank")
        rates = ("error_rate", "timeout_rate")
        times = ("queue_s", "run_s", "share_of_step")
        found = router.take_rates().values_by_name()
        assert set(found) == {
            *(f"reward/{name}/{rate}" for name in names for rate in rates),
            *(f"rewards/{name}/{each}" for name in names for each in times),
        }
        assert all(0 < found[f"rewards/{name}/share_of_step"] <= 1 for name in names)
        router.begin_step({"default": 2.0})
        assert router.take_rates()["rewards/rank/share_of_step"].value() == 0


def test_a_tag_may_have_group_rewards_only_and_other_tags_are_left_alone() -> None:
    async def both(router: RewardRouter, purpose: Purpose) -> list[ScoredSample]:
        return await router.score_group(await router.score(_group("aa", "a"), purpose), purpose)

    with LocalLauncher() as launcher:
        router = _router(launcher, rank=_config("rank"))
        router.begin_step({"default": 2.0}, Purpose.VALIDATION)
        assert [s.reward for s in asyncio.run(both(router, Purpose.VALIDATION))] == [1.0, 0.0]
        router = _router(launcher, rank=_config("rank", tags=("x",)), n=RewardConfig(fn="exact"))
        router.begin_step({"default": 2.0})
        assert [s.by_name for s in asyncio.run(both(router, Purpose.TRAINING))] == [{"n": 0.0}] * 2


def test_a_failed_group_reward_leaves_its_samples_without_a_reward() -> None:
    async def both(router: RewardRouter) -> list[ScoredSample]:
        return await router.score_group(await router.score(_group("raise", "x")))

    with LocalLauncher() as launcher:
        config = _config("obey_group", max_error_rate=1.0)
        router = _router(launcher, length=RewardConfig(fn=f"{HERE}:length"), bad=config)
        router.begin_step({"default": 2.0})
        assert [(s.failed, s.has_reward) for s in asyncio.run(both(router))] == [
            (("bad",), False)
        ] * 2


def test_siblings_that_are_stopped_early_are_not_in_the_group() -> None:
    seen: list[str] = []

    async def by_group(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        seen.extend(one.sample.id for one in samples)
        return list(samples)

    # The first two siblings never end.
    engine = ScriptedEngine(turns=lambda request: None if request.id[-1] in "01" else 1)
    options: dict[str, Any] = {"separate_siblings": True, "redundant": 2}
    turn = single_turn(engine, samples_per_prompt=2, score_group=by_group, **options)
    group = asyncio.run(turn.run(TASK))
    assert seen == [one.sample.id for one in group.samples] == ["4/p0/2", "4/p0/3"]


@pytest.mark.parametrize("separate", [True, False])
def test_a_group_is_scored_once_after_its_last_sample(separate: bool) -> None:
    seen: list[list[str]] = []

    async def by_group(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        seen.append([one.sample.id for one in samples])
        return [replace(one, reward=one.reward + 10) for one in samples]

    turn = replace(
        single_turn(ScriptedEngine(), samples_per_prompt=3, separate_siblings=separate),
        score_group=by_group,
    )
    group = asyncio.run(turn.run(TASK))
    assert seen == [["4/p0/0", "4/p0/1", "4/p0/2"]]
    assert all(reward >= 10 for reward in group.rewards)


def test_a_group_reward_that_hangs_or_mixes_up_samples_is_told() -> None:
    async def hangs(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        await asyncio.Event().wait()
        return list(samples)

    async def drops(samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        return list(samples)[1:]

    def run(**options: Any) -> None:
        turn = single_turn(ScriptedEngine(), samples_per_prompt=2, score=score_by_token)
        asyncio.run(replace(turn, **options).run(TASK))

    with pytest.raises(WaitTimeoutError, match="rewards of group 4/p0 did not finish"):
        run(score_group=hangs, reward_timeout_s=0.05)
    with pytest.raises(RewardError, match="came back for"):
        run(score_group=drops)


@pytest.mark.parametrize("settings", [{"fn": "math"}, {"worker": "m:C"}])
def test_only_functions_of_users_see_groups(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="works for a function of your own"):
        RewardConfig.model_validate({**settings, "per": "group"})


def test_a_greedy_baseline_and_a_group_reward_exclude_each_other(tmp_path: Path) -> None:
    rewards = {"rank": {"fn": f"{HERE}:rank", "per": "group"}}
    path = write_task(tmp_path, rewards=rewards, algorithm={"advantage": {"kind": "remax"}})
    with pytest.raises(ConfigError, match=r"rewards\.rank\.per: .*greedy response"):
        load_config(path)


def test_a_group_reward_can_be_checked_without_a_run() -> None:
    check_reward(rank, per="group")
    check_reward(rank_async, per="group")

    def first_only(samples: list[Sample]) -> list[Reward]:
        return [Reward(1.0)]

    with pytest.raises(AssertionError, match="returned 1 rewards for a group of 3"):
        check_reward(first_only, per="group")
