"""KL estimators against the divergence of real distributions, and their documented gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.kl import k1, k2, k3, k3_k2grad
from roll.algorithms.registries import KL_ESTIMATORS


def two_distributions() -> tuple[Tensor, Tensor]:
    policy_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    ref_V = torch.tensor([0.4, 0.25, 0.25, 0.1], dtype=torch.float64)
    return policy_V.log(), ref_V.log()


@pytest.mark.parametrize("estimator", [k1, k3])
def test_the_expectation_over_the_policy_is_the_divergence(estimator: object) -> None:
    policy_V, ref_V = two_distributions()
    expected = (policy_V.exp() * (policy_V - ref_V)).sum()
    assert callable(estimator)
    found = (policy_V.exp() * estimator(policy_V, ref_V)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_values_match_hand_worked_numbers() -> None:
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert k1(logprobs, ref).item() == pytest.approx(0.5)
    assert k2(logprobs, ref).item() == pytest.approx(0.125)
    assert k3(logprobs, ref).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_lies_between_zero_and_its_limit(logprob: float, ref: float) -> None:
    value = k3(torch.tensor([logprob]), torch.tensor([ref])).item()
    assert 0 <= value <= 10


@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-7])
def test_k3_of_nearly_equal_log_probs_keeps_its_digits(gap: float) -> None:
    ref = torch.tensor([0.0])
    value = k3(torch.tensor([gap]), ref).item()
    assert value == pytest.approx(gap**2 / 2 - gap**3 / 6, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("k1", lambda d: 1.0),
        ("k2", lambda d: d),
        ("k3", lambda d: 1 - math.exp(-d)),
        ("k3_k2grad", lambda d: d),
    ],
)
@pytest.mark.parametrize("d", [-1.0, 0.0, 0.7])
def test_the_gradient_is_the_documented_one(name: str, gradient: object, d: float) -> None:
    logprobs = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.zeros(1, dtype=torch.float64)).sum().backward()
    assert callable(gradient)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient(d), abs=1e-12)


def test_an_outlier_is_clamped_and_has_no_gradient() -> None:
    logprobs = torch.tensor([-50.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-0.1]))
    value.sum().backward()
    assert value.item() == 10
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


@pytest.mark.parametrize("gap", [-2000.0, 2000.0])
def test_a_gap_whose_exponential_is_infinite_has_no_gradient(gap: float) -> None:
    """The clamp of the value alone would make it 0 times infinity, which is not a number."""
    logprobs = torch.tensor([gap], requires_grad=True)
    value = k3(logprobs, torch.zeros(1))
    value.sum().backward()
    assert value.item() == 10
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_k2grad_is_k3_to_the_eye_and_k2_to_the_optimizer(logprob: float, ref: float) -> None:
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([ref], dtype=torch.float64)
    value = k3_k2grad(logprobs, anchor)
    value.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(value, k3(logprobs, anchor))
    assert logprobs.grad.item() == pytest.approx(logprob - ref, abs=1e-12)


def test_on_policy_k2_has_the_gradient_of_the_divergence_and_k1_has_none() -> None:
    """Over all tokens: what the expectation of each estimator's gradient is for the logits."""
    policy_V, ref_V = two_distributions()
    logits_V = policy_V.clone().requires_grad_()

    def expected(loss_V: Tensor) -> Tensor:
        (grad_V,) = torch.autograd.grad((policy_V.exp() * loss_V).sum(), logits_V)
        return grad_V

    log_V = logits_V.log_softmax(-1)
    divergence = (log_V.exp() * (log_V - ref_V)).sum()
    (wanted_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    for estimator in (k2, k3_k2grad):
        found_V = expected(estimator(logits_V.log_softmax(-1), ref_V))
        torch.testing.assert_close(found_V, wanted_V)
    zero_V = expected(k1(logits_V.log_softmax(-1), ref_V))
    torch.testing.assert_close(zero_V, torch.zeros_like(zero_V))
