"""From unreduced `[B, T]` tensors to one number: the loss and the metrics of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    add up to 1 and the totals to its loss. Other metrics are means over trained tokens, or over
    rows that have some.
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
        """One micro-batch: its loss, the weights and mask it was reduced with, and the result."""
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

    def take(self) -> Metrics:
        """The metrics of this rank; merging those of all ranks gives the update's."""
        if not self._tokens:
            return Metrics({"trained_tokens": Sum(0.0)})
        tokens, rows = torch.stack([*_summed([self._tokens, self._rows])]).tolist()
        values: dict[str, Metric] = {"trained_tokens": Sum(tokens)}
        for named, weight in (
            (self._loss, self._loss_weight),
            (self._token, tokens),
            (self._row, rows),
        ):
            totals = torch.stack([*_summed(named.values())]).tolist() if named else []
            for name, total in zip(named, totals, strict=True):
                values[name] = Mean(total, weight)
        for name, parts in self._largest.items():
            values[name] = Max(float(torch.stack(parts).max()))
        return Metrics(values)


def _summed(parts: Iterable[list[Tensor]]) -> Iterator[Tensor]:
    return (torch.stack(each).double().sum() for each in parts)


def micro_loss(
    micro: B,
    terms_of: Callable[[Tensor], T],
    loss: TermsLoss[T, B],
    metrics: LossMetrics,
    device: torch.device,
) -> Tensor:
    """The loss of a micro-batch, of which `metrics` takes note.

    Args:
        micro: on the CPU.
        terms_of: the model's terms where a mask `[B, T]` on the CPU is set.
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
    """How an update ended; the first data parallel rank counts it if it was skipped."""
    skipped = 0.0 if applied or info.dp_rank else 1.0
    return {"grad_norm": Last(grad_norm), "lr": Last(lr), "skipped_steps": Sum(skipped)}
