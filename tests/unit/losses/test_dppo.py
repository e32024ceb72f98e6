"""DPPO (arXiv 2602.04879): the divergence that it bounds, and which tokens lose their gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import kl_div

from roll.algorithms import Dppo, PpoClip
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.policy.dppo import binary_divergence
from roll.algorithms.registries import LossTerm
from roll.config.algorithm import DppoConfig, PpoClipConfig
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch

Kind = Literal["tv", "kl"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 12))
@settings(max_examples=60)
def test_the_binary_divergence_is_a_lower_bound_of_the_true_one(seed: int, vocabulary: int) -> None:
    g = torch.Generator().manual_seed(seed)
    old_TV, new_TV = 2 * torch.randn(2, 20, vocabulary, generator=g, dtype=torch.float64)
    old_TV, new_TV = old_TV.log_softmax(-1), new_TV.log_softmax(-1)
    token_T1 = torch.randint(0, vocabulary, (20, 1), generator=g)
    old_1T, new_1T = (logprobs.gather(1, token_T1).T for logprobs in (old_TV, new_TV))
    variation_T = (old_TV.exp() - new_TV.exp()).abs().sum(1) / 2
    divergence_T = kl_div(new_TV, old_TV, log_target=True, reduction="none").sum(1)
    true: dict[Kind, Tensor] = {"tv": variation_T, "kl": divergence_T}
    for kind, true_T in true.items():
        binary_T = binary_divergence(old_1T, new_1T, kind)[0]
        assert (binary_T <= true_T + 1e-12).all()
        if vocabulary == 2:  # there is only one other token
            torch.testing.assert_close(binary_T, true_T)


@pytest.mark.parametrize("kind", KINDS)
def test_certain_tokens_have_a_finite_divergence(kind: Kind) -> None:
    old_BT = torch.tensor([[0.0, 0.0, -0.1, -1e-9, -80.0]])
    new_BT = torch.tensor([[0.0, -0.1, 0.0, 0.0, 0.0]])
    found_BT = binary_divergence(old_BT, new_BT, kind)
    assert found_BT.isfinite().all()
    assert found_BT[0, 0] == 0
    assert found_BT[0, 3] == 0
    assert (found_BT[0, [1, 2, 4]] > 0.05).all()


def update(old: float, new: float, advantage: float) -> tuple[Tensor, RolloutBatch]:
    """One trained token, with probabilities, and its new log-prob."""
    batch = rollout_batch(1, prompt=1, longest=1)
    ones_BT = torch.ones(batch.tokens.shape)
    return math.log(new) * ones_BT, replace(
        batch,
        old_logprobs=math.log(old) * ones_BT,
        advantages=advantage * batch.loss_mask,
    )


def slope(term: LossTerm, old: float, new: float, advantage: float) -> float:
    """The gradient by the token's log-prob."""
    new_BT, batch = update(old, new, advantage)
    leaf_BT = new_BT.clone().requires_grad_()
    term(PolicyTerms(leaf_BT), batch).loss_BT[batch.loss_mask].sum().backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad[batch.loss_mask].item()


@pytest.mark.parametrize("config", [DppoConfig(threshold=0.15), DppoConfig(divergence="kl")])
def test_rare_tokens_may_move_where_likely_ones_may_not(config: DppoConfig) -> None:
    """The two tokens of section 4.2: PPO stops the first and lets the second go on."""
    rare, likely = (1e-4, 1e-2, 1.0), (0.99, 0.80, -1.0)
    ppo, dppo = PpoClip(PpoClipConfig()), Dppo(config)
    assert slope(ppo, *rare) == 0
    assert slope(ppo, *likely) != 0
    assert slope(dppo, *rare) == pytest.approx(-5.0)  # the ratio is 100, its bound 5
    assert slope(dppo, *likely) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_may_always_come_back(kind: Kind) -> None:
    dppo = Dppo(DppoConfig(divergence=kind, upper=None))
    assert slope(dppo, 0.2, 0.9, 1.0) == 0
    assert slope(dppo, 0.2, 0.9, -1.0) == pytest.approx(4.5)
    assert slope(dppo, 0.9, 0.2, -1.0) == 0
    assert slope(dppo, 0.9, 0.2, 1.0) == pytest.approx(-2 / 9)


def test_the_thresholds_that_are_left_out_are_those_of_the_paper() -> None:
    assert DppoConfig().bound == 0.2
    assert DppoConfig(divergence="kl").bound == 0.05
    assert DppoConfig(divergence="kl", threshold=0.3).bound == 0.3


def test_metrics_tell_the_divergence_and_the_share_of_lost_tokens() -> None:
    new_BT, batch = update(0.2, 0.9, 1.0)
    seen = Dppo(DppoConfig())(PolicyTerms(new_BT), batch).metrics_BT
    mask_BT = batch.loss_mask
    assert seen["clip_fraction"][mask_BT].tolist() == [1]
    assert seen["dppo/divergence"][mask_BT].tolist() == pytest.approx([0.7])
    assert seen["ratio/mean"][mask_BT].tolist() == pytest.approx([4.5])
