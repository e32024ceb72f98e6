"""What a folder holds and how it can be laid out, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mcore_adapter.convert.commands import open_source
from mcore_adapter.convert.conversions import Settings, layout_of
from mcore_adapter.convert.storage.folders import McoreFolder, dense_file
from mcore_adapter.convert.storage.source import Full, Source
from mcore_adapter.errors import LayoutError
from mcore_adapter.parallel_sizes import ParallelSizes

_MOST_RANKS = 64


@dataclass(frozen=True)
class Report:
    """All tensors are mapped; otherwise there is an error instead."""

    model_type: str
    kind: str
    num_tensors: int
    num_parameters: int
    """Without padding; copies of tied embeddings count once."""
    num_bytes: int
    dtypes: dict[str, int]
    """Parameters of each type."""
    divides: dict[str, list[int]]
    """For each of tp, pp, ep, etp alone, the sizes that divide."""
    sizes: ParallelSizes
    rank_bytes: dict[str, tuple[int, int]]
    """By stage, bytes of dense parameters and of experts on a rank, for these sizes."""
    notes: tuple[str, ...]
    """What a conversion would leave out, and which of two files it would read."""


def check(
    path: Path,
    sizes: ParallelSizes | None = None,
    *,
    dtype: str | None = None,
    base: Path | None = None,
) -> Report:
    """
    Args:
        sizes: of which to give the bytes per rank; those of `path` or 1 by default.

    Raises:
        ConversionError: the folder is not whole, or tensors are missing or unmapped.
        LayoutError: the model does not divide over `sizes`.
        UnknownModelError: there is no table for its model type.
    """
    source = open_source(path, base)
    kind = "Hugging Face"
    if isinstance(source.folder, McoreFolder):
        kind = f"Megatron, {describe(source.folder.sizes)}"
        sizes = sizes or source.folder.sizes
    if source.adapter is not None:
        kind += ", LoRA adapter"
    dtypes: Counter[str] = Counter()
    for full in source.tensors.values():
        dtypes[full.spec.dtype] += prod(full.spec.shape)
    return Report(
        model_type=source.table.model_type,
        kind=kind,
        num_tensors=len(source.tensors),
        num_parameters=sum(dtypes.values()),
        num_bytes=sum(full.spec.num_bytes for full in source.tensors.values()),
        dtypes=dict(dtypes),
        divides=_divides(source),
        sizes=sizes or ParallelSizes(),
        rank_bytes=_rank_bytes(source, sizes or ParallelSizes(), Settings(dtype=dtype)),
        notes=source.notes,
    )


def describe(sizes: ParallelSizes) -> str:
    """Sizes as the command line takes them, those of 1 left out."""
    named = {"tp": sizes.tp, "pp": sizes.pp, "vpp": sizes.vpp, "ep": sizes.ep}
    parts = [f"{name} {size}" for name, size in named.items() if size > 1]
    if sizes.etp is not None:
        parts.append(f"etp {sizes.etp}")
    if sizes.layers is not None:
        parts.append(f"layers {','.join(map(str, sizes.layers))}")
    return " ".join(parts) or "tp 1"


def _divides(source: Source) -> dict[str, list[int]]:
    """One tensor of each kind stands for all layers and experts."""
    kinds: dict[object, Full] = {}
    for full in source.tensors.values():
        kinds.setdefault((id(full.task.param), full.spec), full)
    sample = [full.task for full in kinds.values()]
    source = replace(source, plan=lambda sizes: sample)
    shape = source.table.shape

    def fitting(most: int, sizes: Callable[[int], ParallelSizes]) -> list[int]:
        return [n for n in range(1, min(most, _MOST_RANKS) + 1) if _fits(source, sizes(n))]

    # experts are cut on an axis of their own, and do not say how the others divide
    alone = 1 if shape.num_experts else None
    found = {
        "tp": fitting(shape.num_heads, lambda n: ParallelSizes(tp=n, etp=alone)),
        "pp": fitting(shape.num_layers, lambda n: ParallelSizes(pp=n)),
    }
    if shape.num_experts:
        found["ep"] = fitting(shape.num_experts, lambda n: ParallelSizes(ep=n))
        found["etp"] = fitting(_MOST_RANKS, lambda n: ParallelSizes(etp=n))
    return found


def _fits(source: Source, sizes: ParallelSizes) -> bool:
    try:
        layout_of(source, sizes, Settings())
    except LayoutError:
        return False
    return True


def _rank_bytes(
    source: Source, sizes: ParallelSizes, settings: Settings
) -> dict[str, tuple[int, int]]:
    files = {
        name: sum(spec.num_bytes for spec in specs.values())
        for name, specs in layout_of(source, sizes, settings).files.items()
    }
    found = {}
    for stage in range(sizes.pp):
        # ranks of a stage differ in nothing, for all that is cut is cut evenly
        experts = [n for f, n in files.items() if f.startswith(f"experts-pp{stage}-")]
        found[f"stage {stage}"] = files.get(dense_file(stage, 0), 0), max(experts, default=0)
    return found
