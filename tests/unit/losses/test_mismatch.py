"""Engine against trainer: the numbers of three tokens, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from roll.algorithms.mismatch import mismatch_metrics, teacher_metrics, weight_metrics
from tests.tiny import rollout_batch


def test_equal_log_probs_have_no_mismatch() -> None:
    batch = rollout_batch()
    found = mismatch_metrics(replace(batch, old_logprobs=batch.rollout_logprobs))
    assert found.values_by_name() == {
        "mismatch/kl": 0,
        "mismatch/logprob_abs_max": 0,
        "mismatch/logprob_abs_mean": 0,
        "mismatch/probability_factor": 1,
    }


def test_only_trained_tokens_count() -> None:
    batch = rollout_batch(rows=1, longest=3, prompt=2)
    mask_BT = torch.zeros_like(batch.loss_mask)
    mask_BT[0, 2:4] = True
    engine_BT = torch.tensor([[9.0, 9, -1, -2, 9]])[:, : mask_BT.shape[1]]
    trainer_BT = torch.tensor([[0.0, 0, -1.5, -1, 0]])[:, : mask_BT.shape[1]]
    found = mismatch_metrics(
        replace(batch, loss_mask=mask_BT, rollout_logprobs=engine_BT, old_logprobs=trainer_BT)
    ).values_by_name()
    assert found["mismatch/logprob_abs_mean"] == pytest.approx(0.75)
    assert found["mismatch/logprob_abs_max"] == pytest.approx(1)
    kl = (math.exp(-0.5) - 1 + 0.5 + math.e - 1 - 1) / 2
    assert found["mismatch/kl"] == pytest.approx(kl)
    factor = (math.exp(0.5) + math.e) / 2
    assert found["mismatch/probability_factor"] == pytest.approx(factor)


def test_a_batch_without_engine_log_probs_reports_nothing() -> None:
    assert len(mismatch_metrics(replace(rollout_batch(), rollout_logprobs=None))) == 0


def test_no_trained_token_has_no_mismatch_and_one_has() -> None:
    batch = rollout_batch(rows=1, longest=3, prompt=2)
    nobody_BT = torch.zeros_like(batch.loss_mask)
    batch = replace(batch, old_logprobs=batch.rollout_logprobs, loss_mask=nobody_BT)
    assert len(mismatch_metrics(batch)) == 0
    nobody_BT[0, 2] = True
    assert mismatch_metrics(batch).values_by_name()["mismatch/logprob_abs_max"] == 0


def test_the_divergence_from_a_teacher_is_a_mean_over_trained_tokens() -> None:
    batch = rollout_batch(rows=1, longest=3, prompt=2)
    mask_BT = torch.zeros_like(batch.loss_mask)
    mask_BT[0, 2:4] = True
    engine_BT = torch.tensor([[9.0, 9, -1, -2, 9]])[:, : mask_BT.shape[1]]
    teacher_BT = torch.tensor([[0.0, 0, -1.5, -4, 0]])[:, : mask_BT.shape[1]]
    batch = replace(batch, loss_mask=mask_BT, rollout_logprobs=engine_BT)
    found = teacher_metrics(replace(batch, teacher_logprobs=teacher_BT)).values_by_name()
    assert found == {"kl/teacher": pytest.approx((0.5 + 2) / 2)}
    assert len(teacher_metrics(batch)) == 0


def test_weights_that_are_all_zero_are_worth_no_sample() -> None:
    zeros_N, outside_N = torch.zeros(3).double(), torch.ones(3).bool()
    assert weight_metrics(zeros_N, outside_N).values_by_name() == {
        "correction/weight": 0,
        "correction/bounded_weights": 1,
        "correction/weight_effective_sample_size": 0,
    }
