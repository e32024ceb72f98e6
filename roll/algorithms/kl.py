"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

With d = log policy - log reference (http://joschu.net/blog/kl-approx.html):

    k1 = d                  unbiased; negative for about half of the tokens
    k2 = d**2 / 2           biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, low variance, never negative

As loss terms they differ in their gradient with respect to the policy's log-prob, which is not
the gradient of their value:

    k1  1              zero on average: no pull towards the reference, only noise
    k2  d              on average the gradient of KL(policy || reference), on-policy
    k3  1 - exp(-d)    on average the gradient of KL(reference || policy), on-policy; bounded by 1
                       from above, large where the reference likes the token and the policy does not

`k3_k2grad` has the value of k3 and the gradient of k2 (others write `k3+`).

k3 grows exponentially, so one token can blow up a step: -d is clamped to +-20 and the value to
+-10 (the upper bound is met at d = -2.6). Where a clamp is active the gradient of k3 is zero,
that of k3_k2grad still d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.registries import KL_ESTIMATORS

K3_INPUT_LIMIT = 20.0
K3_OUTPUT_LIMIT = 10.0


@KL_ESTIMATORS.register("k1")
def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`[B, T]`, nats; log policy - log reference."""
    return logprobs_BT - ref_logprobs_BT


@KL_ESTIMATORS.register("k2")
def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`[B, T]`, nats; half the squared difference."""
    return 0.5 * (logprobs_BT - ref_logprobs_BT).square()


@KL_ESTIMATORS.register("k3")
def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`[B, T]`, nats, within [0, 10].

    The difference of two nearly equal numbers is taken in float64 and with `expm1`: near d = 0 the
    value is d**2 / 2, which float32 loses below d = 1e-4.
    """
    log_ratio_BT = (ref_logprobs_BT.double() - logprobs_BT.double()).clamp(
        -K3_INPUT_LIMIT, K3_INPUT_LIMIT
    )
    value_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    return value_BT.clamp(-K3_OUTPUT_LIMIT, K3_OUTPUT_LIMIT).to(logprobs_BT.dtype)


@KL_ESTIMATORS.register("k3_k2grad")
def k3_k2grad(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`[B, T]`, nats: the value of k3, never negative, with the gradient of k2, which on average is
    the gradient of KL(policy || reference) on-policy (arXiv 2506.09477)."""
    carrier_BT = k2(logprobs_BT, ref_logprobs_BT)
    value_BT = k3(logprobs_BT.detach(), ref_logprobs_BT)
    return value_BT + (carrier_BT - carrier_BT.detach())
