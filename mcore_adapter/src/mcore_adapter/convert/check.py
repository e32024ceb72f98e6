"""Check of a folder: its contents and its possible layouts, from the headers of its files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mcore_adapter.convert.commands import open_source
from mcore_adapter.convert.conversions import Settings, layout_of
from mcore_adapter.convert.storage.folders import McoreFolder, dense_file
from mcore_adapter.convert.storage.source import FullTensor, Source
from mcore_adapter.errors import LayoutError
from mcore_adapter.parallel_sizes import ParallelSizes

_MOST_RANKS = 64


@dataclass(frozen=True)
class Report:
    """Result of `check`: the contents of a folder and its possible layouts.

    A report exists only if every tensor is mapped. Otherwise `check` raises an error.
    """

    model_type: str
    kind: str
    """Format of the folder, in words: Hugging Face or Megatron with its sizes, model or adapter."""
    num_tensors: int
    num_parameters: int
    """Number of parameters without padding. Copies of tied embeddings count once."""
    num_bytes: int
    dtypes: dict[str, int]
    """Number of parameters of each data type, by safetensors name of the type."""
    divides: dict[str, list[int]]
    """Possible sizes of tp, pp, ep and etp, each tried alone with the others at 1."""
    sizes: ParallelSizes
    rank_bytes: dict[str, tuple[int, int]]
    """Bytes of dense parameters and bytes of experts on one rank under `sizes`, by stage."""
    notes: tuple[str, ...]
    """Notes for the user: tensors that a conversion leaves out, and which of two files it reads."""


def check(
    path: Path,
    sizes: ParallelSizes | None = None,
    *,
    dtype: str | None = None,
    base: Path | None = None,
) -> Report:
    """Report what a folder holds and how it can be laid out.

    Args:
        path: Hugging Face checkpoint, Megatron layout, or adapter in either format.
        sizes: sizes for which the bytes per rank are reported. Default: those of a Megatron layout,
            otherwise 1 for each.
        dtype: data type for which the bytes per rank are reported, one of `arrays.FLOATS`.
            Default: the types of the files.
        base: folder of the model that a PEFT adapter changes. Default: the one the adapter names.

    Raises:
        ConversionError: files are missing or damaged, or tensors are missing or unmapped.
        LayoutError: the model does not divide over `sizes`.
        UnknownModelError: there is no table for the model type.
    """
    source = open_source(path, base)
    if isinstance(source.folder, McoreFolder):
        sizes = sizes or source.folder.sizes
    dtypes: Counter[str] = Counter()
    for full in source.tensors.values():
        dtypes[full.spec.dtype] += prod(full.spec.shape)
    return Report(
        model_type=source.table.model_type,
        kind=_kind(source),
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
    """Return the sizes as text such as `tp 2 pp 4`, under the names that the command line uses.

    Sizes of 1 are left out, except for an `etp` that is set. If nothing is left, the text is `tp
    1`.
    """
    named = {"tp": sizes.tp, "pp": sizes.pp, "vpp": sizes.vpp, "ep": sizes.ep}
    parts = [f"{name} {size}" for name, size in named.items() if size > 1]
    if sizes.etp is not None:
        parts.append(f"etp {sizes.etp}")
    if sizes.layers is not None:
        parts.append(f"layers {','.join(map(str, sizes.layers))}")
    return " ".join(parts) or "tp 1"


def _kind(source: Source) -> str:
    """Return the format of a folder in words, see `Report.kind`."""
    kind = "Hugging Face"
    if isinstance(source.folder, McoreFolder):
        kind = f"Megatron, {describe(source.folder.sizes)}"
    return kind if source.adapter is None else f"{kind}, LoRA adapter"


def _divides(source: Source) -> dict[str, list[int]]:
    """Return the sizes that fit for each of tp, pp, ep and etp alone.

    ep and etp are tried only if the model has experts. To be fast, this function tries one tensor
    of each kind, which represents all layers and experts.
    """
    kinds: dict[object, FullTensor] = {}
    for full in source.tensors.values():
        kinds.setdefault((id(full.task.param), full.spec), full)
    sample = [full.task for full in kinds.values()]
    source = replace(source, plan=lambda sizes: sample)
    shape = source.table.shape

    def fitting(most: int, sizes: Callable[[int], ParallelSizes]) -> list[int]:
        return [n for n in range(1, min(most, _MOST_RANKS) + 1) if _fits(source, sizes(n))]

    # etp stays at 1 while tp varies, so that only dense tensors decide which tp fits
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
    """Return whether the source can be laid out with these sizes."""
    try:
        layout_of(source, sizes, Settings())
    except LayoutError:
        return False
    return True


def _rank_bytes(
    source: Source, sizes: ParallelSizes, settings: Settings
) -> dict[str, tuple[int, int]]:
    """Return, per stage, a rank's bytes in its dense file and in its file of experts (0: none)."""
    files = {
        name: sum(spec.num_bytes for spec in specs.values())
        for name, specs in layout_of(source, sizes, settings).files.items()
    }
    found = {}
    for stage in range(sizes.pp):
        # all cuts are even, so every rank of a stage holds the same number of bytes
        experts = [n for f, n in files.items() if f.startswith(f"experts-pp{stage}-")]
        found[f"stage {stage}"] = files.get(dense_file(stage, 0), 0), max(experts, default=0)
    return found
