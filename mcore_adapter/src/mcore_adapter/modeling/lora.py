"""LoRA factors of the linear layers that are divided over tensor parallel ranks.

A linear layer gets two modules, `lora_A` and `lora_B`, and their product is added to its output.
Where Megatron fuses weights, the factors A are stacked, and the factors B form a block diagonal
matrix, as `convert.lora` stores them in files.
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
from mcore_adapter.modeling.traits import ScoreLayer
from mcore_adapter.parallel_sizes import ParallelSizes

Linear = Any
"""Column or row parallel linear layer of Megatron-Core, which has no type annotations."""


class Factor(nn.Module):
    """Factor A or B of a linear layer: this rank's shard of `[rank, in]` or `[out, rank]`.

    For a fused weight, `rank` is the sum of the ranks of its parts.
    """

    mask: Tensor | None
    """Mask `[out, rank]` of a fused weight's B: one inside the blocks of its parts, zero elsewhere.
    None: no entry is masked."""

    def __init__(self, weight: Tensor, mask: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of the factor and `x`, `[..., in]` or `[..., rank]`."""
        weight = self.weight if self.mask is None else self.weight * self.mask
        return F.linear(x, weight)


class LoraHook:
    """Forward hook of a linear layer that adds the product of the LoRA factors to its output."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self.on = True

    def __call__(
        self, linear: Linear, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output with the scaled product of the factors added; unchanged while `on` is
        False. The bias, the second item, stays as it is."""
        if not self.on:
            return output
        group = linear.tp_group
        narrow = linear.lora_A(self._dropped(inputs[0], linear))
        # Communicate between A and B, where the activations are only as wide as the LoRA rank.
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
        """Return the input of A: in training after dropout, otherwise unchanged."""
        if not (linear.training and self.lora.dropout):
            return x
        # Ranks with the same input must drop the same entries; other ranks draw independently.
        same = isinstance(linear, ColumnParallelLinear) and not linear.sequence_parallel
        with nullcontext() if same else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.lora.dropout)


@dataclass(frozen=True)
class Adapter:
    """LoRA factors of a model."""

    lora: Lora
    table: ModelTable
    """Table of the factors alone. It serves to load, export and save them, as the model's table
    does for the weights."""
    changes: Sequence[LoraHook]
    """Hooks of all linear layers that have factors."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off within the block."""
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
    """Freeze a model, but for a head with one output per token, and give its linear layers LoRA
    factors.

    A starts with random values as in PEFT, the same under any layout; B starts with zeros.

    Args:
        chunks: chunks without wrappers; wrap them afterwards.
        seed: seed of the initial values of A.

    Raises:
        ConfigError: a target is not a linear layer, or is one that cannot have factors.
        LayoutError: the layers are those of Transformer Engine.
    """
    if chunks[0].config.transformer_impl != "local":
        raise LayoutError("adapters need the local layer spec, not Transformer Engine's layers")
    adapter, ranks = adapter_table(table, lora), Ranks.of_this_process()
    due = {
        task.name: task for task in tasks(adapter, sizes) if ranks.pp == task.stage(sizes, table)
    }
    changes = []
    for number, chunk in enumerate(chunks):
        chunk.requires_grad_(False)
        for head in (module for module in chunk.modules() if isinstance(module, ScoreLayer)):
            head.requires_grad_(True)
        config = chunk.config
        # Layers that are recomputed, and stages that pass their output on, need a gradient to pass
        # back. Nothing before the first factors would have one.
        if config.recompute_granularity == "full" or config.pipeline_model_parallel_size > 1:
            let_gradients_pass(chunk)
        first = sizes.layers_of(ranks.pp, number, table.shape.num_layers).start
        for name, linear in list(chunk.named_modules()):
            whole = global_name(name, first, table, sizes, ranks)
            if f"{whole}.lora_A.weight" in due:
                a, b = (due[f"{whole}.lora_{x}.weight"] for x in "AB")
                _add_factors(linear, _Factors(a, b, adapter, sizes, ranks, seed))
                change = LoraHook(lora)
                # Run before other hooks of the layer, so that they see the sum.
                linear.register_forward_hook(change, prepend=True)
                changes.append(change)
    return Adapter(lora, adapter, changes)


def let_gradients_pass(chunk: GPTModel) -> None:
    """Let the output of a frozen embedding require a gradient, if the chunk has the embedding."""
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


@dataclass(frozen=True)
class _Factors:
    """Initial values of this rank's shards of the factors A and B of a weight."""

    a: Task
    b: Task
    table: ModelTable
    sizes: ParallelSizes
    ranks: Ranks
    seed: int

    def start(self, in_features: int) -> Tensor:
        """Return this rank's shard of the initial A, which is uniform between -1 / sqrt(in) and
        1 / sqrt(in).

        The whole A is `[rank, in]`, with the factors of all PEFT layers that the Megatron layer
        joins. Each factor has a generator of its own, seeded with `seed` and the PEFT name, so that
        the whole A is the same under all parallel sizes.

        Args:
            in_features: input size of the whole layer, not of this rank's part.
        """
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
        """Return a mask for B `[out, rank]`: one where B may differ from zero, else zero."""
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
    """Add the modules `lora_A` and `lora_B` to a linear layer."""
    like, row = linear.weight, isinstance(linear, RowParallelLinear)
    start = factors.start(linear.input_size).to(like)
    pattern = factors.pattern(linear.output_size).to(like)
    a = Factor(start.clone())
    b = Factor(torch.zeros_like(pattern), None if bool(pattern.all()) else pattern)
    cut, whole = (a, b) if row else (b, a)
    set_tensor_model_parallel_attributes(cut.weight, True, dim=1 if row else 0, stride=1)
    # With this mark, gradients from the tokens of all ranks are summed for a replicated factor.
    whole.weight.sequence_parallel = linear.sequence_parallel  # type: ignore[attr-defined]
    linear.add_module("lora_A", a)
    linear.add_module("lora_B", b)
