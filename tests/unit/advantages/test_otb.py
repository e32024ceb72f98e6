"""OTB (arXiv 2602.07078) against gradients of logits and loops in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms import Otb
from roll.config.algorithm import OtbConfig
from roll.core.batches import RolloutBatch
from tests.unit.advantages.test_advantage_families import samples

V = 7


def squared_gradient(logits_V: Tensor, token: int) -> float:
    """Squared norm of the gradient of the token's log-prob by the logits, by autograd."""
    leaf_V = logits_V.clone().requires_grad_()
    leaf_V.log_softmax(-1)[token].backward()
    assert leaf_V.grad is not None
    return float(leaf_V.grad.square().sum())


def drawn(lengths: list[int], rewards: list[float], ids: list[int]) -> tuple[RolloutBatch, Tensor]:
    """A batch whose distributions come of random logits, and the energy of each token."""
    g = torch.Generator().manual_seed(3)
    batch = samples(rewards, ids, lengths)
    shape = batch.tokens.shape
    logits = 3 * torch.randn(*shape, V, generator=g, dtype=torch.float64)
    chosen_BT = torch.randint(0, V, shape, generator=g)
    logp = logits.log_softmax(-1)
    energy_BT = torch.zeros(shape, dtype=torch.float64)
    for b, t in batch.loss_mask.nonzero().tolist():
        energy_BT[b, t] = squared_gradient(logits[b, t], int(chosen_BT[b, t]))
    return replace(
        batch,
        old_logprobs=logp.gather(-1, chosen_BT[..., None])[..., 0],
        squared_probs=logp.exp().square().sum(-1),
    ), energy_BT


def by_loops(
    energy: list[list[float]], returns: list[list[float]], ids: list[int]
) -> list[list[float]]:
    """G - sum(W * G) / sum(W), over the siblings that have a t-th token."""
    found: list[list[float]] = []
    for own, group in zip(returns, ids, strict=True):
        row = []
        for t, gain in enumerate(own):
            there = [i for i, other in enumerate(ids) if other == group and len(returns[i]) > t]
            weights = {i: sum(energy[i][: t + 1]) for i in there}
            baseline = sum(weights[i] * returns[i][t] for i in there) / sum(weights.values())
            row.append(gain - baseline)
        found.append(row)
    return found


def test_the_baseline_is_weighted_by_the_gradients_so_far() -> None:
    lengths, ids = [3, 5, 4, 2, 3], [0, 0, 0, 1, 1]
    batch, energy_BT = drawn(lengths, [1.0, 0.0, 0.25, 1.0, 0.5], ids)
    paid_BT = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, token_rewards=paid_BT)
    assert batch.rewards is not None
    energy, returns = [], []
    for row, length in enumerate(lengths):
        energy.append(energy_BT[row, :length].tolist())
        own = [float(paid_BT[row, t:length].sum() + batch.rewards[row]) for t in range(length)]
        returns.append(own)
    found_BT = Otb(OtbConfig(eps=1e-14))(batch).advantages_BT
    for row, want in enumerate(by_loops(energy, returns, ids)):
        assert found_BT[row, : lengths[row]].tolist() == pytest.approx(want, abs=1e-6)
    assert found_BT[1, 4] == 0  # nobody else is as long


def test_tokens_are_compared_by_their_number_not_by_their_place() -> None:
    """A prompt that is longer, and what an environment writes in between, move nothing."""
    batch, _ = drawn([3, 3], [1.0, 0.0], [0, 0])
    plain_BT = Otb(OtbConfig())(batch).advantages_BT
    at = torch.tensor([[1, 2, 5], [0, 3, 4]])
    wide_BT: dict[str, Any] = {"loss_mask": torch.zeros(2, 6, dtype=torch.bool)}
    wide_BT["loss_mask"].scatter_(1, at, value=True)
    for name in ("old_logprobs", "squared_probs"):
        filled = torch.full((2, 6), torch.nan, dtype=torch.float64)
        wide_BT[name] = filled.scatter(1, at, getattr(batch, name))
    moved = replace(
        batch, tokens=torch.zeros(2, 6, dtype=torch.int64), lengths=torch.tensor([6, 6]), **wide_BT
    )
    moved_BT = Otb(OtbConfig())(moved).advantages_BT
    torch.testing.assert_close(moved_BT.gather(1, at), plain_BT)


def test_certain_tokens_leave_the_plain_mean() -> None:
    batch = samples([1.0, 0.0, 0.5], [0, 0, 0], [1, 1, 1])
    batch = replace(batch, old_logprobs=torch.zeros(3, 1), squared_probs=torch.ones(3, 1))
    found_BT = Otb(OtbConfig())(batch).advantages_BT
    torch.testing.assert_close(found_BT, torch.tensor([[0.5], [-0.5], [0.0]]))


def test_what_is_missing_is_named() -> None:
    batch, _ = drawn([1, 1], [1.0, 0.0], [0, 0])
    with pytest.raises(ValueError, match="squared_probs is not set"):
        Otb(OtbConfig())(replace(batch, squared_probs=None))
