"""LoRA adapters in PEFT format <-> Megatron shards, and their products added to the weights.

No second table: factor A of a weight is cut as its input is, or replicated, and factor B goes
through the operator of the weight. Where Megatron fuses weights that have factors of their own, A
holds theirs one above the other and B is block diagonal:

    q: B1 A1, v: B2 A2   ->   A = [A1; A2], B = fuse([B1 0], [0 0], [0 B2])

which has the same product and is taken apart again to the bit. An adapter that was trained on the
fused weight has one A for all parts; they share it on the way back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from mcore_adapter.convert.arrays import A, cut, join, zeros
from mcore_adapter.convert.conversion_plan import HfRef, Task, tasks
from mcore_adapter.convert.ops import FormatOp, FuseGateUp, FuseQKV, Rename, Shape
from mcore_adapter.convert.run_conversion import Delta
from mcore_adapter.convert.shards import Replicated, Sharded
from mcore_adapter.convert.storage.folders import HfFolder
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import read_header
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = ("modules_to_save", "use_dora", "target_parameters", "trainable_token_indices")


@dataclass(frozen=True)
class Target:
    """Which Hugging Face weights of one Megatron weight have factors."""

    modules: tuple[str, ...]
    """Without `.weight`, in the order of the operator."""
    ranks: tuple[int, ...]
    """Of each; a single one where several modules share one A."""


@dataclass(frozen=True)
class StackA:
    """Factors A of the parts of a fused weight, `[rank, in]`, one above the other, or one that all
    share."""

    mcore: str
    hf: tuple[str, ...]
    ranks: tuple[int, ...]

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        return hf[0] if len(self.ranks) < len(self.hf) else join(hf)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        if len(self.ranks) < len(self.hf):
            return [mcore] * len(self.hf)
        return cut(mcore, self.ranks)


@dataclass(frozen=True)
class BlockB:
    """Factors B of the parts of a fused weight, `[out, rank]`, as a block diagonal."""

    mcore: str
    hf: tuple[str, ...]
    ranks: tuple[int, ...]
    fuse: FormatOp
    which: tuple[int, ...]
    """Which parts of the weight the factors belong to; the others have zeros."""

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
        parts = self.fuse.to_hf(mcore, shape)
        if len(self.ranks) < len(self.hf):
            return [parts[index] for index in self.which]
        found = []
        for index, part in enumerate(parts):
            blocks = cut(part, self.ranks, 1)
            at = self.which.index(index) if index in self.which else None
            others = [block for i, block in enumerate(blocks) if i != at]
            if any(isinstance(block, np.ndarray) and block.any() for block in others):
                raise ConversionError(
                    f"{self.mcore} is not block diagonal: it was trained after it was read from "
                    "PEFT files; write it with one shared A of the whole rank"
                )
            if at is not None:
                found.append(blocks[at])
        return found


def _rows(fuse: FormatOp, index: int, known: Mapping[int, int], shape: Shape) -> int:
    """Output features of a part of a fused weight that has no factors."""
    if isinstance(fuse, FuseQKV):
        queries = shape.num_heads * (2 if fuse.gated else 1)
        return (queries if index == 0 else shape.num_kv_heads) * shape.head_dim
    if isinstance(fuse, FuseGateUp):
        return next(iter(known.values()))
    raise ConversionError(f"{fuse.mcore}: give all of {', '.join(fuse.hf)} factors, or none")


def open_peft(path: Path, base: Mapping[str, Any]) -> HfFolder:
    """
    Args:
        base: the `config.json` of the model that the adapter changes.

    Raises:
        ConversionError: it is no LoRA adapter of linear layers.
    """
    config = read_json(path / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ConversionError(f"{path} is of type {config.get('peft_type')!r}, expected 'LORA'")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ConversionError(
                f"{path / CONFIG}: {name} is {config[name]!r}; only low-rank factors of linear "
                "layers are converted"
            )
    if not (path / WEIGHTS).is_file():
        raise ConversionError(f"{path / WEIGHTS} is missing")
    tensors = read_header(path / WEIGHTS)
    strange = [name for name in tensors if not _NAME.fullmatch(name)]
    if strange:
        raise ConversionError(f"{path / WEIGHTS}: {strange[0]} is no factor of a linear layer")
    flat = [name for name, piece in tensors.items() if len(piece.spec.shape) != 2]
    if flat:
        raise ConversionError(
            f"{path / WEIGHTS}: {flat[0]} has shape {list(tensors[flat[0]].spec.shape)}, expected "
            "a matrix"
        )
    empty = [name for name, piece in tensors.items() if 0 in piece.spec.shape]
    if empty:
        raise ConversionError(f"{path / WEIGHTS}: {empty[0]} is empty")
    lonely = [name for name in tensors if _partner(name) not in tensors]
    if lonely:
        raise ConversionError(f"{path / WEIGHTS} has {lonely[0]} but not {_partner(lonely[0])}")
    return HfFolder(path, base, tensors)


def _partner(name: str) -> str:
    one, other = (".lora_A.", ".lora_B.") if ".lora_A." in name else (".lora_B.", ".lora_A.")
    return name.replace(one, other)


def factor(module: str, which: str) -> str:
    """The name of a factor in a PEFT file."""
    return f"base_model.model.{module}.lora_{which}.weight"


def targets_of(folder: HfFolder, table: ModelTable) -> dict[str, Target]:
    """Megatron weights that a PEFT adapter changes.

    Raises:
        ConversionError: it changes a weight that the model does not have.
    """
    have = {match[1] for name in folder.tensors if (match := _NAME.fullmatch(name))}
    found = {}
    left = set(have)
    for task in tasks(table, ParallelSizes()):
        modules = tuple(m for ref in task.hf if (m := ref.name.removesuffix(".weight")) in have)
        if not modules:
            continue
        ranks = tuple(folder.tensors[factor(m, "A")].spec.shape[0] for m in modules)
        found[task.name] = Target(modules, ranks)
        left -= set(modules)
    if left:
        raise ConversionError(
            f"{folder.path} changes {min(left)}, and the table of {table.model_type} has no row "
            f"for {min(left)}.weight"
        )
    return found


def adapter_plan(
    table: ModelTable, targets: Mapping[str, Target]
) -> Callable[[ParallelSizes], list[Task]]:
    """The tasks of an adapter, for any sizes."""

    def plan(sizes: ParallelSizes) -> list[Task]:
        planned = [task for task in tasks(table, sizes) if task.param.copy_of is None]
        return [part for task in planned if task.name in targets for part in _split(task, targets)]

    return plan


def _split(task: Task, targets: Mapping[str, Target]) -> tuple[Task, Task]:
    names = tuple(ref.name for ref in task.hf)

    def part(param: Param) -> Task:
        refs = tuple(HfRef(name) for name in param.op.hf)
        return Task(param.op.mcore, param, refs, task.layer, task.expert)

    a, b = factor_rows(task.param, task.name, names, targets[task.name])
    return part(a), part(b)


def factor_rows(row: Param, name: str, names: Sequence[str], target: Target) -> tuple[Param, Param]:
    """Of a weight, the rows of its factors A and B.

    Args:
        name: of the weight in Megatron, and `names` in Hugging Face: of one layer, or as the row
            has them, with `*`; those of the target alike.

    Raises:
        ConversionError: its operator does more than order rows.
    """
    module, op, shard = name.removesuffix(".weight"), row.op, row.shard
    if not isinstance(op, FuseQKV | FuseGateUp | Rename):
        raise ConversionError(f"{name}: LoRA is not converted through {type(op).__name__}")
    modules = [source.removesuffix(".weight") for source in names]
    if not set(target.modules) <= set(modules):
        raise ConversionError(f"{name} has factors of {', '.join(target.modules)}, not its own")
    factors_a, factors_b = (tuple(factor(m, x) for m in target.modules) for x in "AB")
    of_input = isinstance(shard, Sharded) and shard.dim == 1
    stack = StackA(f"{module}.lora_A.weight", factors_a, target.ranks)
    blocks = BlockB(
        f"{module}.lora_B.weight",
        factors_b,
        target.ranks,
        op,
        tuple(modules.index(m) for m in target.modules),
    )
    shard_a, shard_b = (shard, Replicated()) if of_input else (Replicated(), shard)
    weights = [row.shapes[modules.index(m)] for m in target.modules]
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


def to_note(targets: Mapping[str, Target]) -> dict[str, Any]:
    """For `mcore.json`."""
    return {name: asdict(target) for name, target in targets.items()}


def from_note(note: Mapping[str, Any], path: Path) -> dict[str, Target]:
    """
    Args:
        path: of the file that holds the note.

    Raises:
        ConversionError: it is not what `to_note` makes.
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
        found[name] = Target(tuple(modules), tuple(ranks))
    return found


def deltas_of(folder: HfFolder) -> dict[str, Delta]:
    """What an adapter adds to which Hugging Face weight.

    Raises:
        ConversionError: its configuration has no scale.
    """
    path = folder.path / CONFIG
    config = read_json(path)
    default = scale_key(path, config, "lora_alpha")
    patterns = _patterns(path, config)
    found = {}
    for name, piece in folder.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "A":
            continue
        rank = piece.spec.shape[0]
        alpha = _pattern(patterns, match[1], default)
        scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
        found[f"{match[1]}.weight"] = Delta(piece, folder.tensors[factor(match[1], "B")], scale)
    return found


def scale_key(path: Path, config: Mapping[str, Any], name: str) -> float:
    """A number of `adapter_config.json`.

    Raises:
        ConversionError: it is missing, or none.
    """
    found = config.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise ConversionError(f"{path}: {name} is {found!r}, expected a positive number")
    return found


def _patterns(path: Path, config: Mapping[str, Any]) -> dict[re.Pattern[str], float]:
    """By what PEFT matches against the end of a name."""
    found = config.get("alpha_pattern") or {}
    if not isinstance(found, dict):
        raise ConversionError(f"{path}: alpha_pattern is {found!r}, expected an object")
    try:
        return {re.compile(rf"(.*\.)?({k})$"): scale_key(path, found, k) for k in found}
    except re.error as error:
        raise ConversionError(f"{path}: alpha_pattern has no pattern: {error}") from error


def _pattern(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    return next((v for k, v in patterns.items() if k.match(module)), default)
