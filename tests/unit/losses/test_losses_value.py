"""The critic's loss against numbers worked by hand, a loop and finite differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roll.algorithms import ClippedValueLoss, explained_variance
from roll.algorithms.loss_interface import ValueTerms
from roll.config.algorithm import ValueLossConfig
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch


def one_token(*, old: float, returns: float) -> RolloutBatch:
    batch = rollout_batch(1, prompt=0, longest=1)
    return replace(
        batch,
        values=torch.tensor([[old]], dtype=torch.float64),
        returns=torch.tensor([[returns]], dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("value", "loss", "clipped", "gradient"),
    [
        (1.0, 0.5, 0, -1.0),  # the old value: plain squared error
        (1.1, 0.405, 0, -0.9),
        (1.5, 0.32, 1, 0.0),  # past the bound towards the return: counts as 1.2
        (3.0, 0.5, 0, 1.0),  # past the return: the plain error is larger
        (0.5, 1.125, 0, -1.5),  # away from the return: the plain error is larger
    ],
)
def test_the_hand_worked_loss(value: float, loss: float, clipped: int, gradient: float) -> None:
    values_BT = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    result = ClippedValueLoss(ValueLossConfig(clip=0.2))(
        ValueTerms(values_BT), one_token(old=1.0, returns=2.0)
    )
    result.loss_BT.sum().backward()
    assert values_BT.grad is not None
    assert result.loss_BT.item() == pytest.approx(loss)
    assert result.metrics_BT["value/clip_fraction"].item() == clipped
    assert values_BT.grad.item() == pytest.approx(gradient)


def example() -> tuple[Tensor, RolloutBatch]:
    batch = rollout_batch()
    g = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(batch.tokens.shape, generator=g, dtype=torch.float64)

    old_BT = draw()
    return old_BT + 0.3 * draw(), replace(batch, values=old_BT, returns=draw())


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_gradient_matches_finite_differences(clip: float | None) -> None:
    values_BT, batch = example()
    loss = ClippedValueLoss(ValueLossConfig(clip=clip))
    leaf_BT = values_BT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(ValueTerms(x), batch).loss_BT.sum(), (leaf_BT,))


def test_the_loss_is_the_loop_over_tokens() -> None:
    values_BT, batch = example()
    found_BT = ClippedValueLoss(ValueLossConfig(clip=0.2))(ValueTerms(values_BT), batch).loss_BT
    columns = (values_BT, batch.values, batch.returns, found_BT)
    flat = [column.flatten().tolist() for column in columns if column is not None]
    for v, old, returns, found in zip(*flat, strict=True):
        near = min(max(v, old - 0.2), old + 0.2)
        assert found == pytest.approx(0.5 * max((v - returns) ** 2, (near - returns) ** 2))


def test_without_a_clip_no_old_values_are_needed() -> None:
    values_BT, batch = example()
    result = ClippedValueLoss(ValueLossConfig(clip=None))(
        ValueTerms(values_BT), replace(batch, values=None)
    )
    assert "value/clip_fraction" not in result.metrics_BT
    with pytest.raises(ValueError, match="values is not set"):
        ClippedValueLoss(ValueLossConfig())(ValueTerms(values_BT), replace(batch, values=None))
    with pytest.raises(ValueError, match="returns is not set; run add_advantages"):
        ClippedValueLoss(ValueLossConfig())(ValueTerms(values_BT), replace(batch, returns=None))


def test_in_the_first_update_nothing_is_clipped() -> None:
    _, batch = example()
    old_BT = batch.require("values", made_by="test")
    result = ClippedValueLoss(ValueLossConfig())(ValueTerms(old_BT), batch)
    assert (result.metrics_BT["value/clip_fraction"] == 0).all()


def test_the_means_give_the_explained_variance() -> None:
    values_BT, batch = example()
    returns_BT = batch.require("returns", made_by="test")
    attached = ValueTerms(values_BT.requires_grad_())
    metrics_BT = ClippedValueLoss(ValueLossConfig())(attached, batch).metrics_BT
    assert not any(value_BT.requires_grad for value_BT in metrics_BT.values())
    mask_BT = batch.loss_mask
    means = {name: value_BT[mask_BT].mean().item() for name, value_BT in metrics_BT.items()}
    error_N = (values_BT - returns_BT).detach()[mask_BT]
    expected = 1 - error_N.var() / returns_BT[mask_BT].var()
    assert explained_variance(means) == pytest.approx(expected.item())


def test_equal_returns_have_no_variance_to_explain() -> None:
    means = {
        "value/error": 0.1,
        "value/squared_error": 0.3,
        "value/return": 0.7,
        "value/squared_return": 0.7**2 * (1 + 1e-9),
    }
    assert explained_variance(means) == 0
