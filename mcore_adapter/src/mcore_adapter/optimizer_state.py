"""Access to the optimizer state of a parameter in Megatron-Core: fp32 copy and Adam's moments."""

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
"""Keys of Adam's two moments in the optimizer's state."""


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of a parameter; with a distributed optimizer, of this rank's part of it."""

    main: Tensor
    """Tensor that the optimizer updates: the parameter, a part of it, or an fp32 copy of either."""
    state: dict[str, Any]
    """The optimizer's entries for `main`, such as Adam's moments."""
    counter: dict[str, Any]
    """Dictionary with the key `step`: `state` for PyTorch's Adam, the parameter group for the Adam
    of Transformer Engine and of Apex."""
    start: int
    """First entry of the flattened parameter that `main` covers."""
    end: int
    """Entry of the flattened parameter after the last one that `main` covers."""

    @property
    def step(self) -> int:
        """Number of steps that Adam has made."""
        return int(self.counter.get("step", 0))

    @property
    def moments(self) -> dict[str, Tensor]:
        """Adam's moments by name, each shaped as `main`; empty before the first step."""
        return {kind: self.state[kind] for kind in MOMENTS if kind in self.state}

    def part(self, shard: Tensor) -> Tensor:
        """Return the entries that `main` covers of a tensor that is shaped as the parameter."""
        return shard.flatten()[self.start : self.end].view(self.main.shape)

    def set_adam(self, step: int, shards: dict[str, Tensor]) -> None:
        """Replace Adam's step count and moments.

        Args:
            step: number of steps that Adam has made.
            shards: moments by name, shaped as the parameter; empty before the first step.
        """
        self.state.clear()
        self.counter.pop("step", None)
        if step:
            in_state = self.counter is self.state
            device = self.main.device
            self.counter["step"] = torch.tensor(float(step), device=device) if in_state else step
        for kind, shard in shards.items():
            # Always copy: the shard may be the memory of a file, or much larger than its part.
            self.state[kind] = self.part(shard).to(self.main.device, self.main.dtype, copy=True)


def states_of(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> dict[Tensor, ParameterState]:
    """Return the optimizer state of each parameter that is trained, by the parameter itself.

    With a distributed optimizer, only parameters of which this rank updates a part are included.
    """
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
    """Fill the optimizer's fp32 copies of weights from a Hugging Face folder.

    The folder may be more precise than the weights from which the copies were made. Only tensors
    that have such a copy are read.

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
    """Yield each parameter, the tensor that the optimizer updates, and the parameter group.

    `models` has the parameter for each tensor that an optimizer without distribution updates.
    """
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
