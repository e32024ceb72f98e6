"""Groups to a batch, and the numbers that describe a rollout, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import FinishReason
from roll.core.types import Prompt
from roll.rollout.assemble import assemble, reward_metrics, rollout_metrics
from roll.rollout.dense import dense
from roll.rollout.episodes.results import without_reward
from roll.rollout.filters import equal_rewards
from roll.rollout.types import Group, GroupTask, ScoredSample
from tests.fakes import completion, group


def two_groups() -> list[Group]:
    first = group(
        "a",
        [1.0, 0.0],
        completions=[
            completion(7, 8, 1, version=2),
            completion(9, version=1, finish=FinishReason.LENGTH),
        ],
    )
    second = group("b", [0.5], completions=[completion(5, 1, version=2)], tag="other")
    return [first, replace(second, prompt=second.prompt)]


def test_a_batch_holds_prompt_response_and_padding() -> None:
    batch = dense(assemble(two_groups()))
    assert batch.tokens.tolist() == [
        [0, 1, 2, 7, 8, 1],
        [0, 1, 2, 9, 0, 0],
        [0, 1, 2, 5, 1, 0],
    ]
    assert batch.lengths.tolist() == [6, 4, 5]
    assert batch.loss_mask.int().tolist() == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
    ]
    assert batch.rollout_logprobs is not None
    assert torch.equal(batch.rollout_logprobs, -0.5 * batch.loss_mask)
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.sample_ids == ["0/a/0", "0/a/1", "0/b/0"]
    assert batch.tags == ["default", "default", "other"]
    assert batch.rewards is not None
    assert batch.rewards.tolist() == [1, 0, 0.5]


def test_a_response_without_tokens_trains_nothing() -> None:
    groups = [group("a", [0.0, 1.0], completions=[completion(), completion(4)])]
    batch = dense(assemble(groups))
    assert batch.lengths.tolist() == [3, 4]
    assert batch.loss_mask.sum(1).tolist() == [0, 1]


def test_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        assemble([])


def test_rollout_metrics_match_hand_worked_numbers() -> None:
    found = rollout_metrics(two_groups(), current_version=3).values_by_name()
    assert found == {
        "groups/equal_rewards_fraction": 0.5,
        "prompt_tokens/mean": 3,
        "response_tokens/max": 3,
        "response_tokens/mean": 2,
        "samples/left_out": 0,
        "reward/mean": 0.5,
        "reward/std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/tag/default/mean": 0.5,
        "reward/tag/other/mean": 0.5,
        "staleness/max": 2,
        "staleness/mean": pytest.approx(7 / 6),
        "truncated_fraction": pytest.approx(1 / 3),
        "tag/default/groups/equal_rewards_fraction": 0,
        "tag/default/response_tokens/mean": 2,
        "tag/default/samples_fraction": pytest.approx(2 / 3),
        "tag/default/truncated_fraction": 0.5,
        "tag/other/groups/equal_rewards_fraction": 1,
        "tag/other/response_tokens/mean": 2,
        "tag/other/samples_fraction": pytest.approx(1 / 3),
        "tag/other/truncated_fraction": 0,
    }


def test_episodes_that_failed_have_no_length_and_those_whose_reward_failed_have() -> None:
    task = GroupTask(Prompt("lake:3", (), "", "", "lake", {"seed": 3}), step=5)
    nothing = without_reward("5/lake:3/0", task, "lake", EnvironmentConfig(env="x"))
    whole = two_groups()[0]
    first, second = whole.samples
    unscored = replace(first, failed=("judge",))
    both = replace(whole, samples=(unscored, second, *nothing))
    found = rollout_metrics([both], current_version=3).values_by_name()
    assert found["samples/left_out"] == 2
    assert found["response_tokens/mean"] == 2
    assert found["prompt_tokens/mean"] == 3
    assert found["truncated_fraction"] == 0.5
    none = rollout_metrics([replace(whole, samples=tuple(nothing))], current_version=3)
    assert none.values_by_name()["response_tokens/mean"] == 0


def test_each_reward_and_its_parts_are_averaged_over_the_samples_that_have_them() -> None:
    base = group("a", [1.0, 0.0, 3.0]).samples
    rows = [
        ScoredSample(base[0].sample, 1.0, {"math/boxed": 1.0}, {"math": 1.0}),
        ScoredSample(base[1].sample, 0.0, {"math/boxed": 0.0}, {"math": 0.0}),
        ScoredSample(base[2].sample, 3.0, {}, {"judge": 1.5}),
    ]
    found = reward_metrics(rows).values_by_name()
    assert found["reward/math/mean"] == 0.5
    assert found["reward/math/boxed"] == 0.5
    assert found["reward/judge/mean"] == 1.5
    assert "reward/tag/default/mean" not in found


def test_only_groups_with_equal_rewards_are_dropped() -> None:
    assert equal_rewards(group("a", [1.0, 1.0, 1.0])) == "all rewards equal to 1"
    assert equal_rewards(group("a", [1.0, 1.0, 0.999])) is None
