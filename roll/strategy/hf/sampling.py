"""Sampling of tokens from logits, and log-probs of the distribution they are sampled from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roll.core.types import SamplingParams


def scaled_logprobs(logits_NV: Tensor, sampling: SamplingParams) -> Tensor:
    """Compute the log-probs of the sampling distribution, float32 `[N, V]`, natural logarithm.

    The logits are divided by the temperature; then `top_k` removes tokens, then `top_p` some of
    those that are left. Removed tokens have -inf, and the others sum to probability 1. Greedy
    sampling (temperature 0) counts as temperature 1 here, with the same removals.
    """
    logits_NV = logits_NV.float()
    if sampling.temperature > 0:
        logits_NV = logits_NV / sampling.temperature
    if 0 < sampling.top_k < logits_NV.shape[1]:
        smallest_N1 = logits_NV.topk(sampling.top_k).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, -torch.inf)
    if sampling.top_p < 1:
        logits_NV = _nucleus(logits_NV, sampling.top_p)
    return logits_NV.log_softmax(-1)


def sample_tokens(
    logprobs_NV: Tensor, generators: Sequence[torch.Generator], *, greedy: bool
) -> Tensor:
    """Sample one token id per row, int64 `[N]` on the CPU.

    Row i draws from generator i, so the rows do not affect each other.

    Args:
        greedy: take the most probable token in place of drawing.
    """
    if greedy:
        return logprobs_NV.argmax(-1).cpu()
    probs_NV = logprobs_NV.exp().cpu()
    draws = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(probs_NV, generators, strict=True)
    ]
    return torch.cat(draws)


def _nucleus(logits_NV: Tensor, top_p: float) -> Tensor:
    """Set logits outside of the nucleus to -inf.

    The nucleus is the smallest set of most probable tokens whose total probability is at least
    `top_p`. The most probable token is always in the nucleus.
    """
    sorted_NV, order_NV = logits_NV.sort(descending=True)
    before_NV = sorted_NV.softmax(-1).cumsum(-1) - sorted_NV.softmax(-1)
    cut_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    cut_NV.scatter_(1, order_NV, before_NV >= top_p)
    return logits_NV.masked_fill(cut_NV, -torch.inf)
