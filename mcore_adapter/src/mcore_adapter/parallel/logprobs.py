"""Log-probabilities and entropy of tokens whose logits are sharded over tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
    entropy: bool = False,
    squares: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return natural log-probabilities of the given tokens; and of each distribution, if asked for,
    the entropy and the sum of squared probabilities.

    To save memory, only `chunk` tokens at a time are converted to fp32 and get a softmax, in the
    forward and in the backward pass. A call makes two small collectives, whatever the number of
    tokens.

    Args:
        logits: this rank's columns, `[..., padded vocabulary / tp]`.
        targets: token ids `[...]`, the same on all ranks.
        vocab: number of tokens in the vocabulary; the columns after them are padding and have no
            probability.
        temperature: number by which the logits are divided; or one for each token, float32 `[...]`.
        group: tensor parallel ranks, in the order of their columns; None: the logits are whole.
        chunk: number of tokens that are processed at a time.
        entropy: also compute the entropies.
        squares: also compute the sums of squares.

    Returns:
        Log-probabilities, entropies and sums of squares, float32 `[...]` each; None for what was
        not asked for. The first two can be differentiated, if all ranks pass the same gradients
        into them. The sums have no gradient.
    """
    flat_N1 = temperature.reshape(-1, 1) if isinstance(temperature, Tensor) else temperature
    found = _TokenLogprobs.apply(
        logits.flatten(0, -2), targets.flatten(), vocab, flat_N1, group, chunk, (entropy, squares)
    )
    logprobs, entropies, sums = (values.view(targets.shape) for values in found)
    return logprobs, entropies if entropy else None, sums if squares else None


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function that keeps the logits and computes their softmax again for gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        vocab: int,
        temperature: float | Tensor,
        group: dist.ProcessGroup | None,
        chunk: int,
        also: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs of `targets_N`, entropy and sum of squares, `[N]`; ignore columns from
        `vocab` on. A temperature for each token is `[N, 1]`. `also` says whether to compute
        entropies, and sums of squares; what is not computed means nothing."""
        width = logits_NV.shape[1]
        start = 0 if group is None else dist.get_rank(group) * width
        columns = min(max(vocab - start, 0), width)
        ctx.scope = (columns, start, chunk)
        heat_N1 = torch.as_tensor(temperature, dtype=torch.float32, device=logits_NV.device)
        heat_N1 = heat_N1.expand(len(targets_N), 1)
        parts = list(
            zip(*(each.split(chunk) for each in (logits_NV, targets_N, heat_N1)), strict=True)
        )
        top_N = torch.cat([_top(rows[:, :columns]) for rows, _, _ in parts]) / heat_N1[:, 0]
        _all_reduce(top_N, dist.ReduceOp.MAX, group)
        sums_4N = torch.cat(
            [
                _sums(rows[:, :columns].float() / heat, wanted - start, top, also)
                for (rows, wanted, heat), top in zip(parts, top_N.split(chunk), strict=True)
            ],
            dim=1,
        )
        _all_reduce(sums_4N, dist.ReduceOp.SUM, group)
        mass_N, weighted_N, target_N, squared_N = sums_4N
        normalizer_N = mass_N.log() + top_N
        entropy_N = mass_N.log() - weighted_N / mass_N
        ctx.save_for_backward(logits_NV, targets_N, heat_N1, normalizer_N, entropy_N)
        ctx.set_materialize_grads(False)
        squares_N = squared_N / mass_N.square()
        ctx.mark_non_differentiable(squares_N)
        return (target_N - top_N) - mass_N.log(), entropy_N, squares_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of this rank's logits, made chunk by chunk; 0 for padding."""
        logits_NV, targets_N, heat_N1, normalizer_N, entropy_N = ctx.saved_tensors
        columns, start, chunk = ctx.scope
        found_NV = torch.zeros_like(logits_NV)
        for i in range(0, len(targets_N), chunk):
            rows = slice(i, i + chunk)
            logprobs = logits_NV[rows, :columns].float() / heat_N1[rows] - normalizer_N[rows, None]
            probs = logprobs.exp()
            found = torch.zeros_like(probs)
            logprob_grad, entropy_grad = (None if g is None else g[rows, None] for g in grads[:2])
            if logprob_grad is not None:
                local = targets_N[rows] - start
                mine = (local >= 0) & (local < columns)
                found -= probs * logprob_grad
                found[mine, local[mine]] += logprob_grad[mine, 0]
            if entropy_grad is not None:
                found -= probs * (logprobs + entropy_N[rows, None]) * entropy_grad
            found_NV[rows, :columns] = (found / heat_N1[rows]).to(found_NV.dtype)
        return found_NV, None, None, None, None, None, None


def _top(rows_NV: Tensor) -> Tensor:
    """Return the largest logit of each row, float32 `[N]`; -inf if there are no columns."""
    if rows_NV.shape[1] == 0:
        return torch.full((len(rows_NV),), -torch.inf, device=rows_NV.device)
    return rows_NV.amax(dim=1).float()


def _sums(scaled_NV: Tensor, local_N: Tensor, top_N: Tensor, also: tuple[bool, bool]) -> Tensor:
    """Return this rank's sums over its columns, `[4, N]`.

    The rows are the sum of exp(x - top), the sum of exp(x - top) * (x - top), the target's x, which
    is 0 if another rank has the target, and the sum of exp(x - top) ** 2. The second and the fourth
    are 0 unless `also` asks for entropies or squares. With x in place of x - top, the entropy would
    be the difference of two large numbers.
    """
    entropy, squares = also
    below_NV = scaled_NV - top_N[:, None]
    weights_NV = below_NV.exp()
    mine_N = (local_N >= 0) & (local_N < scaled_NV.shape[1])
    target_N = torch.zeros_like(top_N)
    target_N[mine_N] = scaled_NV[mine_N, local_N[mine_N]]
    weighted_N = (weights_NV * below_NV).sum(dim=1) if entropy else torch.zeros_like(top_N)
    squared_N = weights_NV.square().sum(dim=1) if squares else torch.zeros_like(top_N)
    return torch.stack([weights_NV.sum(dim=1), weighted_N, target_N, squared_N])


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: object) -> None:
    """Reduce the tensor in place; None: leave it as it is."""
    if group is not None:
        dist.all_reduce(tensor, op, group=group)
