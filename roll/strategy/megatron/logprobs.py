"""Log-probs and entropy out of logits whose vocabulary is spread over tensor parallel ranks.

N counts the tokens that are asked for, S the entries of the vocabulary that this rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def from_shards(
    logits_NS: Tensor,
    targets_N: Tensor,
    *,
    vocab: int,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy (zeros unless asked for), float32 `[N]`, the same on
    every rank of `group`; collective.

    The gradient of `logits_NS` is this rank's part of that of the whole logits.

    Args:
        logits_NS: this rank's entries, `rank * S` to `rank * S + S`, of a vocabulary that is
            padded to divide: entries from `vocab` on have no probability.
        temperature: divides the logits, above zero.
        chunk_tokens: tokens whose float32 logits exist at once.
    """
    logprobs_N, entropy_N = _Sharded.apply(
        logits_NS, targets_N, vocab, temperature, chunk_tokens, entropy, group
    )
    return logprobs_N, entropy_N


class _Sharded(torch.autograd.Function):
    """Keeps the logits as they came and one float32 per token; the softmax is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NS: Tensor,
        targets_N: Tensor,
        vocab: int,
        temperature: float,
        chunk_tokens: int,
        entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        size, width = logits_NS.shape
        first = dist.get_rank(group) * width
        local_N = targets_N - first
        mine_N = (local_N >= 0) & (local_N < width)
        local_N = local_N.masked_fill(~mine_N, 0)
        held = max(0, min(width, vocab - first))
        logprobs_N = torch.empty(size, dtype=torch.float32, device=logits_NS.device)
        lse_N = torch.empty_like(logprobs_N)
        entropy_N = torch.zeros_like(logprobs_N)
        for i in range(0, size, chunk_tokens):
            part = slice(i, i + chunk_tokens)
            logits = logits_NS[part].float() / temperature
            logits[:, held:] = -torch.inf
            largest = logits.max(-1).values
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            total = (logits - largest[:, None]).exp_().sum(-1)
            chosen = logits.gather(-1, local_N[part, None]).squeeze(-1)
            chosen = chosen.masked_fill(~mine_N[part], 0.0)
            both = torch.stack([total, chosen])
            dist.all_reduce(both, group=group)
            lse_N[part] = largest + both[0].log()
            logprobs_N[part] = both[1] - lse_N[part]
            if entropy:
                logp = logits[:, :held].sub_(lse_N[part, None])
                nats = -logp.exp().mul_(logp).sum(-1)
                dist.all_reduce(nats, group=group)
                entropy_N[part] = nats
        ctx.save_for_backward(logits_NS, local_N, mine_N, lse_N, entropy_N)
        ctx.temperature, ctx.chunk_tokens, ctx.held = temperature, chunk_tokens, held
        # An entropy that is only looked at costs nothing in the backward pass.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        logits_NS, local_N, mine_N, lse_N, entropy_N = ctx.saved_tensors
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(lse_N)
        grad_NS = torch.zeros_like(logits_NS)
        for i in range(0, len(lse_N), ctx.chunk_tokens):
            part = slice(i, i + ctx.chunk_tokens)
            logp = logits_NS[part, : ctx.held].float() / ctx.temperature
            logp.sub_(lse_N[part, None])
            probs = logp.exp()
            factor = grad_logprobs_N[part, None]
            grad = probs * -factor
            if grad_entropy_N is not None:
                # d entropy / d logit = -p (log p + entropy)
                surprise = logp.add_(entropy_N[part, None])
                grad -= probs.mul_(surprise.mul_(grad_entropy_N[part, None]))
            if ctx.held:
                grad.scatter_add_(-1, local_N[part, None], factor * mine_N[part, None])
            grad_NS[part, : ctx.held] = grad.div_(ctx.temperature).to(grad_NS.dtype)
        return grad_NS, None, None, None, None, None, None
