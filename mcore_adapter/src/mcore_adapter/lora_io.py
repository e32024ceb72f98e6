"""Reading and writing of a model's LoRA factors as PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.convert.lora_table import target_modules
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.peft import CONFIG, PREFIX, WEIGHTS, open_peft, scale_key
from mcore_adapter.errors import ConversionError
from mcore_adapter.gather import ShapeAndDtype, ShardTransform, export, exported
from mcore_adapter.load import load
from mcore_adapter.local_tensors import Ranks, held_tensors
from mcore_adapter.modeling.lora import Adapter
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.write import spec_of, write_on_rank_0, written


def load_adapter(
    folder: Path, chunks: Sequence[nn.Module], adapter: Adapter, sizes: ParallelSizes
) -> None:
    """Fill the LoRA factors of a model from a PEFT folder.

    Not a collective: every rank reads for itself.

    Raises:
        ConversionError: the folder has other factors or another scale than the model, uses rsLoRA,
            or has ranks or alphas that differ between modules.
    """
    open_peft(folder, adapter.table.config)
    config = read_json(folder / CONFIG)
    patterns = [key for key in ("alpha_pattern", "rank_pattern") if config.get(key)]
    if config.get("use_rslora") or patterns:
        raise ConversionError(
            f"{folder / CONFIG} has {', '.join(patterns) or 'use_rslora'}; only adapters with one "
            "rank and a scale of lora_alpha / r are trained"
        )
    alpha, rank = (scale_key(folder / CONFIG, config, name) for name in ("lora_alpha", "r"))
    scale = alpha / rank
    if scale != adapter.lora.scale:
        raise ConversionError(
            f"{folder} has a scale (lora_alpha / r) of {scale}, the model {adapter.lora.scale}; "
            "give the same"
        )
    load(folder, chunks, adapter.table, sizes)


def write_adapter(
    dst: Path, src: Path, chunks: Sequence[nn.Module], adapter: Adapter, sizes: ParallelSizes
) -> None:
    """Write the LoRA factors of a model as a PEFT folder. A collective.

    Args:
        dst: folder to create; must not exist. Rank 0 writes it; it is complete or absent.
        src: Hugging Face checkpoint of the model, which the adapter will name as its base.

    Raises:
        ConversionError: on all ranks, if `dst` exists or rank 0 could not write.
    """
    metas = exported_factors(chunks, adapter, sizes)
    factors = export(chunks, adapter.table, sizes, wanted=dist.get_rank() == 0)
    num_bytes = sum(meta.num_bytes for meta in metas.values())

    def write(folder: Path) -> None:
        write_peft(folder, str(src.resolve()), factors, metas, adapter)

    write_on_rank_0(dst, num_bytes, factors, write)


def exported_factors(
    chunks: Sequence[nn.Module], adapter: Adapter, sizes: ParallelSizes
) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of each LoRA factor, by its name in PEFT. A collective.

    The order is that of `gather.export` with the adapter's table.
    """
    return exported(chunks, adapter.table, sizes)


def write_peft(
    folder: Path,
    base: str,
    factors: Iterable[tuple[str, Tensor]],
    metas: Mapping[str, ShapeAndDtype],
    adapter: Adapter,
) -> None:
    """Write the two files of a PEFT adapter into an existing folder.

    Args:
        base: path or name of the base model, which programs that load the adapter will read.
        factors: names and tensors, as `gather.export` yields them.
        metas: shape and dtype of each factor, as `exported_factors` returns them.
    """
    specs = {name: spec_of(meta.shape, meta.dtype) for name, meta in metas.items()}
    with written({folder / WEIGHTS: specs}) as write:
        for name, factor in factors:
            write(name, factor)
    (folder / CONFIG).write_text(json.dumps(_config(base, adapter), indent=2) + "\n")


def merged(chunks: Sequence[nn.Module], adapter: Adapter, sizes: ParallelSizes) -> ShardTransform:
    """Return a function that adds to a weight the product of its LoRA factors, computed in float32.

    Pass the function as `change` to `gather.export` with the model's table. No collectives: a rank
    that holds a shard of a weight also holds the matching shards of its factors.
    """
    held = held_tensors(chunks, adapter.table, sizes, Ranks.of_this_process())
    factors = {one.task.name: one.tensor.detach() for one in held}

    def change(name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in factors:
            return weight
        a, b = (factors[f"{module}.lora_{which}.weight"].float() for which in "AB")
        return torch.addmm(weight.float(), b, a, alpha=adapter.lora.scale).to(weight.dtype)

    return change


def _config(base: str, adapter: Adapter) -> dict[str, object]:
    """Return the contents of PEFT's `adapter_config.json`; `base` is the path of the base model."""
    lora = adapter.lora
    heads = [row.op.hf[0] for row in adapter.table.params if row.of_head]
    modules = sorted({name.removeprefix(PREFIX).rpartition(".")[0] for name in heads})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if modules else "CAUSAL_LM",
        "modules_to_save": modules or None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": target_modules(adapter.table, lora),
        "bias": "none",
        "inference_mode": True,
    }
