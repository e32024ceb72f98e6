"""The optimizers of an FSDP2 model: all of PyTorch, on shards or on whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from roll.config.sections.optimizers.kinds import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from roll.strategy.fsdp2 import eight_bit
from roll.strategy.fsdp2.hidden_matrices import hidden_matrices
from roll.strategy.fsdp2.whole_steps import Form, Outline, WholeSteps
from roll.strategy.tensor_names import trained
from roll.strategy.training import adamw


class ShardedSteps:
    """Steps of an optimizer that treats each element alone, so that a rank needs only its shards.

    Args:
        optimizer: optimizer of sharded parameters.
        peak: peak of the learning rate.
    """

    def __init__(self, optimizer: Optimizer, peak: float) -> None:
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.peak = peak
        self._optimizer = optimizer

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """State of the parameters, by their names in the optimizer; sharded as the parameters."""
        state = self._optimizer.state
        return {p: state[p] for p in self.params if p in state}

    @property
    def saved(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """State as a checkpoint has it."""
        return self.state

    def restore(self, p: nn.Parameter, outline: Outline) -> None:
        """Replace the state of a parameter by zeros, which the caller then fills."""
        self._optimizer.state.pop(p, None)
        if outline:
            self._optimizer.state[p] = {
                name: torch.zeros((), device=p.device) if name == "step" else torch.zeros_like(p)
                for name in outline
            }

    def step(self, lr: float) -> None:
        """Take a step with the gradients of the parameters."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()


Steps = ShardedSteps | WholeSteps


def optimizers_of(model: PreTrainedModel, config: OptimizerConfig) -> list[Steps]:
    """Make the optimizers of the trained parameters: one, or with Muon up to two.

    Raises:
        ConfigError: Muon has no matrices to train, or cannot train some.
    """
    params = [p for _, p in trained(model)]
    match config:
        case AdamWConfig():
            groups = _groups(params)
            optimizer = torch.optim.AdamW(groups, lr=config.lr, **adamw.options(config))
            return [ShardedSteps(optimizer, config.lr)]
        case SgdConfig():
            sgd = torch.optim.SGD(
                _groups(params),
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
            return [ShardedSteps(sgd, config.lr)]
        case AdamW8bitConfig():
            form = Form(eight_bit.plain, eight_bit.rebuilt)
            return [WholeSteps(params, lambda p: eight_bit.adamw_8bit(config, p), config.lr, form)]
        case AdafactorConfig():
            return [WholeSteps(params, lambda p: _adafactor(config, p), config.lr)]
        case MuonConfig():
            return _muon(model, params, config)
    assert_never(config)


def by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by mesh, because operations on lists of tensors need a single mesh."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def _groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups with and without weight decay, each of one mesh."""
    return [group for of_mesh in by_mesh(params) for group in adamw.groups(of_mesh)]


def _muon(
    model: PreTrainedModel, params: Sequence[nn.Parameter], config: MuonConfig
) -> list[Steps]:
    """Return Muon for the matrices inside the layers and, if there are others, AdamW for them."""
    matrices = hidden_matrices(model)

    def make(p: nn.Parameter) -> Optimizer:
        return torch.optim.Muon(
            [p],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
            ns_steps=config.ns_steps,
            adjust_lr_fn=config.scale,
        )

    found: list[Steps] = [WholeSteps(matrices, make, config.lr)]
    chosen = {id(p) for p in matrices}
    if others := [p for p in params if id(p) not in chosen]:
        peak = config.lr if config.others.lr is None else config.others.lr
        optimizer = torch.optim.AdamW(_groups(others), lr=peak, **adamw.options(config.others))
        found.append(ShardedSteps(optimizer, peak))
    return found


def _adafactor(config: AdafactorConfig, p: nn.Parameter) -> Optimizer:
    """Return Adafactor of one parameter; weights of norms and biases do not decay."""
    return torch.optim.Adafactor(
        [p],
        lr=config.lr,
        beta2_decay=config.beta2_decay,
        eps=(None, config.min_scale),
        d=config.clip_threshold,
        weight_decay=config.weight_decay if p.dim() >= 2 else 0.0,
    )
