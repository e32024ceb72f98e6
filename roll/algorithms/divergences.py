"""Divergences of two distributions over the same tokens; see `roll.config.algorithm.divergences`.

A divergence is computed from log-probs `[..., V]` of the teacher and of the student. The result
`[...]` is in nats: 0 where the two are equal, never negative (apart from rounding), and finite for
finite log-probs. Only `sorted_distance` takes distributions over different tokens; it has no unit.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.config.algorithm.divergences import (
    AdaptiveKlConfig,
    DivergenceConfig,
    ForwardKlConfig,
    JensenShannonConfig,
    ReverseKlConfig,
    SkewedForwardConfig,
    SkewedReverseConfig,
    UldConfig,
)


def divergence(config: DivergenceConfig, teacher_V: Tensor, student_V: Tensor) -> Tensor:
    """Return the configured divergence of teacher and student, in nats, `[...]`."""
    match config:
        case ForwardKlConfig():
            return kl(teacher_V, student_V)
        case ReverseKlConfig():
            return kl(student_V, teacher_V)
        case JensenShannonConfig(beta=beta):
            between_V = mixture(teacher_V, student_V, beta)
            return beta * kl(teacher_V, between_V) + (1 - beta) * kl(student_V, between_V)
        case SkewedForwardConfig(alpha=alpha):
            return kl(teacher_V, mixture(teacher_V, student_V, alpha))
        case SkewedReverseConfig(alpha=alpha):
            return kl(student_V, mixture(student_V, teacher_V, alpha))
        case AdaptiveKlConfig(head_mass=head_mass):
            forward_share = _gap_on_head(teacher_V.detach(), student_V.detach(), head_mass)
            forward, reverse = kl(teacher_V, student_V), kl(student_V, teacher_V)
            return forward_share * forward + (1 - forward_share) * reverse
        case UldConfig():
            return sorted_distance(teacher_V, student_V)
    assert_never(config)


def kl(log_a_V: Tensor, log_b_V: Tensor) -> Tensor:
    """Return KL(a || b) of two distributions, given as log-probs, in nats, `[...]`."""
    return (log_a_V.exp() * (log_a_V - log_b_V)).sum(-1)


def sorted_distance(log_a_V: Tensor, log_b_W: Tensor) -> Tensor:
    """Return the sum of |a_i - b_i| over the largest, the second largest, ... probability of two
    distributions, given as log-probs, `[...]`; behind the last one, probabilities are 0."""
    a_V, b_W = (log.exp().sort(-1, descending=True).values for log in (log_a_V, log_b_W))
    width = max(a_V.shape[-1], b_W.shape[-1])
    a_V, b_W = (pad(each, [0, width - each.shape[-1]]) for each in (a_V, b_W))
    return (a_V - b_W).abs().sum(-1)


def mixture(log_a_V: Tensor, log_b_V: Tensor, share: float) -> Tensor:
    """Return log(share * a + (1 - share) * b), `[..., V]`. The arguments are log-probs; `share` is
    between 0 and 1, both excluded."""
    return torch.logaddexp(log_a_V + math.log(share), log_b_V + math.log1p(-share))


def _gap_on_head(teacher_V: Tensor, student_V: Tensor, head_mass: float) -> Tensor:
    """Return the share of sum |p - q| that lies on the head of p, `[...]`; 0.5 where p equals q.

    p is the teacher's distribution and q the student's. The head of p is the smallest set of tokens
    whose probabilities under p add up to at least `head_mass`.
    """
    p_V, order_V = teacher_V.exp().sort(-1, descending=True)
    gap_V = (p_V - student_V.exp().gather(-1, order_V)).abs()
    on_head = gap_V.masked_fill(p_V.cumsum(-1) - p_V >= head_mass, 0.0).sum(-1)
    whole = gap_V.sum(-1)
    return torch.where(whole > 0, on_head / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.5)
