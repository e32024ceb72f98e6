"""Probes forgive what a kernel rounds, and nothing more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.strategy.vllm.worker_side.probing import compare, probe

INNER, HIDDEN = 768, 2048
CPU = torch.device("cpu")


def cut(values: Tensor) -> Tensor:
    """What the tensor cores of a GPU read of float32: the first 10 bits after the point."""
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)


def expert(rounding: bool, wrong: bool = False) -> Tensor:
    """Output of an expert for its probe, `[H]`."""
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(INNER, HIDDEN, generator=g) * 0.02 for _ in range(2))
    down = torch.randn(HIDDEN, INNER, generator=g) * 0.02
    if wrong:
        gate = gate.roll(1, 0)
    read = cut if rounding else torch.clone
    x = probe(HIDDEN, CPU)
    inner = torch.nn.functional.silu(read(gate) @ x) * (read(up) @ x)
    return read(down) @ read(inner)


def test_experts_in_float32_may_use_tf32_on_a_gpu() -> None:
    sent = expert(rounding=False)
    compare("expert 0", expert(rounding=True), sent, torch.float32, tf32=True)
    with pytest.raises(WeightSyncError, match="expert 0 does not hold what was sent"):
        compare("expert 0", expert(rounding=True), sent, torch.float32)
    with pytest.raises(WeightSyncError, match="expert 0 does not hold what was sent"):
        compare("expert 0", expert(rounding=True, wrong=True), sent, torch.float32, tf32=True)
