"""Writing of torch tensors to safetensors files. Only one tensor at a time is copied to the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from mcore_adapter.shared_results import gather_results

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
"""Names of the dtypes in safetensors files."""

Write = Callable[[str, Tensor], None]
"""Function that takes the name of a tensor and the tensor, and writes it to its file."""


def spec_of(shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """Return the safetensors description of a tensor with this shape and dtype. KeyError for a
    dtype that safetensors files are not written in."""
    return Spec(_NAMES[dtype], tuple(shape))


@contextmanager
def written(files: Mapping[Path, dict[str, Spec]]) -> Iterator[Write]:
    """Create safetensors files, and yield a function that writes one tensor to its place.

    Tensors may be written in any order, but all must be written. When the block ends, the files are
    on the disk.

    Args:
        files: description of each tensor by name, for each file.
    """
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
    """Write the safetensors files of a Hugging Face folder, with an index if there are several.

    Args:
        folder: existing folder to write to.
        weights: names and tensors, as `gather.export` yields them.
        specs: description of each tensor, by name.
        max_shard_bytes: largest size of one file, in bytes; a larger tensor gets a file of its own.
    """
    files = split_files(specs, max_shard_bytes, "model.safetensors")
    with written({folder / name: held for name, held in files.items()}) as write:
        for name, tensor in weights:
            write(name, tensor)
    if len(files) > 1:
        write_index(folder / "model.safetensors.index.json", files)


def write_on_rank_0(
    dst: Path,
    num_bytes: int,
    tensors: Iterator[tuple[str, Tensor]],
    write: Callable[[Path], None],
) -> None:
    """Let rank 0 write a folder, see `complete_or_absent`, from tensors of all ranks. A collective.

    Args:
        num_bytes: number of bytes that will be written.
        tensors: this rank's iterator of an export; on other ranks than 0 it yields nothing.
        write: function that fills a folder on rank 0, and takes the tensors from `tensors`.

    Raises:
        ConversionError: on all ranks, if `dst` exists or rank 0 could not write.
        Exception: on rank 0, any other error of `write`; ConversionError then on the others.
    """
    with ExitStack() as stack:

        def begin() -> Path | None:
            if dist.get_rank() != 0:
                return None
            return stack.enter_context(complete_or_absent(dst, num_bytes))

        def fill() -> None:
            with stack.pop_all():
                if folder is None or dist.get_rank() != 0:
                    deque(tensors, maxlen=0)
                    return
                try:
                    write(folder)
                except Exception:
                    deque(tensors, maxlen=0)  # the export needs all ranks, to its end
                    raise

        # Two exchanges, so that a folder that exists is refused before the export.
        folder = gather_results(begin, str(dst))[0]
        gather_results(fill, str(dst))


def with_repeated_names(
    weights: Iterable[tuple[str, Tensor]], twice: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, and after it the same tensor under the other names that a checkpoint uses.

    Args:
        twice: for each other name, the name of the weight that it repeats.
    """
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
    """Write a sharded model as a folder for `from_pretrained`. A collective.

    Args:
        dst: folder to create; must not exist. Rank 0 writes it; it is complete or absent.
        src: Hugging Face checkpoint from which the model was loaded.
        dtype: dtype of the weights, named as on the command line; `config.json` will state it.
        max_shard_bytes: largest size of one safetensors file, as in `write_hf`.

    Raises:
        ConversionError: on all ranks, if `dst` exists or rank 0 could not read `src` or write.
    """
    metas = exported(chunks, table, sizes)
    weights = export(chunks, table, sizes, wanted=dist.get_rank() == 0)

    def write(folder: Path) -> None:
        copy_companions(src, folder, dtype)
        stored = open_hf(src).tensors
        specs = {name: spec_of(meta.shape, meta.dtype) for name, meta in metas.items()}
        twice = {n: of for n, of in table.repeats.items() if n in stored and of in specs}
        specs |= {name: specs[of] for name, of in twice.items()}
        again = with_repeated_names(weights, twice)
        write_hf(folder, again, specs, max_shard_bytes=max_shard_bytes)

    write_on_rank_0(dst, sum(meta.num_bytes for meta in metas.values()), weights, write)
