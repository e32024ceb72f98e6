"""Every estimator but GAE against brute force and the numbers of its paper, and what all share."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms import (
    Distill,
    Gdpo,
    Gpg,
    Grpo,
    Opo,
    PassK,
    Reinforce,
    ReinforcePp,
    Remax,
    Rloo,
    WinRate,
    build_advantage,
)
from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.advantages.pass_k import pass_k_advantages
from roll.algorithms.loss_interface import AdvantageEstimator
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    DistillConfig,
    GaeConfig,
    GdpoConfig,
    GigpoConfig,
    GpgConfig,
    GrpoConfig,
    Need,
    OpoConfig,
    OtbConfig,
    PassKConfig,
    PrimeConfig,
    ReinforceConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
    TurnGaeConfig,
    WinRateConfig,
)
from roll.core.batches import RolloutBatch
from roll.core.types import Turn

NAN = float("nan")


def full_batch(seed: int, *, rows: int = 7, width: int = 9, paid: bool = True) -> RolloutBatch:
    """Everything an estimator may read; several turns, rows without trained tokens, groups of one,
    and NaN outside the mask."""
    g = torch.Generator().manual_seed(seed)

    def tokens(junk: float = NAN) -> Tensor:
        return torch.randn(rows, width, generator=g).masked_fill(~mask_BT, junk)

    mask_BT = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    weighted_BR = torch.randint(0, 3, (rows, 2), generator=g) / torch.tensor([2.0, 10.0])
    return RolloutBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=torch.full((rows,), width),
        sample_ids=[f"0/{i}/0" for i in range(rows)],
        tags=["x"] * rows,
        group_ids=torch.randint(-2, 2, (rows,), generator=g),
        loss_mask=mask_BT,
        rewards=weighted_BR.sum(1),
        named_rewards=weighted_BR,
        reward_weights=torch.ones(rows, 2),
        baseline_rewards=torch.rand(rows, generator=g),
        token_rewards=tokens() if paid else None,
        rollout_logprobs=tokens(),
        old_logprobs=tokens(float("-inf")),
        squared_probs=tokens(float("inf")),
        teacher_logprobs=tokens(float("inf")),
        values=tokens(),
        implicit_rewards=tokens(),
        turns=[
            (Turn(0, 3, row / 4, "a"), Turn(4, width, -0.5, "b" if row % 2 else ""))
            for row in range(rows)
        ],
    )


CONFIGS: list[AdvantageConfig] = [
    GaeConfig(gamma=0.9, policy_lambda=None, adaptive_alpha=0.5, critic_lambda=0.8),
    GrpoConfig(),
    GrpoConfig(baseline="leave_one_out", std="batch"),
    RlooConfig(),
    PrimeConfig(gamma=0.9, process_coef=0.5),
    GpgConfig(),
    OpoConfig(),
    OtbConfig(),
    PassKConfig(k=2, threshold=0.3),
    WinRateConfig(),
    WinRateConfig(scale=0.3),
    GdpoConfig(eps=1e-3),
    ReinforceConfig(baseline="batch", gamma=0.9),
    ReinforcePpConfig(gamma=0.9),
    ReinforcePpConfig(baseline="group"),
    RemaxConfig(),
    GigpoConfig(),
    TurnGaeConfig(),
    TurnGaeConfig(token_lambda=0.7),
    DistillConfig(mix=0.5),
]
EVERY = [ADVANTAGES.build(config) for config in CONFIGS]
NAMES = [f"{type(estimator).__name__}-{i}" for i, estimator in enumerate(EVERY)]


def given_to(estimator: AdvantageEstimator, seed: int) -> RolloutBatch:
    return full_batch(seed, paid=not isinstance(estimator, Gdpo))


def test_every_registered_estimator_is_tested_here() -> None:
    assert {type(config) for config in CONFIGS} == set(ADVANTAGES)


@pytest.mark.parametrize("estimator", EVERY, ids=NAMES)
@given(seed=st.integers(0, 10_000), columns=st.integers(0, 3))
@settings(max_examples=15)
def test_row_order_and_padding_change_nothing_and_masked_junk_stays_out(
    estimator: AdvantageEstimator, seed: int, columns: int
) -> None:
    batch = given_to(estimator, seed)
    found = estimator(batch)
    assert found.advantages_BT.dtype == torch.float32
    assert torch.isfinite(found.advantages_BT).all()
    assert (found.advantages_BT[~batch.loss_mask] == 0).all()

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    wider: dict[str, Any] = {
        name: pad(getattr(batch, name), [0, columns], value=NAN)
        for name in (
            "rollout_logprobs",
            "old_logprobs",
            "squared_probs",
            "teacher_logprobs",
            "values",
            "implicit_rewards",
        )
    }
    if batch.token_rewards is not None:
        wider["token_rewards"] = pad(batch.token_rewards, [0, columns], value=NAN)
    moved = replace(
        batch,
        tokens=pad(batch.tokens, [0, columns]),
        loss_mask=pad(batch.loss_mask, [0, columns]),
        **wider,
    ).select(order)
    again = estimator(moved)
    width = batch.loss_mask.shape[1]
    assert (again.advantages_BT[:, width:] == 0).all()
    torch.testing.assert_close(
        again.advantages_BT[:, :width], found.advantages_BT[order], rtol=1e-6, atol=1e-6
    )
    if found.returns_BT is not None:
        assert again.returns_BT is not None
        torch.testing.assert_close(
            again.returns_BT[:, :width], found.returns_BT[order], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(
    "estimator",
    [
        Grpo(GrpoConfig()),
        Rloo(RlooConfig()),
        Gpg(GpgConfig()),
        Opo(OpoConfig()),
        PassK(PassKConfig(k=2)),
        WinRate(WinRateConfig()),
        Gdpo(GdpoConfig()),
        ReinforcePp(ReinforcePpConfig(baseline="group")),
    ],
)
def test_equal_rewards_in_a_group_give_exactly_zero(estimator: AdvantageEstimator) -> None:
    batch = replace(
        full_batch(4, paid=False),
        rewards=torch.full((7,), 0.1),
        named_rewards=torch.full((7, 2), 0.05),
    )
    assert not estimator(batch).advantages_BT.any()


def samples(
    rewards: list[float], groups: list[int], lengths: list[int], **columns: Any
) -> RolloutBatch:
    """Rows of trained tokens from position 0 on."""
    rows, width = len(rewards), max(lengths)
    return RolloutBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        sample_ids=[f"0/{i}/0" for i in range(rows)],
        tags=["x"] * rows,
        group_ids=torch.tensor(groups),
        loss_mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        rewards=torch.tensor(rewards),
        **columns,
    )


def first_tokens(estimator: AdvantageEstimator, batch: RolloutBatch) -> list[float]:
    found: list[float] = estimator(batch).advantages_BT[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ([1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ([0.2, 0.5, 0.9, 1.0], [-0.6, -0.2, 1 / 3, 7 / 15]),
        ([0.7], [0.0]),
    ],
)
def test_rloo_measures_a_sample_against_the_mean_of_the_others(
    rewards: list[float], expected: list[float]
) -> None:
    batch = samples(rewards, [5] * len(rewards), [2] * len(rewards))
    assert first_tokens(Rloo(RlooConfig()), batch) == pytest.approx(expected, abs=1e-6)


def test_leaving_one_out_keeps_the_spread_of_the_whole_group() -> None:
    """1 0 0 1 is the reference's golden value; its 1 0 0 0, where the only success is not divided
    by anything, is not followed: there the success counts three times a failure."""
    rewards_B = torch.tensor([1.0, 0, 0, 1])
    ids_B = torch.zeros(4)
    even_B = group_advantages(rewards_B, ids_B, std="group", eps=1e-6, baseline="leave_one_out")
    assert even_B.tolist() == pytest.approx([1.1547, -1.1547, -1.1547, 1.1547], abs=6e-5)
    rewards_B = torch.tensor([1.0, 0, 0, 0])
    lone_B = group_advantages(rewards_B, ids_B, std="group", eps=1e-6, baseline="leave_one_out")
    assert lone_B.tolist() == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3], abs=1e-5)


def test_opo_weights_the_baseline_by_length() -> None:
    """Group 0: (1 * 1 + 3 * 0) / 4 = 0.25; group 1 has one sample."""
    batch = samples([1.0, 0.0, 0.4], [0, 0, 1], [1, 3, 2])
    assert first_tokens(Opo(OpoConfig()), batch) == pytest.approx([0.75, -0.25, 0])
    assert first_tokens(Opo(OpoConfig()), samples([1.0, 0.0], [0, 0], [2, 2])) == [0.5, -0.5]


def pass_k_by_enumeration(success: list[bool], k: int) -> list[float]:
    """Mean advantage over the k-subsets that hold the sample; each subset normalised over all."""
    subsets = list(itertools.combinations(range(len(success)), k))
    rewards = [float(any(success[i] for i in subset)) for subset in subsets]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    if std == 0:
        return [0.0] * len(success)
    return [
        statistics.fmean(
            (reward - mean) / std
            for reward, subset in zip(rewards, subsets, strict=True)
            if i in subset
        )
        for i in range(len(success))
    ]


@given(
    groups=st.lists(st.lists(st.booleans(), min_size=4, max_size=7), min_size=1, max_size=3),
    k=st.integers(1, 4),
)
@settings(max_examples=60)
def test_pass_k_is_the_mean_over_all_subsets(groups: list[list[bool]], k: int) -> None:
    expected = [a for success in groups for a in pass_k_by_enumeration(success, k)]
    ids_B = torch.tensor([i for i, success in enumerate(groups) for _ in success])
    found_B = pass_k_advantages(torch.tensor(list(itertools.chain(*groups))), ids_B, k=k)
    assert found_B.tolist() == pytest.approx(expected, abs=1e-9)


def test_pass_k_counts_total_rewards_above_the_threshold() -> None:
    """4 samples, 1 success, k = 2: f = 3/6, so sqrt(1) for it and -1/3 for the others."""
    batch = samples([0.2, 0.9, 0.5, 0.1], [0] * 4, [1] * 4)
    pass_2 = PassK(PassKConfig(k=2))
    assert first_tokens(pass_2, batch) == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3])
    fined = replace(batch, token_rewards=torch.tensor([[0.0], [-0.8], [0.1], [0.0]]))
    assert first_tokens(pass_2, fined) == pytest.approx([-1 / 3, -1 / 3, 1, -1 / 3])


def test_pass_k_of_a_group_smaller_than_k_is_zero() -> None:
    found_B = pass_k_advantages(torch.tensor([True, False]), torch.zeros(2), k=3)
    assert found_B.tolist() == [0, 0]


def test_gdpo_normalises_each_reward_apart_and_then_the_step() -> None:
    columns = [[1.0, 0.0, 0.0, 1.0, 0.5], [10.0, 30.0, 20.0, 20.0, 70.0]]
    groups = [0, 0, 0, 1, 1]
    weights = (1.0, 0.5)
    batch = samples(
        [0.0] * 5,
        groups,
        [1, 2, 3, 1, 1],
        named_rewards=torch.tensor(columns).T.contiguous(),
        reward_weights=torch.tensor([weights] * 5),
    )
    sums = [0.0] * 5
    for weight, rewards in zip(weights, columns, strict=True):
        for i in range(5):
            siblings = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
            spread = statistics.stdev(siblings) + 1e-6
            sums[i] += weight * (rewards[i] - statistics.fmean(siblings)) / spread
    spread = statistics.stdev(sums) + 1e-6
    expected = [(value - statistics.fmean(sums)) / spread for value in sums]
    assert first_tokens(Gdpo(GdpoConfig()), batch) == pytest.approx(expected, rel=1e-6)


def test_gdpo_refuses_what_it_would_ignore() -> None:
    with pytest.raises(ValueError, match="no place for token_rewards"):
        Gdpo(GdpoConfig())(full_batch(0))


def whitened_by_a_loop(returns: list[list[float]]) -> list[list[float]]:
    flat = [value for row in returns for value in row]
    spread = statistics.stdev(flat) + 1e-6
    return [[(value - statistics.fmean(flat)) / spread for value in row] for row in returns]


def test_reinforce_pp_normalises_over_the_tokens_of_the_step() -> None:
    batch = samples([1.0, 0.5, -1.0], [0, 0, 1], [3, 1, 2])
    found_BT = ReinforcePp(ReinforcePpConfig(gamma=0.5))(batch).advantages_BT
    expected = whitened_by_a_loop([[0.25, 0.5, 1.0], [0.5], [-0.5, -1.0]])
    for row_T, values in zip(found_BT, expected, strict=True):
        assert row_T[: len(values)].tolist() == pytest.approx(values, rel=1e-6)


def test_reinforce_pp_takes_the_mean_of_the_group_off_first() -> None:
    batch = samples([1.0, 0.5, -1.0], [0, 0, 1], [3, 1, 2])
    found_BT = ReinforcePp(ReinforcePpConfig(baseline="group"))(batch).advantages_BT
    expected = whitened_by_a_loop([[0.25] * 3, [-0.25], [0.0] * 2])
    for row_T, values in zip(found_BT, expected, strict=True):
        assert row_T[: len(values)].tolist() == pytest.approx(values, rel=1e-6)


def test_token_rewards_flow_back_from_their_token() -> None:
    paid_BT = torch.tensor([[0.1, 0.2, 0.4], [0.8, NAN, NAN]])
    batch = samples([1.0, 2.0], [0, 1], [3, 1], token_rewards=paid_BT)
    found_BT = Reinforce(ReinforceConfig(gamma=0.5))(batch).advantages_BT
    # 0.4 + 1; 0.2 + half of that; 0.1 + half of that.
    torch.testing.assert_close(found_BT, torch.tensor([[0.55, 0.9, 1.4], [2.8, 0, 0]]))
    centred_BT = Reinforce(ReinforceConfig(baseline="batch"))(batch).advantages_BT
    torch.testing.assert_close(centred_BT, torch.tensor([[0.2, 0.1, -0.1], [1.3, 0, 0]]))


def test_token_rewards_are_part_of_the_reward_of_a_sample() -> None:
    paid_BT = torch.tensor([[0.1, 0.2], [0.5, NAN]])
    batch = samples([1.0, 0.0], [0, 0], [2, 1], token_rewards=paid_BT)
    # Totals 1.3 and 0.5.
    assert first_tokens(Grpo(GrpoConfig(std="none")), batch) == pytest.approx([0.4, -0.4])
    assert first_tokens(Rloo(RlooConfig()), batch) == pytest.approx([0.8, -0.8])
    # Baseline (2 * 1.3 + 0.5) / 3.
    assert first_tokens(Opo(OpoConfig()), batch) == pytest.approx([1.3 - 3.1 / 3, 0.5 - 3.1 / 3])


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    batch = samples([1.0, 0.5], [0, 1], [2, 1], baseline_rewards=torch.tensor([0.25, 1.0]))
    assert Remax(RemaxConfig())(batch).advantages_BT.tolist() == [[0.75, 0.75], [-0.5, 0]]
    paid = replace(batch, token_rewards=torch.tensor([[-0.5, 0.25], [0.0, NAN]]))
    assert Remax(RemaxConfig())(paid).advantages_BT.tolist() == [[0.5, 1.0], [-0.5, 0]]
    with pytest.raises(ValueError, match="baseline_rewards is not set"):
        Remax(RemaxConfig())(replace(batch, baseline_rewards=None))


def teacher_batch() -> RolloutBatch:
    return samples(
        [1.0, 0.0],
        [0, 0],
        [2, 1],
        teacher_logprobs=torch.tensor([[-1.0, -2.0], [-0.5, NAN]]),
        rollout_logprobs=torch.tensor([[-1.5, -1.0], [-0.25, NAN]]),
    )


def test_pure_distillation_pays_each_token_what_the_teacher_thinks_of_it() -> None:
    batch = teacher_batch()
    expected = [[0.5, -1.0], [-0.25, 0]]
    assert Distill(DistillConfig())(batch).advantages_BT.tolist() == expected
    # No reward takes part.
    assert Distill(DistillConfig())(replace(batch, rewards=None)).advantages_BT.tolist() == expected
    scaled_BT = Distill(DistillConfig(coef=2.0))(batch).advantages_BT
    assert scaled_BT.tolist() == [[1.0, -2.0], [-0.5, 0]]


def test_distillation_prefers_the_trainers_own_log_probs() -> None:
    batch = replace(teacher_batch(), old_logprobs=torch.tensor([[-1.0, -2.0], [-0.5, NAN]]))
    assert not Distill(DistillConfig())(batch).advantages_BT.any()
    with pytest.raises(ValueError, match="rollout_logprobs is not set"):
        Distill(DistillConfig())(replace(teacher_batch(), rollout_logprobs=None))
    with pytest.raises(ValueError, match="teacher_logprobs is not set"):
        Distill(DistillConfig())(replace(teacher_batch(), teacher_logprobs=None))


def test_mixed_distillation_adds_the_advantage_of_grpo() -> None:
    batch = teacher_batch()
    mixed_BT = Distill(DistillConfig(coef=0.1, mix=2.0))(batch).advantages_BT
    expected_BT = (
        0.1 * Distill(DistillConfig())(batch).advantages_BT
        + 2.0 * Grpo(GrpoConfig())(batch).advantages_BT
    )
    torch.testing.assert_close(mixed_BT, expected_BT)


def test_distillation_is_on_average_the_negative_reverse_kl() -> None:
    policy, teacher = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    batch = samples(
        [0.0] * 3,
        [0, 1, 2],
        [1] * 3,
        teacher_logprobs=torch.tensor(teacher).log()[:, None],
        rollout_logprobs=torch.tensor(policy).log()[:, None],
    )
    found = first_tokens(Distill(DistillConfig()), batch)
    mean = math.fsum(p * a for p, a in zip(policy, found, strict=True))
    kl = math.fsum(p * math.log(p / q) for p, q in zip(policy, teacher, strict=True))
    assert mean == pytest.approx(-kl, rel=1e-5)


def test_settings_decide_what_a_choice_needs() -> None:
    def needs(advantage: ReinforcePpConfig | DistillConfig) -> set[Need]:
        return set(AlgorithmConfig(advantage=advantage).needs) - {Need.RATIO}

    assert Need.SIBLINGS not in needs(ReinforcePpConfig())
    assert Need.SIBLINGS in needs(ReinforcePpConfig(baseline="group"))
    assert Need.SIBLINGS not in needs(DistillConfig())
    assert {Need.SIBLINGS, Need.TEACHER} <= needs(DistillConfig(mix=0.5))


def test_every_config_builds_the_estimator_of_its_kind() -> None:
    grpo, gdpo = GrpoConfig(baseline="leave_one_out", std="none"), GdpoConfig(eps=1e-3)
    assert build_advantage(AlgorithmConfig(advantage=grpo)) == Grpo(grpo)
    assert build_advantage(AlgorithmConfig(advantage=PassKConfig(k=4))) == PassK(PassKConfig(k=4))
    assert build_advantage(AlgorithmConfig(advantage=gdpo)) == Gdpo(gdpo)
