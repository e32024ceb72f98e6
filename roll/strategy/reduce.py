"""From unreduced `[B, T]` tensors to one number: the loss and the metrics of an update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.api import TokenLoss
from roll.core.metrics import Max, Mean, Metric, Metrics, Sum


def weighted_sum(values_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Sum of value times weight. A weight of zero silences any value, infinities included."""
    return values_BT.masked_fill(weights_BT == 0, 0.0).mul(weights_BT).sum()


def max_over_ranks(value: int, device: torch.device) -> int:
    """The largest `value` of all ranks of the default group; collective."""
    if dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


class LossMetrics:
    """Collects one update's loss metrics on the device and reads them once, at the end.

    Losses are means over updates: merged over micro-batches and ranks the weights of one update
    add up to 1 and the totals to its loss. Other metrics are means over trained tokens.
    """

    def __init__(self, rows_local: int, dp_size: int) -> None:
        self._loss_weight = 1.0 / dp_size if rows_local else 0.0
        self._loss: dict[str, list[Tensor]] = {}
        self._token: dict[str, list[Tensor]] = {}
        self._largest: dict[str, list[Tensor]] = {}
        self._tokens: list[Tensor] = []

    def add(self, loss: TokenLoss, weights_BT: Tensor, mask_BT: Tensor, total: Tensor) -> None:
        """One micro-batch: its loss, the weights and mask it was reduced with, and the result."""
        self._loss.setdefault("loss/total", []).append(total.detach())
        for name, part_BT in loss.parts_BT.items():
            part = weighted_sum(part_BT.detach(), weights_BT)
            self._loss.setdefault(f"loss/{name}", []).append(part)
        for name, value_BT in loss.metrics_BT.items():
            value = value_BT.detach().float().masked_fill(~mask_BT, 0.0).sum()
            self._token.setdefault(name, []).append(value)
        for name, value_BT in loss.maxima_BT.items():
            largest = value_BT.detach().float().masked_fill(~mask_BT, -torch.inf).max()
            self._largest.setdefault(name, []).append(largest)
        self._tokens.append(mask_BT.sum())

    def take(self) -> Metrics:
        """The metrics of this rank; merging those of all ranks gives the update's."""
        if not self._tokens:
            return Metrics({"trained_tokens": Sum(0.0)})
        tokens = float(torch.stack(self._tokens).sum())
        named = [*self._loss.items(), *self._token.items()]
        totals = torch.stack([torch.stack(parts).double().sum() for _, parts in named]).tolist()
        values: dict[str, Metric] = {"trained_tokens": Sum(tokens)}
        for (name, _), total in zip(named, totals, strict=True):
            is_loss = name in self._loss
            values[name] = Mean(total, self._loss_weight if is_loss else tokens)
        for name, parts in self._largest.items():
            values[name] = Max(float(torch.stack(parts).max()))
        return Metrics(values)
