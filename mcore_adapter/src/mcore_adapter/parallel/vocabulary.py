"""Distributions over a vocabulary that is cut over tensor parallel ranks, with exact gradients.

Each rank has the logits of its own tokens. Sums over the vocabulary are added up over the ranks;
whole distributions are put together only where a caller asks for them, so that it decides for how
many rows at once.

Results that are the same on all ranks must be used in the same way by all of them: their gradients
are then the same, too. Axis letters: N rows, S tokens of this rank, V tokens of the vocabulary, K
chosen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The tokens of a vocabulary whose logits this rank has."""

    group: dist.ProcessGroup
    """Tensor parallel ranks, in the order of their tokens."""
    vocab: int
    """Number of tokens of the vocabulary; logits behind them are padding."""
    width: int
    """Number of logits of each rank, padding included."""

    @property
    def columns(self) -> slice:
        """Ids of this rank's tokens; there may be none."""
        first = self.group.rank() * self.width
        return slice(min(first, self.vocab), min(first + self.width, self.vocab))

    @property
    def size(self) -> int:
        """Number of this rank's tokens, S."""
        return self.columns.stop - self.columns.start

    def logprobs(self, logits_NS: Tensor) -> Tensor:
        """Return the log-probabilities of this rank's tokens, `[N, S]`. A collective.

        Args:
            logits_NS: this rank's logits, without padding.
        """
        # Every rank subtracts the logarithm from its own logits: its gradient is the sum of theirs.
        whole_N = _Shared.apply(self.logsumexp(logits_NS), self.group)
        return logits_NS - whole_N[:, None]

    def logsumexp(self, values_NS: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials over the vocabulary, `[N]`, the same on
        all ranks. A collective. One of the values of each row, on any rank, must be finite."""
        with torch.no_grad():
            # A rank may have no tokens, and `amax` needs some.
            filled_NS = values_NS if self.size else pad(values_NS, [0, 1], value=-torch.inf)
            top_N = _reduced(filled_NS.amax(-1), dist.ReduceOp.MAX, self.group)
        return top_N + self.added((values_NS - top_N[:, None]).exp().sum(-1)).log()

    def added(self, values_N: Tensor) -> Tensor:
        """Return the sum of all ranks' values, the same on all ranks. A collective."""
        found: Tensor = _Added.apply(values_N, self.group)
        return found

    def coarse(self, logprobs_NS: Tensor, ids_NK: Tensor) -> Tensor:
        """Return the log-probabilities of `ids_NK`, then that of all other tokens together, the
        same on all ranks, `[N, K + 1]`. A collective."""
        local_NK = ids_NK - self.columns.start
        mine_NK = (local_NK >= 0) & (local_NK < self.size)
        # A last column takes what other ranks have, so that no index is out of bounds.
        wide = pad(logprobs_NS, [0, 1])
        local_NK = torch.where(mine_NK, local_NK, self.size)
        chosen_NK = self.added(wide.gather(-1, local_NK))
        others_NS = wide.scatter(-1, local_NK, -torch.inf)[:, : self.size]
        return torch.cat([chosen_NK, self.logsumexp(others_NS)[:, None]], -1)

    def likeliest(self, logprobs_NS: Tensor, k: int) -> Tensor:
        """Return the ids of the `k` likeliest tokens, likeliest first, int64 `[N, k]`. A
        collective; no gradients. The vocabulary has at least `k` tokens."""
        values_NK, ids_NK = logprobs_NS.detach().topk(min(k, self.size), -1)
        missing = [0, k - values_NK.shape[1]]
        values_NK = pad(values_NK, missing, value=-torch.inf)
        ids_NK = pad(ids_NK + self.columns.start, missing)
        every = torch.cat(_gathered(values_NK, self.group), -1)
        return torch.cat(_gathered(ids_NK, self.group), -1).gather(-1, every.topk(k, -1).indices)

    def whole(self, logprobs_NS: Tensor) -> Tensor:
        """Return the values of the whole vocabulary, `[N, V]`, the same on all ranks. A
        collective."""
        found: Tensor = _Whole.apply(logprobs_NS, self)
        return found


class _Added(torch.autograd.Function):
    """Sum of all ranks' values; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _reduced(values, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Shared(torch.autograd.Function):
    """A value that is the same on all ranks, and gets the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduced(grads[0], dist.ReduceOp.SUM, ctx.group), None


class _Whole(torch.autograd.Function):
    """Values of all tokens out of those of each rank, which gets the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, values_NS: Tensor, part: VocabularyPart) -> Tensor:
        ctx.columns = part.columns
        padded = pad(values_NS, [0, part.width - part.size])
        return torch.cat(_gathered(padded, part.group), -1)[:, : part.vocab]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.columns], None


def _reduced(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """Return the values of all ranks, combined by `op`; keep those that are given."""
    if group.size() == 1:
        return values
    values = values.contiguous().clone()
    dist.all_reduce(values, op, group=group)
    return values


def _gathered(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the values of all ranks, in order."""
    if group.size() == 1:
        return [values]
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values, group=group)
    return parts
