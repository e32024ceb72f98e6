"""A sample on which a reward failed is left out: of baselines, gradients, filters and means."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from roll.algorithms.build import build_advantage
from roll.algorithms.shaping.build import build_shaping
from roll.config.algorithm import Aggregation, AlgorithmConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.errors import RewardError
from roll.core.types import Sample
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.pipeline.updates import updates
from roll.rewards.api import Reward, RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.execution.counters import Purpose
from roll.rewards.execution.pool import RewardPool
from roll.rewards.loading import bind_reward
from roll.rollout.assemble import assemble, rollout_metrics
from roll.rollout.dense import dense
from roll.rollout.evaluate import evaluate
from roll.rollout.filters import equal_rewards, mean_reward
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group
from roll.runtime.reward_router import RewardCluster, RewardRouter
from roll.workers.reward import RewardWorker
from tests.fakes import completion, from_disk, group
from tests.tiny import rollout_batch

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}},
    "grpo over the batch": {"advantage": {"kind": "grpo", "std": "batch"}},
    "rloo": {"advantage": {"kind": "rloo"}},
    "reinforce_pp": {"advantage": {"kind": "reinforce_pp"}},
    "opo": {"advantage": {"kind": "opo"}},
    "moments of the batch": {
        "advantage": {"kind": "reinforce"},
        "reward_shaping": ({"kind": "normalize", "mean": "batch", "std": "batch"},),
    },
    "running moments": {
        "advantage": {"kind": "reinforce"},
        "reward_shaping": ({"kind": "normalize", "mean": "running", "std": "running"},),
    },
    "masks": {
        "advantage": {"kind": "grpo"},
        "masks": ({"kind": "difficulty", "low": 0.4, "high": 0.9},),
    },
    "weights": {
        "advantage": {"kind": "grpo"},
        "sample_weights": ({"kind": "difficulty"}, {"kind": "length"}),
    },
    "pass_k": {"advantage": {"kind": "pass_k", "k": 1}},
    "soft length penalty": {
        "advantage": {"kind": "grpo"},
        "reward_shaping": ({"kind": "overlong_penalty"},),
    },
    "gae": {"advantage": {"kind": "gae"}},
    "gdpo": {"advantage": {"kind": "gdpo"}},
    "remax": {"advantage": {"kind": "remax"}},
    "kl_in_reward": {"advantage": {"kind": "reinforce_pp"}, "kl_in_reward": {"coef": 0.1}},
    "kl_in_reward that adapts": {
        "advantage": {"kind": "grpo"},
        "kl_in_reward": {"coef": 0.1, "target": 0.1, "horizon": 100},
    },
    "whitened": {"advantage": {"kind": "grpo"}, "advantage_shaping": ({"kind": "whiten"},)},
}


def fail(one: Group, *places: int, reward: float = 0.0) -> Group:
    """The group, in which a reward failed on the samples at `places`."""
    samples = [
        replace(s, failed=("judge",), reward=reward) if i in places else s
        for i, s in enumerate(one.samples)
    ]
    return replace(one, samples=tuple(samples))


def judged_and_whole() -> tuple[RolloutBatch, RolloutBatch, list[int]]:
    """A batch without the failed rows, the whole one, and the rows that have a reward."""
    batch = replace(scored(rollout_batch(12)), group_ids=torch.arange(12) // 4)
    failed = [1, 4, 5, 6, 7, 10]
    has_reward = torch.tensor([i not in failed for i in range(12)])
    rows = [i for i in range(12) if i not in failed]
    assert batch.rewards is not None
    whole = replace(
        batch,
        has_reward=has_reward,
        rewards=torch.where(has_reward, batch.rewards, 1e6),
        loss_mask=batch.loss_mask & has_reward[:, None],
    )
    return batch.select(rows), whole, rows


def scored(batch: RolloutBatch, seed: int = 1) -> RolloutBatch:
    """The batch with what other models say of it, and all that advantages may ask for."""
    g = torch.Generator().manual_seed(seed)
    rows, width = batch.tokens.shape
    drawn = torch.rand(5, rows, width, generator=g) * batch.loss_mask
    assert batch.rewards is not None
    return replace(
        batch,
        old_logprobs=-drawn[0],
        ref_logprobs=-drawn[1],
        values=drawn[2],
        baseline_rewards=torch.rand(rows, generator=g),
        named_rewards=torch.stack([batch.rewards, drawn[3].sum(1)], 1),
        reward_weights=torch.ones(rows, 2),
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_with_failed_samples_is_the_step_without_them(name: str) -> None:
    config = AlgorithmConfig.model_validate(ALGORITHMS[name])
    judged, whole, rows = judged_and_whole()
    shaping, other = (build_shaping(config, max_new_tokens=12) for _ in range(2))
    expected, expected_metrics = shaping.add_advantages(judged, build_advantage(config))
    found, metrics = other.add_advantages(whole, build_advantage(config))
    assert metrics.values_by_name() == expected_metrics.values_by_name()
    assert shaping.state() == other.state()
    assert expected.advantages is not None
    assert found.advantages is not None
    torch.testing.assert_close(found.advantages[rows], expected.advantages)
    torch.testing.assert_close(found.loss_mask[rows], expected.loss_mask)
    left_out = [i for i in range(12) if i not in rows]
    assert not found.advantages[left_out].any()
    assert not found.loss_mask[left_out].any()
    for mode in (
        Aggregation.TOKEN_MEAN,
        Aggregation.SEQUENCE_MEAN,
        Aggregation.SEQUENCE_SUM,
    ):
        [update] = updates(found, num_updates=1, ranks=1, aggregation=mode)
        [alone] = updates(expected, num_updates=1, ranks=1, aggregation=mode)
        assert _loss(update) == pytest.approx(_loss(alone))


def test_a_step_in_which_all_failed_trains_nothing() -> None:
    config = AlgorithmConfig.model_validate({"advantage": {"kind": "grpo"}})
    _, whole, _ = judged_and_whole()
    nobody = replace(whole, has_reward=torch.zeros(12, dtype=torch.bool))
    found, _ = build_shaping(config, max_new_tokens=12).add_advantages(
        nobody, build_advantage(config)
    )
    assert found.advantages is not None
    assert not found.advantages.any()
    assert not found.loss_mask.any()


def test_a_batch_says_which_rows_have_no_reward_and_means_leave_them_out() -> None:
    groups = [fail(group("a", [1, 0, 1, 1]), 1, reward=99.0), group("b", [0, 0, 0, 1])]
    batch = assemble(groups, {"judge": 1.0})
    assert batch.has_reward is not None
    assert batch.has_reward.tolist() == [True, False, True, True, True, True, True, True]
    assert batch.trained.tolist() == batch.has_reward.tolist()
    assert dense(batch).loss_mask.any(1).tolist() == batch.has_reward.tolist()
    metrics = rollout_metrics(groups, current_version=0).values_by_name()
    assert metrics["reward/mean"] == pytest.approx(4 / 7)
    assert metrics["samples/left_out"] == 1
    assert assemble([group("b", [0, 1])]).has_reward is None


def test_a_failed_greedy_baseline_leaves_its_whole_group_out() -> None:
    one, other = group("a", [1, 0]), group("b", [1, 0])
    baseline = replace(other.samples[0], failed=("judge",))
    batch = assemble([replace(one, baseline=one.samples[0]), replace(other, baseline=baseline)])
    assert batch.has_reward is not None
    assert batch.has_reward.tolist() == [True, True, False, False]


def test_filters_look_at_the_samples_that_have_a_reward() -> None:
    mixed = fail(group("a", [1, 0, 1]), 1)
    assert mixed.rewards == (1, 1)
    assert equal_rewards(mixed) == "all rewards equal to 1"
    assert equal_rewards(fail(group("a", [1, 0, 1]), 0)) is None
    nothing = fail(group("a", [1, 0]), 0, 1)
    assert "no sample has a reward" in str(equal_rewards(nothing))
    assert "no sample has a reward" in str(mean_reward(nothing, low=0, high=1))
    assert mean_reward(fail(group("a", [1, 0, 0]), 0), low=-1, high=1) is None


def test_a_group_that_waits_in_a_checkpoint_keeps_what_failed(tmp_path: Path) -> None:
    one = fail(group("a", [1, 0]), 1)
    row = from_disk(to_plain(one), tmp_path)
    back = from_plain(row, lambda name: one.prompt)
    assert back.rewards == (1,)
    assert back.samples[1].failed == ("judge",)
    for sample in row["samples"]:
        del sample["failed"]  # as checkpoints were
    assert from_plain(row, lambda name: one.prompt).rewards == (1, 0)


def test_validation_is_over_the_samples_that_have_a_reward() -> None:
    groups = [fail(group("a", [1, 0, 1, 0]), 1), fail(group("b", [1, 1, 1, 1]), 0, 1, 2, 3)]
    scores = evaluate(groups, pass_score=1, extract=lambda sample: "x")
    assert scores == {
        "pass@1": pytest.approx(2 / 3),
        "pass@2": 1.0,
        "mean@1": pytest.approx(2 / 3),
        "mean@4": pytest.approx(2 / 3),
        "maj@4": pytest.approx(2 / 3),
        "left_out": 5 / 8,
    }
    assert evaluate(groups[1:], pass_score=1, extract=lambda sample: "x") == {"left_out": 1.0}


def test_by_default_a_failed_sample_has_no_score_and_with_on_error_it_has() -> None:
    def fickle(sample: Sample) -> float:
        return 1 / len(sample.response_text)

    async def run(config: RewardConfig) -> list[Reward | None]:
        bound = bind_reward(fickle, {}, RewardContext("r", 0), label="fn")
        pool = RewardPool.from_bound("r", config, bound)
        pool.begin_step(2)
        scored = await pool.score([sample_of("ab", answer=""), sample_of("", answer="")])
        metrics = pool.take_metrics().values_by_name()
        pool.close()
        assert metrics["reward/r/error_rate"] == 0.5
        assert metrics["reward/r/mean"] == (0.5 if config.on_error is None else -0.25)
        return [one.reward for one in scored]

    silent = RewardConfig(fn="x:y", max_error_rate=1)
    assert asyncio.run(run(silent)) == [Reward(0.5), None]
    spoken = RewardConfig(fn="x:y", max_error_rate=1, on_error=-1)
    assert asyncio.run(run(spoken)) == [Reward(0.5), Reward(-1)]


class Failing(RewardWorker):
    """Fails on what says so."""

    def score(self, sample: Sample, ctx: RewardContext) -> float:
        if "fail" in sample.response_text:
            raise KeyError("no such column")
        return 1.0


def _scorer(launcher: LocalLauncher, **settings: Any) -> RewardRouter:
    hosted = {}
    for name in ("one", "two"):
        config = RewardConfig(worker="x:Failing", **(settings if name == "one" else {}))
        worker = Failing if name == "one" else Constant
        cluster = launcher.start(
            worker, Placement(Role.REWARD, pool="all", workers=1, label=name), name, config
        )
        cluster.call(RewardWorker.start)
        hosted[name] = RewardCluster(config, cluster)
    return RewardRouter(hosted)


class Constant(RewardWorker):
    """Is content with everything."""

    def score(self, sample: Sample, ctx: RewardContext) -> float:
        return 0.5


def test_a_sample_on_which_one_of_its_rewards_failed_has_no_total() -> None:
    with LocalLauncher() as launcher:
        scorer = _scorer(launcher, max_error_rate=1.0)
        scorer.begin_step({"default": 2})
        samples = [sample_of("ok", answer=""), sample_of("fail", answer="")]
        whole, broken = asyncio.run(scorer.score(samples))
        assert (whole.reward, whole.failed) == (1.5, ())
        assert (broken.failed, broken.by_name) == (("one",), {"two": 0.5})


def test_validation_has_a_budget_and_failures_of_its_own() -> None:
    with LocalLauncher() as launcher:
        scorer = _scorer(launcher, max_error_rate=0.5)
        bad, good = [sample_of("fail", answer="")], [sample_of("ok", answer="")]

        async def overlap() -> None:
            for _ in range(2):
                await scorer.score(bad)
            # A validation begins and ends while groups of training are under way.
            await asyncio.to_thread(scorer.begin_step, {"default": 100}, Purpose.VALIDATION)
            await scorer.score([*bad, *good], Purpose.VALIDATION)
            await asyncio.to_thread(scorer.take_rates, Purpose.VALIDATION)
            with pytest.raises(RewardError, match="failed on 3 of the first 3 samples"):
                await scorer.score(bad)

        scorer.begin_step({"default": 4})
        asyncio.run(overlap())
        rates = scorer.take_rates().values_by_name()
        assert rates["reward/one/error_rate"] == 1


@pytest.mark.parametrize("setting", [{"timeout_s": 3}, {"concurrency": 2}])
def test_a_reward_model_refuses_limits_that_it_cannot_keep(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"`{next(iter(setting))}` concerns functions"):
        RewardConfig.model_validate({"model": {"path": "m"}, **setting})
    kept = RewardConfig.model_validate(
        {"model": {"path": "m"}, "max_error_rate": 0.5, "on_error": -1}
    )
    assert (kept.max_error_rate, kept.on_error) == (0.5, -1)


def _loss(update: RolloutBatch) -> float:
    assert update.advantages is not None
    assert update.token_weights is not None
    return float((update.advantages * update.token_weights).abs().sum())


def test_an_empty_completion_of_a_failed_sample_is_assembled() -> None:
    one = fail(group("a", [1, 0], completions=[completion(7), completion()]), 1)
    assert dense(assemble([one])).loss_mask.any(1).tolist() == [True, False]
