"""Reduction of per-token losses and metrics `[B, T]` to the loss and the metrics of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.loss_interface import TermsLoss, TokenLoss
from roll.core.batches import TrainBatch
from roll.core.metrics import Last, Max, Mean, Metric, Metrics, Sum
from roll.core.types import RankInfo

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum value times weight. A weight of zero removes any value, infinities and NaN included."""
    return values_BT.masked_fill(weights_BT == 0, 0.0).mul(weights_BT).sum()


def max_over_ranks(value: int, device: torch.device) -> int:
    """Return the largest `value` of all ranks of the default process group. Collective."""
    if dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


class LossMetrics:
    """Collector of the loss metrics of one update. Values stay on the device until `take`.

    Losses are means over updates: merged over micro-batches and data parallel ranks, the weights of
    one update add up to 1, and the totals add up to the loss. Other metrics are means over trained
    tokens, or over rows that have trained tokens.

    Args:
        rows_local: number of rows of this rank.
        dp_size: number of data parallel ranks.
    """

    def __init__(self, rows_local: int, dp_size: int) -> None:
        self._loss_weight = 1.0 / dp_size if rows_local else 0.0
        self._loss: dict[str, list[Tensor]] = {}
        self._token: dict[str, list[Tensor]] = {}
        self._row: dict[str, list[Tensor]] = {}
        self._largest: dict[str, list[Tensor]] = {}
        self._tokens: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, loss: TokenLoss, weights_BT: Tensor, mask_BT: Tensor, total: Tensor) -> None:
        """Add the metrics of one micro-batch.

        Args:
            loss: unreduced loss and metrics of the micro-batch.
            weights_BT: weights of the tokens in the loss.
            mask_BT: bool mask of the trained tokens.
            total: reduced loss of the micro-batch.
        """
        self._loss.setdefault("loss/total", []).append(total.detach())
        for name, part_BT in loss.parts_BT.items():
            part = weighted_sum(part_BT.detach(), weights_BT)
            self._loss.setdefault(f"loss/{name}", []).append(part)
        for name, value_BT in loss.metrics_BT.items():
            value = value_BT.detach().float().masked_fill(~mask_BT, 0.0).sum()
            self._token.setdefault(name, []).append(value)
        rows_B = mask_BT.any(1)
        for name, value_B in loss.metrics_B.items():
            value = value_B.detach().float().masked_fill(~rows_B, 0.0).sum()
            self._row.setdefault(name, []).append(value)
        for name, value_BT in loss.maxima_BT.items():
            largest = value_BT.detach().float().masked_fill(~mask_BT, -torch.inf).max()
            self._largest.setdefault(name, []).append(largest)
        self._tokens.append(mask_BT.sum())
        self._rows.append(rows_B.sum())

    def add_beside(self, name: str, total: Tensor) -> None:
        """Add a loss of one micro-batch that is no part of `loss/total`."""
        self._loss.setdefault(f"loss/{name}", []).append(total.detach())

    def take(self) -> Metrics:
        """Return the metrics of this rank; without trained tokens it has no maxima.

        Merging the metrics of all data parallel leaders gives those of the update.
        """
        if not self._tokens:
            return Metrics({"trained_tokens": Sum(0.0)})
        tokens, rows = _sums([self._tokens, self._rows])
        values: dict[str, Metric] = {"trained_tokens": Sum(tokens)}
        for named, weight in (
            (self._loss, self._loss_weight),
            (self._token, tokens),
            (self._row, rows),
        ):
            totals = _sums(named.values()) if named else []
            for name, total in zip(named, totals, strict=True):
                values[name] = Mean(total, weight)
        for name, parts in self._largest.items() if tokens else ():
            values[name] = Max(float(torch.stack(parts).max()))
        return Metrics(values)


def _sums(parts: Iterable[list[Tensor]]) -> list[float]:
    """Add up each list of scalars, in float64."""
    return torch.stack([torch.stack(each).double().sum() for each in parts]).tolist()


def micro_loss(
    micro: B,
    terms_of: Callable[[Tensor], T],
    loss: TermsLoss[T, B],
    metrics: LossMetrics,
    device: torch.device,
) -> Tensor:
    """Compute the loss of a micro-batch and add its metrics to `metrics`.

    Args:
        micro: micro-batch on the CPU; `token_weights` must be set.
        terms_of: computes the model's terms of the tokens in a bool mask `[B, T]` on the CPU.
    """
    weights_BT = micro.require("token_weights", made_by="token_weights")
    terms = terms_of(micro.loss_mask | (weights_BT != 0))
    micro, weights_BT = micro.to(device), weights_BT.to(device)
    token_loss = loss(terms, micro)
    total = weighted_sum(token_loss.loss_BT, weights_BT)
    metrics.add(token_loss, weights_BT, micro.loss_mask, total)
    return total


def update_metrics(
    grad_norm: float, lr: float, *, applied: bool, info: RankInfo
) -> dict[str, Metric]:
    """Return the metrics of an update's outcome: gradient norm, learning rate, skipped steps.

    Only the first data parallel rank counts a skipped step, as the ranks' counts are summed.
    """
    skipped = 0.0 if applied or info.dp_rank else 1.0
    return {"grad_norm": Last(grad_norm), "lr": Last(lr), "skipped_steps": Sum(skipped)}
