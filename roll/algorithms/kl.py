"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

With d = log policy - log reference (http://joschu.net/blog/kl-approx.html):

    k1 = d                  unbiased; negative for about half of the tokens
    k2 = d**2 / 2           biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, low variance, never negative

As loss terms they have these gradients with respect to the policy's log-prob. An unbiased value
does not imply that the gradient is unbiased too:

    k1  1              zero on average: no pull towards the reference, only noise
    k2  d              on average the gradient of KL(policy || reference), on-policy
    k3  1 - exp(-d)    on average the gradient of KL(reference || policy), on-policy; at most 1,
                       and a large negative number where the token is likely under the reference
                       and unlikely under the policy

`k3_k2grad` has the value of k3 and the gradient of k2 (also known as `k3+`).

k3 grows exponentially, so a single token can ruin a step. Therefore -d is clamped to +-20 and the
value to +-10 (the upper bound is reached at d = -2.6). Where a clamp is active, the gradient of k3
is zero; the gradient of k3_k2grad is still d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.registries import KL_ESTIMATORS

K3_INPUT_LIMIT = 20.0
K3_OUTPUT_LIMIT = 10.0


@KL_ESTIMATORS.register("k1")
def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return log policy - log reference, in nats, `[B, T]`."""
    return logprobs_BT - ref_logprobs_BT


@KL_ESTIMATORS.register("k2")
def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return half the squared difference of the log-probs, in nats, `[B, T]`."""
    return 0.5 * (logprobs_BT - ref_logprobs_BT).square()


@KL_ESTIMATORS.register("k3")
def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, in nats, `[B, T]`, clamped to [0, 10].

    The computation uses float64 and `expm1`, because it subtracts two nearly equal numbers: near
    d = 0 the value is d**2 / 2, which float32 cannot represent below d = 1e-4.
    """
    log_ratio_BT = (ref_logprobs_BT.double() - logprobs_BT.double()).clamp(
        -K3_INPUT_LIMIT, K3_INPUT_LIMIT
    )
    value_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    return value_BT.clamp(-K3_OUTPUT_LIMIT, K3_OUTPUT_LIMIT).to(logprobs_BT.dtype)


@KL_ESTIMATORS.register("k3_k2grad")
def k3_k2grad(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2, in nats, `[B, T]`; never negative.

    On-policy, the gradient of k2 is on average the gradient of KL(policy || reference)
    (arXiv 2506.09477).
    """
    carrier_BT = k2(logprobs_BT, ref_logprobs_BT)
    value_BT = k3(logprobs_BT.detach(), ref_logprobs_BT)
    return value_BT + (carrier_BT - carrier_BT.detach())
