"""torchao's AdamW with running means in 8 bits (arXiv 2110.02861), and its state as plain tensors.

Numbers of 8 bits have a common factor for each block of 256 of them. Parameters with fewer than
4096 elements, or with a rest of a block, keep means in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roll.config.sections.optimizers.kinds import AdamW8bitConfig
from roll.strategy.available import EIGHT_BIT, check_engine

_PARTS = ("codes", "scale", "qmap")
"""Tensors of means in 8 bits: numbers, factors of the blocks, values of the numbers."""
_SIGNED = "exp_avg"
"""Name of the means that may be negative."""


def adamw_8bit(config: AdamW8bitConfig, p: nn.Parameter) -> Optimizer:
    """Return the optimizer of one parameter; weights of norms and biases do not decay.

    Raises:
        EngineMissingError: torchao is not installed, or its version is not supported.
    """
    check_engine(config.kind, EIGHT_BIT)
    from torchao.optim import AdamW8bit

    class Eager(AdamW8bit):  # type: ignore[misc]
        """The optimizer without compiled code, which would need a compiler and minutes."""

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    made: Optimizer = Eager(
        [p],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay if p.dim() >= 2 else 0.0,
    )
    return made


def plain(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state; means in 8 bits as `exp_avg:codes` and so on."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if _in_8_bits(value):
            found |= {f"{name}:{part}": getattr(value, part) for part in _PARTS}
        else:
            found[name] = value
    return found


def rebuilt(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a parameter that has these tensors, as `plain` names them."""
    from torchao.optim.subclass_8bit import OptimState8bit

    found: dict[str, Any] = {}
    for key, value in tensors.items():
        name, _, part = key.partition(":")
        if not part:
            found[name] = value
        elif name not in found:
            parts = [tensors[f"{name}:{each}"] for each in _PARTS]
            found[name] = OptimState8bit(*parts, name == _SIGNED, dtype=torch.float32)
    return found


def _in_8_bits(value: object) -> bool:
    from torchao.optim.subclass_8bit import OptimState8bit

    return isinstance(value, OptimState8bit)
