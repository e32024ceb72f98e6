"""Against numbers of verl 0.9.1, computed once with the functions that each test names.

Losses are compared by their gradients, because their values are not the same thing: ours are A
times a weight, some of theirs A times a weight times log p. Everything is float32 and rounded to
six digits; their standard deviations carry an epsilon of 1e-8 under the root, ours 1e-6 beside it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roll.algorithms import (
    ClippedValueLoss,
    build_advantage,
    build_loss,
    build_shaping,
    token_weights,
)
from roll.algorithms.advantages.gdpo import gdpo_advantages
from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.loss_interface import PolicyTerms, ValueTerms
from roll.algorithms.registries import KL_ESTIMATORS
from roll.config.algorithm import Aggregation, AlgorithmConfig, ValueLossConfig
from roll.core.batches import RolloutBatch

# Four responses of two prompts; the third has an observation between its two turns.
MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 0]]
OLD = [
    [0.5, 1.2, 0.3, 2.0, 0.7],
    [1.0, 0.4, 0.9, 0, 0],
    [0.2, 1.5, 0, 0.6, 0],
    [0.8, 0.1, 1.1, 0.4, 0],
]
GAP = [
    [0.1, -0.3, 0.4, 0.05, -0.02],
    [0.3, -0.1, 0.02, 0, 0],
    [-0.4, 0.25, 0, 0.1, 0],
    [0.02, -0.25, 1.3, -0.05, 0],
]
VALUES = [
    [0.3, -0.2, 0.5, 0.1, 0.4],
    [0.6, 0.2, -0.1, 9, 9],
    [0.0, 0.7, 9, 0.2, 9],
    [-0.3, 0.4, 0.1, 0.8, 9],
]
REWARDS = [1.0, 0.25, -0.5, 0.75]
ADVANTAGES = [1.5, -0.5, 0.8, -1.2]


def golden_batch() -> RolloutBatch:
    mask_BT = torch.tensor(MASK).bool()
    return RolloutBatch(
        tokens=torch.arange(20).view(4, 5),
        lengths=torch.tensor([5, 3, 4, 4]),
        sample_ids=["0/0", "0/1", "1/0", "1/1"],
        tags=["x"] * 4,
        group_ids=torch.tensor([0, 0, 1, 1]),
        loss_mask=mask_BT,
        rewards=torch.tensor(REWARDS),
        baseline_rewards=torch.tensor([0.5, 0.0, 0.25, 0.75]),
        values=torch.tensor(VALUES),
        old_logprobs=-torch.tensor(OLD),
        advantages=torch.tensor(ADVANTAGES)[:, None] * mask_BT,
    )


def close(found: Tensor, golden: list[list[float]], atol: float = 2e-6) -> None:
    torch.testing.assert_close(found.float(), torch.tensor(golden).float(), rtol=1e-5, atol=atol)


LOSSES_OF_VERL: list[tuple[str, dict[str, float | str | None], Aggregation, list[list[float]]]] = [
    (  # compute_policy_loss_vanilla, clip 0.2 and 0.28, dual clip 3
        "ppo_clip", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, Aggregation.TOKEN_MEAN,
        [[-0.110517, -0.074082, 0, -0.105127, -0.09802], [0.044995, 0.030161, 0.034007, 0, 0],
         [-0.03575, 0, 0, -0.058942, 0], [0.081616, 0, 0, 0.076098, 0]],
    ),
    (  # compute_policy_loss_gspo; it has the gradient of GSPO-token, the same with one A per row
        "gspo", {"clip_low": 0.05, "clip_high": 0.06}, Aggregation.SEQUENCE_MEAN,
        [[-0.078531] * 5, [0.044837] * 3 + [0, 0],
         [-0.065565, -0.065565, 0, -0.065565, 0], [0.096785] * 4 + [0]],
    ),
    (  # compute_policy_loss_geo_mean
        "gmpo", {"clip_low": 0.2, "clip_high": 0.2}, Aggregation.SEQUENCE_MEAN,
        [[-0.075451, -0.075451, 0, -0.075451, -0.075451], [0.044837] * 3 + [0, 0],
         [-0.064481, 0, 0, -0.064481, 0], [0.098002, 0, 0.098002, 0.098002, 0]],
    ),
    (  # compute_policy_loss_cispo; clip_ratio_low 1 there is no lower bound
        "cispo", {"clip_low": None, "clip_high": 0.2}, Aggregation.TOKEN_MEAN,
        [[-0.110517, -0.074082, -0.12, -0.105127, -0.09802], [0.04, 0.030161, 0.034007, 0, 0],
         [-0.03575, -0.064, 0, -0.058942, 0], [0.081616, 0.062304, 0.096, 0.076098, 0]],
    ),
    (  # compute_policy_loss_sapo
        "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, Aggregation.SEQUENCE_MEAN,
        [[-0.082659, -0.054639, -0.105384, -0.078794, -0.073508],
         [0.054389, 0.037608, 0.042504, 0, 0], [-0.043495, -0.083898, 0, -0.073475, 0],
         [0.076507, 0.057629, 0.059339, 0.071295, 0]],
    ),
    (  # compute_policy_loss_dro, dro_beta 0.4: it squares the gap to the OLD policy token by token,
       # which is Kimi's loss; the paper's DRO, and ours, has the reference there
        "kimi", {"tau": 0.4, "level": "token"}, Aggregation.TOKEN_MEAN,
        [[-0.097333, -0.108, -0.089333, -0.098667, -0.100533], [0.041333, 0.030667, 0.033867, 0, 0],
         [-0.064, -0.046667, 0, -0.050667, 0], [0.080533, 0.073333, 0.114667, 0.078667, 0]],
    ),
    (  # compute_policy_loss_gpg
        "pg", {}, Aggregation.TOKEN_MEAN,
        [[-0.1] * 5, [0.033333] * 3 + [0, 0],
         [-0.053333, -0.053333, 0, -0.053333, 0], [0.08] * 4 + [0]],
    ),
    (  # compute_policy_loss_kl_cov, 1 of 15 tokens, ppo_kl_coef 0.5. It takes the covariance from
       # the new log-probs of a micro-batch, ours from the old ones of the update: the settings of
       # this case and the next choose the same token either way
        "kl_cov", {"fraction": 0.1, "penalty": 0.5}, Aggregation.TOKEN_MEAN,
        [[-0.110517, -0.074082, -0.115849, -0.105127, -0.09802],
         [0.044995, 0.030161, 0.034007, 0, 0], [-0.03575, -0.068481, 0, -0.058942, 0],
         [0.081616, 0.062304, 0.293544, 0.076098, 0]],
    ),
    (  # compute_policy_loss_clip_cov
        "clip_cov",
        {"clip_low": 0.2, "clip_high": 0.28, "fraction": 0.2, "cov_low": 0.33, "cov_high": 0.4},
        Aggregation.TOKEN_MEAN,
        [[0, -0.074082, 0, -0.105127, -0.09802], [0.044995, 0.030161, 0.034007, 0, 0],
         [-0.03575, 0, 0, -0.058942, 0], [0.081616, 0, 0.293544, 0.076098, 0]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "aggregation", "golden"), LOSSES_OF_VERL)
def test_losses_have_the_gradients_of_verl(
    kind: str,
    options: dict[str, float | str | None],
    aggregation: Aggregation,
    golden: list[list[float]],
) -> None:
    loss = build_loss(AlgorithmConfig.model_validate({"loss": ({"kind": kind, **options},)}))
    batch = loss.prepare(golden_batch())
    assert batch.old_logprobs is not None
    leaf_BT = (batch.old_logprobs + torch.tensor(GAP)).requires_grad_()
    weights_BT = token_weights(batch.loss_mask, aggregation)
    (loss(PolicyTerms(leaf_BT), batch).loss_BT * weights_BT).sum().backward()
    assert leaf_BT.grad is not None
    close(leaf_BT.grad, golden)


def test_advantages_are_those_of_verl() -> None:
    """compute_*_outcome_advantage; its REINFORCE++ and ReMax fill masked tokens, ours hold 0."""
    row = {
        "grpo": [0.707105, -0.707105, -0.707106, 0.707106],
        "rloo": [0.75, -0.75, -1.25, 1.25],
        "opo": [0.28125, -0.46875, -0.714286, 0.535714],
        "remax": [0.5, 0.25, -0.75, 0.0],
    }
    for kind, golden in row.items():
        found = estimate({"kind": kind})
        close(found, [[x * m for m in mask] for x, mask in zip(golden, MASK, strict=True)])
    close(
        estimate({"kind": "grpo", "std": "none"}),
        [[0.375] * 5, [-0.375] * 3 + [0, 0], [-0.625, -0.625, 0, -0.625, 0], [0.625] * 4 + [0]],
    )


def test_reinforce_pp_is_that_of_verl() -> None:
    """compute_reinforce_plus_plus_outcome_advantage with gamma 0.9, and its group baseline."""
    close(
        estimate({"kind": "reinforce_pp", "gamma": 0.9}),
        [
            [0.513553, 0.659618, 0.821913, 1.00224, 1.202604],
            [-0.395298, -0.350216, -0.300125, 0, 0],
            [-1.612508, -1.702672, 0, -1.802854, 0],
            [0.294455, 0.416176, 0.551421, 0.701694, 0],
        ],
        atol=1e-5,
    )
    close(
        estimate({"kind": "reinforce_pp", "baseline": "group"}),
        [
            [0.548673] * 5,
            [-0.903696] * 3 + [0, 0],
            [-1.387819, -1.387819, 0, -1.387819, 0],
            [1.032796] * 4 + [0],
        ],
        atol=1e-5,
    )


def test_gae_whitened_and_its_returns_are_those_of_verl() -> None:
    """compute_gae_advantage_return with gamma 0.99 and lambda 0.9, over the observation as well."""
    config = AlgorithmConfig.model_validate(
        {
            "advantage": {"kind": "gae", "gamma": 0.99, "policy_lambda": 0.9},
            "advantage_shaping": ({"kind": "whiten"},),
        }
    )
    shaping = build_shaping(config, max_new_tokens=8)
    shaped, _ = shaping.add_advantages(golden_batch(), build_advantage(config))
    assert shaped.advantages is not None
    assert shaped.returns is not None
    close(
        shaped.advantages,
        [
            [0.330228, 1.316367, 0.246749, 1.045718, 0.670888],
            [-0.939209, -0.283499, 0.264524, 0, 0],
            [-0.808275, -2.134162, 0, -1.442205, 0],
            [1.22648, 0.144041, 0.748015, -0.385659, 0],
        ],
        atol=1e-5,
    )
    close(
        shaped.returns,
        [
            [0.690422, 0.797107, 0.839065, 0.9306, 1.0],
            [0.209449, 0.21285, 0.25, 0, 0],
            [-0.309999, -0.4257, 0, -0.5, 0],
            [0.641807, 0.675878, 0.74745, 0.75, 0],
        ],
    )


def test_gdpo_is_that_of_verl_where_responses_have_one_token() -> None:
    """compute_gdpo_outcome_advantage, weights 1 and 0.5. It normalises the sum over tokens, so long
    responses count more; ours, as the paper, over samples."""
    rewards_BR = torch.tensor([[1.0, 0.2], [0.0, 0.9], [1.0, 0.4], [1.0, 0.1]])
    found_B = gdpo_advantages(
        rewards_BR, torch.tensor([0, 0, 1, 1]), torch.tensor([[1.0, 0.5]] * 4), eps=1e-6
    )
    close(found_B[:, None], [[0.866027], [-0.866027], [0.866024], [-0.866024]], atol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [-25, -3, -0.5, 0, 0.2, 4, 25], [1] * 7),
        ("k2", [312.5, 4.5, 0.125, 0, 0.02, 8, 312.5], [-25, -3, -0.5, 0, 0.2, 4, 25]),
        (
            "k3",
            [10, 10, 0.148721, 0, 0.018731, 3.018316, 10],
            [0, 0, -0.648721, 0, 0.181269, 0.981684, 0],
        ),
        (
            "k3_k2grad",
            [10, 10, 0.148721, 0, 0.018731, 3.018316, 10],
            [-25, -3, -0.5, 0, 0.2, 4, 25],
        ),
    ],
)
def test_divergences_and_their_gradients_are_those_of_verl(
    estimator: str, values: list[float], gradients: list[float]
) -> None:
    """kl_penalty, where k3_k2grad is called k3+."""
    leaf = torch.tensor([[-25.0, -3.0, -0.5, 0.0, 0.2, 4.0, 25.0]], requires_grad=True)
    found = KL_ESTIMATORS[estimator](leaf, torch.zeros(1, 7))
    found.sum().backward()
    assert leaf.grad is not None
    close(found.detach(), [values])
    close(leaf.grad, [gradients])


@pytest.mark.parametrize(
    ("mode", "golden"),
    [
        (Aggregation.TOKEN_MEAN, 9.533333778381348),
        (Aggregation.SEQUENCE_SUM, 35.75),
        (Aggregation.SEQUENCE_MEAN, 9.958333015441895),
        (Aggregation.CONSTANT, 4.46875),
    ],
)
def test_aggregations_are_those_of_verl(mode: Aggregation, golden: float) -> None:
    """agg_loss of 1, 2, ... 20; seq-mean-token-sum-norm with loss_scale_factor 8 is `constant`."""
    losses_BT = torch.arange(1.0, 21.0).view(4, 5)
    weights_BT = token_weights(torch.tensor(MASK).bool(), mode, max_tokens=8)
    assert (losses_BT * weights_BT).sum().item() == pytest.approx(golden, rel=1e-6)


def test_the_value_loss_is_that_of_verl() -> None:
    """compute_value_loss with cliprange_value 0.2."""
    moved_BT = torch.tensor(
        [
            [0.1, 0.5, -0.3, 0, 0.25],
            [0, 0.4, -0.1, 0, 0],
            [0.3, -0.3, 0, 0.6, 0],
            [0.1, 0.1, -0.4, 0.15, 0],
        ]
    )
    config = AlgorithmConfig.model_validate(
        {"advantage": {"kind": "gae", "gamma": 0.99, "policy_lambda": 0.9}}
    )
    batch = golden_batch()
    batch = replace(batch, returns=build_advantage(config)(batch).returns_BT)
    leaf_BT = (torch.tensor(VALUES) + moved_BT).requires_grad_()
    found = ClippedValueLoss(ValueLossConfig(clip=0.2))(ValueTerms(leaf_BT), batch)
    weights_BT = token_weights(batch.loss_mask, Aggregation.TOKEN_MEAN)
    loss = (found.loss_BT * weights_BT).sum()
    loss.backward()
    assert leaf_BT.grad is not None
    assert loss.item() == pytest.approx(0.24262269, rel=1e-6)
    close(
        leaf_BT.grad,
        [
            [-0.019361, 0, -0.042604, -0.055373, 0],
            [0.026037, 0.02581, -0.03, 0, 0],
            [0.040667, 0, 0, 0.086667, 0],
            [-0.05612, -0.011725, -0.06983, 0.013333, 0],
        ],
    )


def test_the_reference_numbers_of_trl_need_its_epsilon_alone() -> None:
    """GRPO with the spread of the group and 1e-4 beside it, as TRL 1.16.0 has it, by hand."""
    for rewards, golden in (
        ([1, 0, 0, 1], [0.8659, -0.8659, -0.8659, 0.8659]),
        ([1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ([0.2, 0.5, 0.9, 1], [-1.2169, -0.4056, 0.6761, 0.9465]),
    ):
        found_B = group_advantages(
            torch.tensor(rewards, dtype=torch.float64), torch.zeros(4), std="group", eps=1e-4
        )
        assert found_B.tolist() == pytest.approx(golden, abs=6e-5)


def estimate(advantage: dict[str, object]) -> Tensor:
    config = AlgorithmConfig.model_validate({"advantage": advantage})
    return build_advantage(config)(golden_batch()).advantages_BT
