"""Tensors of torch into safetensors files, one after the other: only one is copied at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.convert.conversions import MAX_SHARD_BYTES, split_files, write_index
from mcore_adapter.convert.run_conversion import create_files
from mcore_adapter.convert.storage.companions import copy_companions
from mcore_adapter.convert.storage.folders import open_hf
from mcore_adapter.convert.storage.output import complete_or_absent, wait_for_disk
from mcore_adapter.convert.storage.tensor_file import Spec, Writer
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.gather import export, exported
from mcore_adapter.parallel_sizes import ParallelSizes

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Write = Callable[[str, Tensor], None]


def spec_of(shape: Sequence[int], dtype: torch.dtype) -> Spec:
    return Spec(_NAMES[dtype], tuple(shape))


@contextmanager
def written(files: Mapping[Path, dict[str, Spec]]) -> Iterator[Write]:
    """Yields what writes a tensor to its place, in any order; on the disk when the block ends."""
    where = {
        name: piece
        for pieces in create_files(files.items()).values()
        for name, piece in pieces.items()
    }
    writer = Writer(write_back=True)

    def write(name: str, tensor: Tensor) -> None:
        piece = where.pop(name)
        assert spec_of(tuple(tensor.shape), tensor.dtype) == piece.spec, name
        writer.write(piece, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    try:
        yield write
    finally:
        writer.close()
    assert not where, f"{next(iter(where))} was announced and not written"
    for path in files:
        wait_for_disk(path)


def write_hf(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, Spec],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """The safetensors files of a Hugging Face folder, with an index if there are several.

    Args:
        weights: as `gather.export` gives them.
        specs: of each of them.
    """
    files = split_files(specs, max_shard_bytes, "model.safetensors")
    with written({folder / name: held for name, held in files.items()}) as write:
        for name, tensor in weights:
            write(name, tensor)
    if len(files) > 1:
        write_index(folder / "model.safetensors.index.json", files)


def with_repeats(
    weights: Iterable[tuple[str, Tensor]], twice: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """And again, after the tensor itself, what a checkpoint stores twice."""
    for name, tensor in weights:
        yield name, tensor
        yield from ((other, tensor) for other, of in twice.items() if of == name)


def write_model(
    dst: Path,
    src: Path,
    chunks: Sequence[nn.Module],
    table: ModelTable,
    sizes: ParallelSizes,
    *,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """A model that is cut over ranks as a folder for `from_pretrained`; a collective.

    Args:
        dst: must not exist. Rank 0 writes it; it is complete or absent.
        src: the Hugging Face checkpoint that the model was loaded from.
        dtype: of the weights, as the command line names it; `config.json` will say so.

    Raises:
        ConversionError: `dst` exists, or the disk is too small.
    """
    stored = open_hf(src).tensors
    metas = exported(chunks, table, sizes)
    writes = dist.get_rank() == 0
    weights = export(chunks, table, sizes, wanted=writes)
    if writes:
        with complete_or_absent(dst, sum(meta.num_bytes for meta in metas.values())) as folder:
            copy_companions(src, folder, dtype)
            specs = {name: spec_of(meta.shape, meta.dtype) for name, meta in metas.items()}
            twice = {n: of for n, of in table.repeats.items() if n in stored and of in specs}
            specs |= {name: specs[of] for name, of in twice.items()}
            weights = with_repeats(weights, twice)
            write_hf(folder, weights, specs, max_shard_bytes=max_shard_bytes)
    else:
        deque(weights, maxlen=0)
    dist.barrier()
