"""Which tokens Clip-Cov and KL-Cov choose: over the whole update, whatever its layout."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import ClipCov, KlCov, PpoClip, SumLoss
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.policy.covariance.choice import covariance, draw, largest
from roll.config.algorithm import ClipCovConfig, KlCovConfig, PpoClipConfig
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch


def example(rows: int = 8, *, seed: int = 0) -> RolloutBatch:
    batch = rollout_batch(rows, longest=20, seed=seed)
    g = torch.Generator().manual_seed(seed)
    shape = batch.tokens.shape
    return replace(
        batch,
        old_logprobs=-2 * torch.rand(shape, generator=g),
        advantages=torch.randn(shape, generator=g) * batch.loss_mask,
    )


def chosen(batch: RolloutBatch) -> Tensor:
    return batch.require("chosen_tokens", made_by="test")


def test_the_covariance_is_the_product_of_centred_values() -> None:
    batch = example(3)
    mask_BT = batch.loss_mask
    logprobs = batch.require("old_logprobs", made_by="test")[mask_BT].tolist()
    advantages = batch.require("advantages", made_by="test")[mask_BT].tolist()
    middle = statistics.fmean(logprobs), statistics.fmean(advantages)
    expected = [
        (p - middle[0]) * (a - middle[1]) for p, a in zip(logprobs, advantages, strict=True)
    ]
    found_BT = covariance(batch)
    assert found_BT[mask_BT].tolist() == pytest.approx(expected)
    assert (found_BT[~mask_BT] == -torch.inf).all()


def test_kl_cov_chooses_the_highest_share() -> None:
    batch = KlCov(KlCovConfig(fraction=0.1)).prepare(example())
    covariance_N = covariance(batch)[batch.loss_mask]
    count = int(0.1 * len(covariance_N))
    assert count > 2
    bound = covariance_N.sort(descending=True).values[count - 1]
    assert torch.equal(chosen(batch)[batch.loss_mask], covariance_N >= bound)
    assert not chosen(batch)[~batch.loss_mask].any()


def test_at_least_one_token_is_chosen_and_none_of_an_empty_update() -> None:
    batch = example()
    assert chosen(KlCov(KlCovConfig()).prepare(batch)).sum() == 1
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert chosen(KlCov(KlCovConfig()).prepare(empty)).sum() == 0
    assert chosen(ClipCov(ClipCovConfig(cov_low=-9, cov_high=9)).prepare(empty)).sum() == 0


def test_clip_cov_draws_between_its_bounds() -> None:
    term = ClipCov(ClipCovConfig(fraction=0.1, cov_low=0.05, cov_high=0.6))
    batch = term.prepare(example())
    covariance_BT = covariance(batch)
    inside_BT = (covariance_BT > 0.05) & (covariance_BT < 0.6)
    count = int(0.1 * int(batch.loss_mask.sum()))
    assert int(inside_BT.sum()) > count
    assert int(chosen(batch).sum()) == count
    assert (inside_BT | ~chosen(batch)).all()


def test_where_too_few_tokens_lie_between_the_bounds_all_of_them_are_chosen() -> None:
    term = ClipCov(ClipCovConfig(fraction=1.0, cov_low=0.05, cov_high=0.6))
    covariance_BT = covariance(example())
    inside_BT = (covariance_BT > 0.05) & (covariance_BT < 0.6)
    assert torch.equal(chosen(term.prepare(example())), inside_BT)
    nothing = ClipCov(ClipCovConfig(fraction=1.0, cov_low=50, cov_high=60))
    assert chosen(nothing.prepare(example())).sum() == 0


@pytest.mark.parametrize(
    "term",
    [
        ClipCov(ClipCovConfig(fraction=0.2, cov_low=-0.5, cov_high=0.6)),
        KlCov(KlCovConfig(fraction=0.2)),
    ],
)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15)
def test_row_order_and_padding_do_not_change_the_choice(term: ClipCov | KlCov, seed: int) -> None:
    batch = example(seed=seed)
    expected = chosen(term.prepare(batch))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(chosen(term.prepare(batch.select(order))), expected[order])
    width = batch.tokens.shape[1]
    other = rollout_batch(1, longest=width + 4, seed=seed)
    zeros_BT = torch.zeros(other.tokens.shape)
    other = replace(other, loss_mask=zeros_BT.bool(), old_logprobs=zeros_BT, advantages=zeros_BT)
    longer = RolloutBatch.concat([batch, other])
    found = chosen(term.prepare(longer))
    assert torch.equal(found[:8, :width], expected)
    assert not found[8:].any()
    assert not found[:, width:].any()


def test_the_draw_is_spread_evenly_over_rows_and_positions() -> None:
    batch = rollout_batch(400, prompt=0, longest=50)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    drawn_BT = draw(batch.loss_mask, 10_000, batch).double()
    assert drawn_BT.sum() == 10_000
    # Half of all tokens; the standard deviation is 0.025 per position and 0.07 per row.
    assert (drawn_BT.mean(0) - 0.5).abs().max() < 0.1
    assert (drawn_BT.mean(1) - 0.5).abs().max() < 0.3
    neighbours = ((drawn_BT[:, 1:] == drawn_BT[:, :-1]).double()).mean()
    assert abs(neighbours.item() - 0.5) < 0.02


def test_the_largest_of_few_are_all_that_are_finite() -> None:
    values_BT = torch.tensor([[1.0, -torch.inf], [3.0, 2.0]])
    assert largest(values_BT, 2).tolist() == [[False, False], [True, True]]
    assert largest(values_BT, 9).tolist() == [[True, False], [True, True]]


def test_a_sum_prepares_the_terms_that_ask_for_it() -> None:
    batch = example()
    assert SumLoss((PpoClip(PpoClipConfig()),)).prepare(batch) is batch
    prepared = SumLoss((KlCov(KlCovConfig(fraction=0.1)),)).prepare(batch)
    assert torch.equal(chosen(prepared), chosen(KlCov(KlCovConfig(fraction=0.1)).prepare(batch)))


def test_an_unprepared_batch_says_what_to_run() -> None:
    batch = example()
    terms = PolicyTerms(batch.require("old_logprobs", made_by="test"))
    for term in (ClipCov(ClipCovConfig()), KlCov(KlCovConfig())):
        with pytest.raises(ValueError, match=r"run SumLoss\.prepare first"):
            term(terms, batch)
    with pytest.raises(ValueError, match="run add_logprobs first"):
        KlCov(KlCovConfig()).prepare(replace(batch, old_logprobs=None))


def test_an_update_chooses_from_its_own_tokens_after_a_split() -> None:
    batch = KlCov(KlCovConfig(fraction=0.2)).prepare(example())
    parts = batch.split(4)
    assert torch.equal(torch.cat([chosen(part) for part in parts]), chosen(batch))
