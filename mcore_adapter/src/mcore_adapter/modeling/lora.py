"""LoRA of the linear layers that tensor parallel ranks cut.

A linear layer gets two modules, `lora_A` and `lora_B`, and its output their product. Where
Megatron fuses weights, A is stacked and B a block diagonal, as `convert.lora` has them in files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mcore_adapter.convert.arrays import Outline
from mcore_adapter.convert.conversion_plan import Task, tasks
from mcore_adapter.convert.lora import BlockB, StackA
from mcore_adapter.convert.lora_table import Lora, adapter_table
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import LayoutError
from mcore_adapter.load import shard_of
from mcore_adapter.local_tensors import Ranks, global_name
from mcore_adapter.parallel_sizes import ParallelSizes

Linear = Any
"""Column or row parallel, of Megatron-Core, which is untyped."""


class Factor(nn.Module):
    """A or B of a linear layer: this rank's shard of `[rank, in]` or `[out, rank]`.

    The rank is that of all parts of a fused weight together.
    """

    mask: Tensor | None
    """[out, rank] of a fused weight's B: one where the factors of its parts lie, else zero."""

    def __init__(self, weight: Tensor, mask: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.mask is None else self.weight * self.mask
        return F.linear(x, weight)


class Change:
    """What a linear layer's output gets; a hook of the layer."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self.on = True

    def __call__(
        self, linear: Linear, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        if not self.on:
            return output
        group = linear.tp_group
        narrow = linear.lora_A(self._dropped(inputs[0], linear))
        # What travels between the ranks is as narrow as the factors.
        if isinstance(linear, RowParallelLinear):
            narrow = (
                reduce_scatter_to_sequence_parallel_region(narrow, group=group)
                if linear.sequence_parallel
                else reduce_from_tensor_model_parallel_region(narrow, group=group)
            )
        else:
            narrow = (
                gather_from_sequence_parallel_region(narrow, group=group)
                if linear.sequence_parallel
                else copy_to_tensor_model_parallel_region(narrow, group=group)
            )
        return output[0] + linear.lora_B(narrow) * self.lora.scale, output[1]

    def _dropped(self, x: Tensor, linear: Linear) -> Tensor:
        if not (linear.training and self.lora.dropout):
            return x
        # Ranks that have the same input drop the same of it, the others each what they draw.
        same = isinstance(linear, ColumnParallelLinear) and not linear.sequence_parallel
        with nullcontext() if same else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.lora.dropout)


@dataclass(frozen=True)
class Adapter:
    """The factors of a model."""

    lora: Lora
    table: ModelTable
    """Of the factors alone: loads, exports and keeps them as the model's does the weights."""
    changes: Sequence[Change]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model is the one without adapter."""
        for change in self.changes:
            change.on = False
        try:
            yield
        finally:
            for change in self.changes:
                change.on = True


def add_adapter(
    chunks: Sequence[GPTModel],
    table: ModelTable,
    lora: Lora,
    sizes: ParallelSizes,
    *,
    seed: int = 0,
) -> Adapter:
    """Freeze a model and give its linear layers factors: A as PEFT draws it, the same whatever the
    layout, and B zero.

    Args:
        chunks: bare; wrap them afterwards.
        table: of the model.

    Raises:
        ConfigError: a target is no linear layer, or one that cannot have factors.
        LayoutError: the layers are those of Transformer Engine.
    """
    if chunks[0].config.transformer_impl != "local":
        raise LayoutError("adapters need the local layer spec, not Transformer Engine's layers")
    adapter, ranks = adapter_table(table, lora), Ranks.of_this_process()
    due = {
        task.name: task for task in tasks(adapter, sizes) if ranks.pp in task.stages(sizes, table)
    }
    changes = []
    for number, chunk in enumerate(chunks):
        chunk.requires_grad_(False)
        _let_gradients_pass(chunk)
        first = sizes.layers_of(ranks.pp, number, table.shape.num_layers).start
        for name, linear in list(chunk.named_modules()):
            whole = global_name(name, first, table, sizes, ranks)
            if f"{whole}.lora_A.weight" in due:
                a, b = (due[f"{whole}.lora_{x}.weight"] for x in "AB")
                _add_factors(linear, _Factors(a, b, adapter, sizes, ranks, seed))
                change = Change(lora)
                # Before hooks that the layer has, which see the sum.
                linear.register_forward_hook(change, prepend=True)
                changes.append(change)
    return Adapter(lora, adapter, changes)


def _let_gradients_pass(chunk: GPTModel) -> None:
    """A layer that is computed again, and a stage that hands its output on, want a gradient to pass
    on; with a frozen embedding nothing before the first factors has one."""
    config = chunk.config
    if chunk.pre_process and (
        config.recompute_granularity == "full" or config.pipeline_model_parallel_size > 1
    ):
        chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


@dataclass(frozen=True)
class _Factors:
    """This rank's shards of what a weight's factors start with."""

    a: Task
    b: Task
    table: ModelTable
    sizes: ParallelSizes
    ranks: Ranks
    seed: int

    def start(self, in_features: int) -> Tensor:
        """A [rank, in]: uniform, of a standard deviation of 1 / sqrt(3 in)."""
        bound = 1 / math.sqrt(in_features)
        stack, parts = self.a.param.op, []
        assert isinstance(stack, StackA)
        for ref, rank in zip(self.a.hf, stack.ranks, strict=True):
            number = hashlib.sha256(f"{self.seed} {ref.name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(number, "big") >> 1)
            parts.append(
                torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
            )
        full = stack.to_mcore(parts, self.table.shape)
        return shard_of(full, self.a, self.sizes, self.ranks)

    def pattern(self, out_features: int) -> Tensor:
        """Of B [out, rank]: one where it can be other than zero."""
        blocks = self.b.param.op
        assert isinstance(blocks, BlockB)
        rows = self.table.shape.vocab if self.b.param.pads_vocab else out_features
        outlines = blocks.fuse.to_hf(Outline((rows, 1)), self.table.shape)
        parts = [
            torch.ones(outlines[index].shape[0], rank)
            for index, rank in zip(blocks.which, blocks.ranks, strict=True)
        ]
        full = blocks.to_mcore(parts, self.table.shape)
        return shard_of(full, self.b, self.sizes, self.ranks)


def _add_factors(linear: Linear, factors: _Factors) -> None:
    like, row = linear.weight, isinstance(linear, RowParallelLinear)
    start = factors.start(linear.input_size).to(like)
    pattern = factors.pattern(linear.output_size).to(like)
    a = Factor(start.clone())
    b = Factor(torch.zeros_like(pattern), None if bool(pattern.all()) else pattern)
    cut, whole = (a, b) if row else (b, a)
    set_tensor_model_parallel_attributes(cut.weight, True, dim=1 if row else 0, stride=1)
    # Each rank sees its tokens; what they say of a factor that all have is summed.
    whole.weight.sequence_parallel = linear.sequence_parallel  # type: ignore[attr-defined]
    linear.add_module("lora_A", a)
    linear.add_module("lora_B", b)
