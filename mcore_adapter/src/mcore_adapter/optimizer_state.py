"""Where Megatron-Core's optimizers keep what belongs to a parameter: masters and moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.load import shards
from mcore_adapter.local_tensors import Ranks, held_tensors
from mcore_adapter.modeling.optimizer import parts_of
from mcore_adapter.parallel_sizes import ParallelSizes

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParameterState:
    """What the optimizer has of a parameter; of a distributed one, this rank's part of that."""

    main: Tensor
    """What it updates: the parameter, a piece of it, or an fp32 copy of either."""
    state: dict[str, Any]
    counter: dict[str, Any]
    """Where `step` is: PyTorch's Adam counts in the state, those of Transformer Engine and Apex
    in the group."""
    start: int
    end: int
    """Entries of the flattened parameter."""

    @property
    def step(self) -> int:
        """Steps that Adam has made."""
        return int(self.counter.get("step", 0))

    @property
    def moments(self) -> dict[str, Tensor]:
        return {kind: self.state[kind] for kind in MOMENTS if kind in self.state}

    def part(self, shard: Tensor) -> Tensor:
        """Its entries of a tensor that is shaped as the parameter."""
        return shard.flatten()[self.start : self.end].view(self.main.shape)

    def set_adam(self, step: int, shards: dict[str, Tensor]) -> None:
        """
        Args:
            shards: the moments, shaped as the parameter; none before the first step.
        """
        self.state.clear()
        self.counter.pop("step", None)
        if step:
            in_state = self.counter is self.state
            device = self.main.device
            self.counter["step"] = torch.tensor(float(step), device=device) if in_state else step
        for kind, shard in shards.items():
            # A copy, in memory of its own: the shard is a file's, or much larger.
            self.state[kind] = self.part(shard).to(self.main.device, self.main.dtype, copy=True)


def states_of(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[Tensor, ParameterState]:
    """By parameter; with a distributed optimizer only those that this rank has a part of."""
    models = {getattr(p, "main_param", p): p for chunk in chunks for p in chunk.parameters()}
    found: dict[Tensor, ParameterState] = {}
    for each in parts_of(optimizer):
        for parameter, main, group in _mains(each, models):
            state = each.optimizer.state[main]
            counter = state if isinstance(each.optimizer, torch.optim.AdamW) else group
            start, end = 0, main.numel()
            if isinstance(each, DistributedOptimizer):
                cut = each._get_model_param_range_map(parameter)["param"]
                start, end = cut.start, cut.end
            found[parameter] = ParameterState(main, state, counter, start, end)
    return found


@torch.no_grad()
def load_masters(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    table: ModelTable,
    sizes: ParallelSizes,
) -> None:
    """Fill fp32 copies from a Hugging Face folder, which may be more exact than the weights they
    were made of. Reads only where there are such copies.

    Raises:
        ConversionError: folder, table and model do not have the same tensors or shapes.
    """
    ranks, slots = Ranks.of_this_process(), states_of(chunks, optimizer)
    copied = [
        held
        for held in held_tensors(chunks, table, sizes, ranks)
        if held.tensor in slots and slots[held.tensor].main.dtype != held.tensor.dtype
    ]
    for held, shard in shards(folder, copied, table, sizes, ranks):
        slot = slots[held.tensor]
        slot.main.copy_(slot.part(shard))


def _mains(
    optimizer: MegatronOptimizer, models: dict[Tensor, Tensor]
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Parameter, what is updated, and its group."""
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(optimizer, DistributedOptimizer):
            yield from ((models[main], main, group) for main in group["params"])
            continue
        for parameters, mains in (
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        ):
            for parameter, main in zip(parameters[number], mains[number], strict=True):
                yield parameter, main, group
