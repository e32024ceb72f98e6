"""Pairs of a policy's own samples: which they are, their loss by hand, and that none is split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from roll.algorithms import PreferenceTerm, SumLoss, token_weights
from roll.algorithms.build import build_loss
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.pairs import paired
from roll.config.algorithm import Aggregation, AlgorithmConfig, PreferenceTermConfig
from roll.config.algorithm.preferences import PairLoss, SigmoidConfig, SimpoConfig
from roll.core.batches import PairedRollouts, RolloutBatch
from roll.pipeline.updates import updates
from roll.strategy.training import microbatch
from roll.strategy.training.reduce import weighted_sum
from tests.tiny import rollout_batch

GROUPS, SIBLINGS = 6, 4


def step(seed: int = 0, *, levels: int = 4) -> RolloutBatch:
    """The samples of a step: some groups have equal rewards, some rows have no trained token."""
    g = torch.Generator().manual_seed(seed)
    batch = rollout_batch(GROUPS * SIBLINGS, prompt=2, longest=6, seed=seed)
    shape = batch.tokens.shape
    masked_B = torch.rand(len(batch), generator=g) < 0.2
    return replace(
        batch,
        group_ids=torch.randperm(len(batch), generator=g) % GROUPS,
        rewards=torch.randint(0, levels, (len(batch),), generator=g) / 2,
        ref_logprobs=-2 * torch.rand(shape, generator=g) - 0.05,
        advantages=torch.zeros(shape),
    ).keep(~masked_B)


def expected_pairs(batch: RolloutBatch) -> dict[int, tuple[int, int]]:
    """Group -> rows of its best and its worst sample; groups without a pair are left out."""
    assert batch.rewards is not None
    found: dict[int, tuple[int, int]] = {}
    for group in range(GROUPS):
        rows = [
            row
            for row in range(len(batch))
            if batch.group_ids[row] == group and bool(batch.loss_mask[row].any())
        ]
        rewards = [batch.rewards[row].item() for row in rows]
        if len(set(rewards)) > 1:
            found[group] = (
                rows[rewards.index(max(rewards))],
                rows[rewards.index(min(rewards))],
            )
    return found


@given(seed=st.integers(0, 10_000), levels=st.integers(1, 4))
@settings(max_examples=40)
def test_a_pair_is_the_best_and_the_worst_trained_sample_of_a_prompt(
    seed: int, levels: int
) -> None:
    batch = step(seed, levels=levels)
    pairs = paired(batch)
    assert isinstance(pairs, PairedRollouts)
    assert pairs.group_ids.tolist() == [group for group in range(GROUPS) for _ in range(2)]
    expected = expected_pairs(batch)
    for group in range(GROUPS):
        mask_2T = pairs.loss_mask[2 * group : 2 * group + 2]
        if group in expected:
            rows = list(expected[group])
            assert torch.equal(pairs.tokens[2 * group : 2 * group + 2], batch.tokens[rows])
            assert torch.equal(mask_2T, batch.loss_mask[rows])
        else:
            assert not mask_2T.any()


def test_a_prompt_with_one_sample_has_no_pair() -> None:
    batch = step()
    with pytest.raises(ValueError, match="is alone in its group"):
        paired(batch.select([0]))


def test_two_samples_are_a_pair_unless_nobody_trains_them() -> None:
    batch = step().select([0, 1])
    mask_BT = torch.ones_like(batch.loss_mask)
    batch = replace(
        batch,
        group_ids=torch.zeros(2, dtype=torch.int64),
        rewards=torch.tensor([0.0, 1.0]),
        loss_mask=mask_BT,
    )
    pairs = paired(batch)
    assert pairs.sample_ids == [batch.sample_ids[1], batch.sample_ids[0]]
    assert pairs.loss_mask.all()
    nobody = paired(replace(batch, loss_mask=torch.zeros_like(mask_BT)))
    assert nobody.sample_ids == batch.sample_ids
    assert not nobody.loss_mask.any()


def update_of(pairs: RolloutBatch) -> RolloutBatch:
    weights_BT = token_weights(pairs.loss_mask, Aggregation.SEQUENCE_MEAN)
    return replace(pairs, token_weights=weights_BT)


def term(formula: PairLoss | None = None) -> SumLoss:
    config: dict[str, Any] = {"kind": "preference"}
    if formula is not None:
        config["formula"] = formula
    return SumLoss((PreferenceTerm(PreferenceTermConfig.model_validate(config)),))


def reduced(loss: SumLoss, logprobs_BT: Tensor, batch: RolloutBatch) -> Tensor:
    weights_BT = batch.require("token_weights", made_by="test")
    return weighted_sum(loss(PolicyTerms(logprobs_BT), batch).loss_BT, weights_BT)


def gradient(loss: SumLoss, logprobs_BT: Tensor, batch: RolloutBatch) -> Tensor:
    leaf_BT = logprobs_BT.clone().requires_grad_()
    reduced(loss, leaf_BT, batch).backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad


def logprobs_of(batch: RolloutBatch, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return -2 * torch.rand(batch.tokens.shape, generator=g) - 0.05


def test_the_loss_is_that_of_dpo_over_the_pairs() -> None:
    """-log sigmoid(beta * (log-ratio of the best - log-ratio of the worst)), a mean over pairs."""
    batch = step(3)
    assert batch.rewards is not None
    batch = replace(batch, rewards=batch.rewards.masked_fill(batch.group_ids == 2, 0.5))
    logprobs_BT = logprobs_of(batch)
    ref_BT = batch.require("ref_logprobs", made_by="step")
    ratio_BT = (logprobs_BT - ref_BT) * batch.loss_mask
    losses, right = [], 0
    for best, worst in expected_pairs(batch).values():
        gap = 0.3 * (ratio_BT[best].sum() - ratio_BT[worst].sum()).item()
        losses.append(math.log1p(math.exp(-gap)))
        right += gap > 0
    assert 1 < len(losses) < GROUPS
    rows = paired(replace(batch, old_logprobs=logprobs_BT))
    assert rows.old_logprobs is not None
    loss, update = term(SigmoidConfig(beta=0.3)), update_of(rows)
    found = reduced(loss, rows.old_logprobs, update)
    assert found.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    seen = loss(PolicyTerms(rows.old_logprobs), update)
    trained_B = rows.loss_mask.any(1)
    accuracy = seen.metrics_B["accuracy"][trained_B].mean().item()
    assert accuracy == pytest.approx(right / len(losses))
    assert set(seen.parts_BT) == {"preference"}


@pytest.mark.parametrize("formula", [SigmoidConfig(), SimpoConfig(sft_coef=0.1)])
@given(seed=st.integers(0, 1_000), budget=st.integers(4, 120), packed=st.booleans())
@settings(max_examples=15)
def test_no_split_over_updates_ranks_and_micro_batches_changes_loss_or_gradient(
    formula: PairLoss, seed: int, budget: int, packed: bool
) -> None:
    batch = step(seed)
    batch = replace(batch, old_logprobs=logprobs_of(batch, seed))
    rows, loss = term(formula).choose(batch), term(formula)
    assert rows.old_logprobs is not None
    (update,) = updates(
        rows, num_updates=1, ranks=3, aggregation=Aggregation.SEQUENCE_MEAN, prepare=loss.prepare
    )
    assert isinstance(update, PairedRollouts)
    assert update.old_logprobs is not None
    whole_BT = gradient(loss, update.old_logprobs, update)
    whole = reduced(loss, update.old_logprobs, update)
    total, parts_BT = torch.zeros(()), []
    for rank in update.split(3):
        grads_BT = torch.zeros(rank.tokens.shape)
        for chosen in microbatch.plan_of(rank, budget, packed=packed):
            assert [row // 2 for row in chosen[::2]] == [row // 2 for row in chosen[1::2]]
            micro = microbatch.take(rank, chosen)
            assert micro.old_logprobs is not None
            total = total + reduced(loss, micro.old_logprobs, micro)
            width = micro.tokens.shape[1]
            grads_BT[chosen, :width] = gradient(loss, micro.old_logprobs, micro)
        parts_BT.append(grads_BT)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(parts_BT), whole_BT, rtol=1e-5, atol=1e-7)


def test_rows_that_are_no_pairs_and_a_missing_reference_are_refused() -> None:
    batch = step()
    with pytest.raises(ValueError, match=r"no pairs; run SumLoss\.choose first"):
        term()(PolicyTerms(logprobs_of(batch)), batch)
    pairs = paired(replace(batch, ref_logprobs=None))
    with pytest.raises(ValueError, match="ref_logprobs is not set"):
        term()(PolicyTerms(logprobs_of(pairs)), pairs)
    without = term(SimpoConfig())(PolicyTerms(logprobs_of(pairs)), pairs)
    assert without.loss_BT.isfinite().all()


def test_other_losses_choose_all_samples() -> None:
    batch = step()
    assert build_loss(AlgorithmConfig()).choose(batch) is batch


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": [{"kind": "preference"}, {"kind": "pg"}]}, "pg on the advantages of all"),
        ({"aggregation": "token_mean"}, "use sequence_mean"),
        ({"correction": {"weight": {}}}, "drop the correction"),
        ({"loss": [{"kind": "preference", "formula": {"kind": "kto"}}]}, "kto"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(options: dict[str, Any], reason: str) -> None:
    pairs = {"loss": [{"kind": "preference"}], "aggregation": "sequence_mean"}
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(AlgorithmConfig).validate_python(pairs | options, strict=False)
