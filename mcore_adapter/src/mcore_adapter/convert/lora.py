"""Conversion of LoRA factors between PEFT's tensors and Megatron's shards.

An adapter needs no table of its own, because the row of a weight also describes its factors. If the
input dimension of the weight is cut over tensor parallel ranks, factor A is cut likewise and factor
B is replicated. Otherwise factor A is replicated, and factor B is cut like the weight. Factor B is
converted with the operator of the weight.

Megatron fuses some weights that have separate factors in PEFT. The fused A then has the factors A
one above the other, and the fused B is block diagonal:

    q: B1 A1, v: B2 A2   ->   A = [A1; A2], B = fuse([B1 0], [0 0], [0 B2])

The product B A stays the same, and the reverse conversion restores every bit. An adapter that was
trained on the fused weight has one A for all parts. In PEFT format each part gets a copy of this A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcore_adapter.convert.arrays import A, cut, join, zeros
from mcore_adapter.convert.conversion_plan import HfRef, Task, tasks
from mcore_adapter.convert.joined_arrays import Joined
from mcore_adapter.convert.ops import FormatOp, FuseGateUp, FuseQKV, JoinRows, OrdersRows, Shape
from mcore_adapter.convert.shards import Replicated, Sharded
from mcore_adapter.convert.storage.folders import HfFolder
from mcore_adapter.convert.storage.peft import adapted_modules, factor_name
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class WeightFactors:
    """Factors of one Megatron weight: the Hugging Face modules that have factors, and the ranks."""

    modules: tuple[str, ...]
    """Names of the modules (weight names without `.weight`), in the order of the operator."""
    ranks: tuple[int, ...]
    """LoRA rank of each module; a single rank if several modules share one A."""


@dataclass(frozen=True)
class StackA:
    """Operator for the factors A, `[rank, in]`, of the parts of a fused weight.

    The Megatron tensor has the factors one above the other, or it is one factor that all parts
    share.
    """

    mcore: str
    hf: tuple[str, ...]
    ranks: tuple[int, ...]
    """LoRA rank of each part; a single rank if the parts share one A."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0] if len(self.ranks) < len(self.hf) else join(hf)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        if len(self.ranks) < len(self.hf):
            return [mcore] * len(self.hf)
        return cut(mcore, self.ranks)


@dataclass(frozen=True)
class BlockB:
    """Operator for the factors B, `[out, rank]`, of the parts of a fused weight.

    The Megatron tensor has the factors as the blocks of a block diagonal matrix, with its rows in
    the order of the fused weight. If the parts share one A, the factors share all columns instead.
    """

    mcore: str
    hf: tuple[str, ...]
    ranks: tuple[int, ...]
    """LoRA rank of each part; a single rank if the parts share one A."""
    fuse: FormatOp
    """Operator of the weight."""
    which: tuple[int, ...]
    """Index of the part of the weight for each factor of `hf`. Parts without factors get zeros."""

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        shared = len(self.ranks) < len(self.hf)
        total, parts = sum(self.ranks), dict(zip(self.which, hf, strict=True))
        wide = []
        for index in range(len(self.fuse.hf)):
            if index not in parts:
                rows = _rows(self.fuse, index, {i: b.shape[0] for i, b in parts.items()}, shape)
                wide.append(zeros(hf[0], (rows, total)))
                continue
            if shared:
                wide.append(parts[index])
                continue
            at = self.which.index(index)
            before, rows = sum(self.ranks[:at]), parts[index].shape[0]
            after = total - before - self.ranks[at]
            sides = zeros(hf[0], (rows, before)), zeros(hf[0], (rows, after))
            wide.append(join([sides[0], parts[index], sides[1]], 1))
        return self.fuse.to_mcore(wide, shape)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        """Return the B factors of the parts.

        Values outside of their blocks would be lost. A model in memory has none there, because its
        mask keeps them 0; only arrays from files are looked at.

        Raises:
            ConversionError: an array from files has values outside of the blocks.
        """
        parts = self.fuse.to_hf(mcore, shape)
        if len(self.ranks) < len(self.hf):
            return [parts[index] for index in self.which]
        found = []
        for index, part in enumerate(parts):
            blocks = cut(part, self.ranks, 1)
            at = self.which.index(index) if index in self.which else None
            others = [block for i, block in enumerate(blocks) if i != at]
            if any(_has_values(block) for block in others):
                raise ConversionError(
                    f"{self.mcore} is not block diagonal: it was trained after it was read from "
                    "PEFT files; write it with one shared A of the whole rank"
                )
            if at is not None:
                found.append(blocks[at])
        return found


def _has_values(block: Any) -> bool:
    """Return whether an array from files has an entry other than 0; False for tensors in memory and
    for outlines."""
    return isinstance(block, Joined) and any(part.any() for part in block.parts)


def _rows(fuse: FormatOp, index: int, known: Mapping[int, int], shape: Shape) -> int:
    """Return the number of output features of a part without factors of a fused weight.

    Args:
        index: index of the part.
        known: numbers of output features of the parts with factors, by index.

    Raises:
        ConversionError: the number cannot be known, so all parts or none must have factors.
    """
    if isinstance(fuse, FuseQKV):
        shape = fuse.own or shape
        queries = shape.num_heads * (2 if fuse.gated else 1)
        return (queries if index == 0 else shape.num_kv_heads) * shape.head_dim
    if isinstance(fuse, FuseGateUp):
        return next(iter(known.values()))
    if isinstance(fuse, JoinRows):
        return fuse.lengths[index]
    raise ConversionError(f"{fuse.mcore}: give all of {', '.join(fuse.hf)} factors, or none")


def factors_of(folder: HfFolder, table: ModelTable) -> dict[str, WeightFactors]:
    """Return the factors that a PEFT adapter has, by Megatron name of the weight that they change.

    Raises:
        ConversionError: the adapter changes a weight that the model does not have.
    """
    have = adapted_modules(folder)
    found = {}
    left = set(have)
    for task in tasks(table, ParallelSizes()):
        modules = tuple(m for ref in task.hf if (m := ref.name.removesuffix(".weight")) in have)
        if not modules:
            continue
        ranks = tuple(folder.tensors[factor_name(m, "A")].spec.shape[0] for m in modules)
        found[task.name] = WeightFactors(modules, ranks)
        left -= set(modules)
    if left:
        raise ConversionError(
            f"{folder.path} changes {min(left)}, and the table of {table.model_type} has no row "
            f"for {min(left)}.weight"
        )
    return found


def adapter_plan(
    table: ModelTable, targets: Mapping[str, WeightFactors]
) -> Callable[[ParallelSizes], list[Task]]:
    """Return a function that lists the tasks of an adapter for given parallel sizes.

    Args:
        targets: factors of the adapter, by Megatron name of the weight.
    """

    def plan(sizes: ParallelSizes) -> list[Task]:
        planned = [task for task in tasks(table, sizes) if task.param.copy_of is None]
        return [part for task in planned if task.name in targets for part in _split(task, targets)]

    return plan


def _split(task: Task, targets: Mapping[str, WeightFactors]) -> tuple[Task, Task]:
    """Return the tasks of the factors A and B that the adapter adds to the weight of `task`."""
    names = tuple(ref.name for ref in task.hf)

    def part(param: Param) -> Task:
        refs = tuple(HfRef(name) for name in param.op.hf)
        return Task(param.op.mcore, param, refs, task.layer, task.expert)

    a, b = factor_rows(task.param, task.name, names, targets[task.name])
    return part(a), part(b)


def factor_rows(
    row: Param, name: str, names: Sequence[str], target: WeightFactors
) -> tuple[Param, Param]:
    """Return the table rows of the factors A and B of a weight.

    Args:
        row: table row of the weight.
        name: Megatron name of the weight, either of one layer or a pattern with `*` as in the row.
        names: Hugging Face names of the weight, in the same form as `name`.
        target: modules that have factors, named in the same form as `name`, and their ranks.

    Raises:
        ConversionError: the operator of the weight does more than order rows, the weight is no
            matrix, or the modules do not belong to it.
    """
    module, op, shard = name.removesuffix(".weight"), row.op, row.shard
    if not isinstance(op, OrdersRows):
        raise ConversionError(f"{name}: LoRA is not converted through {type(op).__name__}")
    modules = [source.removesuffix(".weight") for source in names]
    if not set(target.modules) <= set(modules):
        raise ConversionError(f"{name} has factors of {', '.join(target.modules)}, not its own")
    factors_a, factors_b = (tuple(factor_name(m, x) for m in target.modules) for x in "AB")
    of_input = isinstance(shard, Sharded) and shard.dim == 1
    which = tuple(modules.index(m) for m in target.modules)
    stack = StackA(f"{module}.lora_A.weight", factors_a, target.ranks)
    blocks = BlockB(f"{module}.lora_B.weight", factors_b, target.ranks, op, which)
    shard_a, shard_b = (shard, Replicated()) if of_input else (Replicated(), shard)
    weights = [row.shapes[index] for index in which]
    if any(len(shape) != 2 for shape in weights):
        raise ConversionError(f"{name} is no weight of a linear layer; it can have no factors")
    shared = len(target.ranks) < len(target.modules)
    ranks = target.ranks * len(target.modules) if shared else target.ranks
    shapes_a = tuple((rank, wide) for rank, (_, wide) in zip(ranks, weights, strict=True))
    shapes_b = tuple((out, rank) for rank, (out, _) in zip(ranks, weights, strict=True))
    return (
        replace(row, op=stack, shapes=shapes_a, shard=shard_a, stacked=False, pads_vocab=False),
        replace(row, op=blocks, shapes=shapes_b, shard=shard_b, stacked=False),
    )


def factors_to_json(targets: Mapping[str, WeightFactors]) -> dict[str, Any]:
    """Return the factors of an adapter as JSON values for `mcore.json`."""
    return {name: asdict(target) for name, target in targets.items()}


def factors_from_json(note: Mapping[str, Any], path: Path) -> dict[str, WeightFactors]:
    """Read the factors of an adapter from the JSON values that `factors_to_json` made.

    Args:
        path: path of the file that holds the values, for error messages.

    Raises:
        ConversionError: the values do not have the form that `factors_to_json` makes.
    """
    found = {}
    for name, entry in note.items():
        modules, ranks = (
            (entry.get("modules"), entry.get("ranks")) if isinstance(entry, dict) else (None, None)
        )
        named = isinstance(modules, list) and all(isinstance(m, str) for m in modules)
        counted = isinstance(ranks, list) and all(type(n) is int and n > 0 for n in ranks)
        if not named or not counted or len(ranks or ()) not in (1, len(modules or ())):
            raise ConversionError(f"{path} is damaged: {name} has no modules and ranks")
        assert modules is not None
        assert ranks is not None
        found[name] = WeightFactors(tuple(modules), tuple(ranks))
    return found
