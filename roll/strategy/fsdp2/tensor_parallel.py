"""Tensor parallelism (arXiv 1909.08053): ranks share matrices, as transformers' tables say.

Outside of attention and MLP each rank has a slice of the tokens (sequence parallelism, arXiv
2205.05198). The inputs of attention and MLP are gathered over the ranks; the outputs are summed and
cut again. Hence a module that is not cut (norms, embedding, head) sees each token on one rank only,
and the sum of its gradients over all ranks is the same as without tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from roll.core.errors import ConfigError
from roll.models.vision.parts import language_model

_COLUMNS, _ROWS = "colwise", "rowwise"
_OF_HEADS = "replicated_with_grad_allreduce"
"""Kind of a module that treats each head separately. Every rank has a copy of the module and
applies the copy to its own heads."""
_TOKENS = 1
"""Axis of the tokens in `[B, T, D]`."""


def cut(
    model: PreTrainedModel, layer: nn.Module, planned: Mapping[str, str], mesh: DeviceMesh
) -> None:
    """Distribute the matrices of one layer over the ranks of `mesh`; every rank must hold all of
    them. Attention and MLP then take and return slices of the tokens.

    Args:
        planned: result of `plan` for the model.
    """
    (path,) = (name for name, module in language_model(model).named_modules() if module is layer)
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if kind == _COLUMNS else RowwiseParallel(output_layouts=Shard(1))
        for name, kind in planned.items()
        if name.startswith(f"{path}.")
    }
    # None: every rank has loaded the full model, so no weights have to be sent.
    parallelize_module(language_model(model), mesh, styles, src_data_rank=None)
    for name in _blocks(styles):
        block = language_model(model).get_submodule(name)
        block.register_forward_pre_hook(partial(_gather, mesh), with_kwargs=True)


def plan(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Map the name of each linear layer to cut to its kind, `colwise` or `rowwise`.

    Raises:
        ConfigError: transformers has no table for the model; the table contains kinds other than
            the supported ones, or omits a module of a block; or a size is not divisible by the
            number of ranks.
    """
    table = _table(model)
    found: dict[str, str] = {}
    for name, module in language_model(model).named_modules():
        kind = _kind(table, name)
        if kind in (_COLUMNS, _ROWS):
            _check_linear(model, name, module, kind, ranks)
            found[name] = kind
    if not found:
        raise ConfigError(
            f"tp: transformers' table for model type {model.config.model_type!r} names "
            f"{next(iter(table))}, and the model has no such module; leave out `tp`, or use kind: "
            "megatron"
        )
    for block in _blocks(found):
        _check_block(model, table, block)
    _check_heads(model, ranks)
    return found


def _blocks(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that contain cut layers: attention and MLP of each layer."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def uncut(layer: nn.Module) -> list[nn.Module]:
    """List the modules of a layer whose own parameters `cut` did not change."""
    return [
        module
        for module in layer.modules()
        if (own := list(module.parameters(recurse=False)))
        and not any(isinstance(p, DTensor) for p in own)
    ]


def _gather(
    mesh: DeviceMesh, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather the hidden states of all tokens before a block.

    The backward pass sums the gradients over the ranks and cuts the sum into slices of tokens.
    """

    def whole(hidden_BWD: Tensor) -> DTensor:
        sliced = DTensor.from_local(hidden_BWD, mesh, [Shard(_TOKENS)], run_check=False)
        return sliced.redistribute(placements=[Replicate()])

    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": whole(kwargs["hidden_states"])}
    return (whole(args[0]), *args[1:]), kwargs


def _table(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' map of module pattern to kind, less embeddings; raise if unusable."""
    config = model.config.get_text_config()
    # The embedding is not cut.
    table = {
        name: kind
        for name, kind in (config.base_model_tp_plan or {}).items()
        if not name.startswith("embed_tokens")
    }
    strange = sorted(set(table.values()) - {_COLUMNS, _ROWS, _OF_HEADS})
    if not table or strange:
        why = f"asks for {', '.join(strange)}" if table else "is empty"
        raise ConfigError(
            f"tp: transformers' table of tensor parallelism for model type {config.model_type!r} "
            f"{why}, which fsdp2 does not do; leave out `tp`, or use kind: megatron"
        )
    return table


def _kind(table: Mapping[str, str], name: str) -> str | None:
    """Return the kind of the first pattern that matches the name of a module; None if none does."""
    return next((kind for pattern, kind in table.items() if fnmatchcase(name, pattern)), None)


def _check_linear(
    model: PreTrainedModel, name: str, module: nn.Module, kind: str, ranks: int
) -> None:
    """Raise ConfigError unless the module is a linear layer that divides evenly over the ranks."""
    if not isinstance(module, nn.Linear):
        kind_of = f"{type(module).__module__}.{type(module).__name__}"
        raise ConfigError(
            f"tp: {name} is a {kind_of}; only plain linear layers are cut, adapters "
            "(model.lora) are not; leave out `tp`"
        )
    size = module.out_features if kind == _COLUMNS else module.in_features
    if size % ranks:
        raise ConfigError(
            f"tp: {size} {'rows' if kind == _COLUMNS else 'columns'} of {name} of model type "
            f"{model.config.model_type!r} do not divide over {ranks} ranks; lower `tp`"
        )


def _check_block(model: PreTrainedModel, table: Mapping[str, str], name: str) -> None:
    """Raise an error if the table omits a module of the block that has parameters.

    Such a module would see each token on every rank, and the sum of its gradients over the ranks
    would be too large.

    Raises:
        ConfigError: the table omits a module.
    """
    for inner, module in language_model(model).get_submodule(name).named_modules():
        path = f"{name}.{inner}" if inner else name
        if list(module.parameters(recurse=False)) and _kind(table, path) is None:
            raise ConfigError(
                f"tp: transformers' table for model type {model.config.model_type!r} says nothing "
                f"of {path}; leave out `tp`, or use kind: megatron"
            )


def _check_heads(model: PreTrainedModel, ranks: int) -> None:
    """Raise ConfigError unless query heads and key-value heads each divide over the ranks."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention"), (key_heads, "key and value")):
        if count % ranks:
            raise ConfigError(
                f"tp: {count} {what} heads of model type {config.model_type!r} do not divide over "
                f"{ranks} ranks; lower `tp`"
            )
