"""Loading of a model on Megatron-Core: this rank's part, and the manifest of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_adapter.convert.conversion_plan import check_layout, tasks
from mcore_adapter.convert.fused_experts import names_in_files
from mcore_adapter.convert.lora_table import Lora
from mcore_adapter.convert.shapes import check_widths
from mcore_adapter.convert.storage.peft import PREFIX
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import McoreAdapterError
from mcore_adapter.gather import ShapeAndDtype, exported
from mcore_adapter.load import load, read_config, table_in
from mcore_adapter.local_tensors import Ranks, held_tensors
from mcore_adapter.lora_io import exported_factors
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.lora import Adapter, add_adapter, let_gradients_pass
from mcore_adapter.modeling.model import build_model
from mcore_adapter.models.scores import ScoreHead
from mcore_adapter.models.shared_rows import why_not_packed
from mcore_adapter.parallel_sizes import ParallelSizes
from roll.config.frozen import frozen_names, frozen_tensors, part_of, parts_in
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.errors import ConfigError
from roll.models.load import Classifier, ClassifierOutline, load_config, outline_classifier
from roll.models.lora import HEADS
from roll.models.overrides import replaced_values
from roll.models.vision.parts import require_parts, sees
from roll.strategy.hf_folder import folder_of
from roll.strategy.megatron.pictures import Sight
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts

_HINT = "; layers that predict further tokens are built only for mtp_loss_weight"


@dataclass(frozen=True)
class MegatronModel:
    """A model on Megatron-Core: this rank's modules, and tables of the whole model."""

    chunks: Sequence[Any]
    """Modules of this rank, one per virtual pipeline stage. If the model is trained, each is in
    Megatron-Core's data parallel wrapper."""
    table: ModelTable
    """Conversion between the model's tensors and those of the Hugging Face checkpoint."""
    sizes: ParallelSizes
    manifest: Manifest
    """Manifest of the weights that engines get, each divided equally among all ranks."""
    cp: int
    """Number of ranks that share the tokens of each row."""
    vocab: int
    """Number of tokens in the vocabulary, without the padding of its parts."""
    sequence_parallel: bool
    packs: bool
    """True if the rows of a micro-batch lie behind one another in one row."""
    sight: Sight | None
    """Reader of pictures; None if the model reads text only."""
    outline: ClassifierOutline | None
    """Classifier in transformers that the model is; None: it is a language model."""
    frozen: frozenset[str] = frozenset()
    """Names in the manifest of the weights that training leaves as they are, if it trains others
    and no adapter."""
    further: tuple[TensorMeta, ...] = ()
    """Weights of the layers that predict further tokens (MTP), if the model has been built with
    them. Saved folders and checkpoints have them; no engine reads them."""
    trained: Trained | None = None
    """Adapter that is trained; None if the model trains no adapter."""
    tells_states: bool = False
    """True if the last stage ends with the hidden states behind the last norm, `[T, B, D]` (with
    sequence parallelism this rank's part of T), in place of logits."""

    @property
    def learns(self) -> ModelTable:
        """Table of the tensors in a checkpoint: the adapter's if there is one, else the model's."""
        return self.table if self.trained is None else self.trained.adapter.table


@dataclass(frozen=True)
class Trained:
    """An adapter that the model trains."""

    adapter: Adapter
    metas: Mapping[str, ShapeAndDtype]
    """Shape and dtype of each factor, by PEFT's names."""
    manifest: Manifest
    """Manifest of the factors, each divided equally among all ranks."""
    base: str
    """Last component of `model.path`; identifies the model that the adapter belongs to."""
    adapted: frozenset[str]
    """Names in the manifest of the model of the weights that the adapter changes."""


def load_model(
    config: MegatronConfig,
    sizes: ParallelSizes,
    model: ModelConfig,
    kind: Classifier | None,
    *,
    trainable: bool,
    packs: bool,
    seed: int,
) -> MegatronModel:
    """Build this rank's part of the model and load its weights from the checkpoint. Collective.

    Args:
        kind: classifier that the model is to be; None: it is a language model.
        packs: True to put the rows of a micro-batch behind one another in one row.
        seed: seed of the first factors of an adapter, the same on all ranks.

    Raises:
        ConfigError: the model family has no table or no such classifier, a size is not divisible,
            tensors are missing, the adapter's targets are invalid, rows cannot be packed, or
            gradients cannot be reduced in the backward pass. The message names them.
    """
    folder = folder_of(model)
    outline = None if kind is None else outline_classifier(model, kind)
    head = None if outline is None else _head(outline)
    try:
        found = read_config(folder, _replaced(model))
        table = table_in(folder, head)
        check_layout(table, sizes)
        check_widths(table, sizes)
        if packs and (why := why_not_packed(found)):
            raise ConfigError(f"packing: {why}; leave `packing` out")
        bare = build_model(found, sizes, _options(config, model, head, trainable=trainable))
        load(folder, bare, table, sizes)
        for chunk in bare:
            chunk.requires_grad_(trainable)
        metas = exported(bare, table, sizes)
        frozen = _freeze(model, bare, metas, table, sizes) if trainable else frozenset[str]()
        trained = _add_adapter(model, bare, table, sizes, seed) if trainable else None
        if trainable and trained is None and config.overlap_grad_reduce:
            _check_overlap(metas.keys() - frozen)
    except McoreAdapterError as error:
        raise ConfigError(_refusal(config, model, error)) from error
    for chunk in bare:
        chunk.config.variable_seq_lengths = sizes.vpp == 1  # else `micro_batches` makes them equal
    return MegatronModel(
        chunks=_wrapped(config, bare) if trainable else bare,
        table=table,
        sizes=sizes,
        manifest=_cut_evenly(_divided(metas, table, sizes, further=False)),
        cp=config.cp,
        vocab=found["vocab_size"],
        sequence_parallel=bool(bare[0].config.sequence_parallel),
        packs=packs,
        sight=Sight(model) if "vision_config" in found else None,
        outline=outline,
        frozen=frozen,
        further=tuple(starmap(_meta, _divided(metas, table, sizes, further=True).items())),
        trained=trained,
    )


def _refusal(config: MegatronConfig, model: ModelConfig, error: McoreAdapterError) -> str:
    """Return why a model cannot be built, in words for its user."""
    hint = "" if config.mtp_loss_weight is None else _HINT
    return f"model.path: {model.path!r} on kind: megatron: {error}{hint}"


def _wrapped(config: MegatronConfig, bare: Sequence[Any]) -> Sequence[Any]:
    """Return the chunks of a model that is trained, in Megatron-Core's data parallel wrapper."""
    return data_parallel(
        bare,
        distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )


def _options(
    config: MegatronConfig, model: ModelConfig, head: ScoreHead | None, *, trainable: bool
) -> BuildOptions:
    """Return the options of a model's modules that its config.json does not give."""
    return BuildOptions(
        dtype=getattr(torch, model.dtype),
        random_weights=False,
        sequence_parallel=config.sequence_parallel,
        recompute=config.recompute,
        aux_loss_coeff=config.aux_loss_coef,
        context_parallel=config.cp,
        head=head,
        mtp=trainable and config.mtp_loss_weight is not None,
    )


def _head(outline: ClassifierOutline) -> ScoreHead:
    """Return the head of a classifier as mcore_adapter describes it."""
    weight, *bias = outline.head
    return ScoreHead(weight=weight, bias=bias[0] if bias else None, stored=outline.stored)


def _divided(
    metas: Mapping[str, ShapeAndDtype], table: ModelTable, sizes: ParallelSizes, *, further: bool
) -> dict[str, ShapeAndDtype]:
    """Return the weights of the layers that predict further tokens, or all others."""
    optional = (task for task in tasks(table, sizes) if task.param.optional)
    names = {ref.name for task in optional for ref in task.hf}
    return {name: meta for name, meta in metas.items() if (name in names) is further}


def _replaced(model: ModelConfig) -> dict[str, Any]:
    """Return the values of config.json that `model.overrides` replaces."""
    return replaced_values(load_config(model), model.overrides) if model.overrides else {}


def _freeze(
    model: ModelConfig,
    bare: Sequence[Any],
    names: Iterable[str],
    table: ModelTable,
    sizes: ParallelSizes,
) -> frozenset[str]:
    """Leave the parameters that `model.freeze` names out of training; return their names in the
    checkpoint.

    Args:
        names: names of all parameters in the checkpoint.

    Raises:
        ConfigError: the model has no such parts or parameters, nothing is left to train, or only
            some of the checkpoint's tensors that Megatron-Core keeps as one are named.
    """
    if not model.freeze:
        return frozenset()
    hf_config, known = load_config(model), set(names)
    if parts_in(model.freeze):
        require_parts(hf_config, "model.freeze")
    frozen = frozen_names(known, model.freeze)
    # Of the plan of the whole model, so that all ranks find the same mistake.
    planned = [(t.name, [ref.name for ref in t.hf]) for t in tasks(table, sizes)]
    stay = frozen_tensors(((n, refs) for n, refs in planned if known.issuperset(refs)), frozen)
    for held in held_tensors(bare, table, sizes, Ranks.of_this_process()):
        # Layers that predict further tokens may have a copy of the embedding.
        named = {held.task.name, held.task.param.copy_of}
        if named & stay and isinstance(held.tensor, nn.Parameter):
            held.tensor.requires_grad_(False)
    for chunk in bare:
        recomputes = chunk.config.recompute_granularity == "full"
        if sees(hf_config) or recomputes or sizes.pp > 1:
            # What lies before the first trained parameter must pass gradients on: layers that are
            # recomputed, stages, and rows without pictures in a model of which only those train.
            let_gradients_pass(chunk)
    return frozen


def _check_overlap(learned: Iterable[str]) -> None:
    """Raise ConfigError if a trained parameter of a vision part would get no gradient from text.

    Args:
        learned: names of the trained parameters in the checkpoint.
    """
    if seeing := sorted(name for name in learned if part_of(name) != "language"):
        raise ConfigError(
            f"strategy.overlap_grad_reduce: {seeing[0]} of the vision part is trained and gets no "
            "gradient from rows without pictures, so no backward pass knows when its gradients are "
            "complete; leave overlap_grad_reduce out, or add `model.freeze: [vision, projector]`"
        )


def _add_adapter(
    model: ModelConfig, bare: Sequence[Any], table: ModelTable, sizes: ParallelSizes, seed: int
) -> Trained | None:
    """Freeze the model and add an adapter, if the config has one; else return None.

    Raises:
        ConfigError: a target is the head, is unknown, or cannot have an adapter.
    """
    lora = model.lora
    if lora is None:
        return None
    for target in lora.targets if isinstance(lora.targets, tuple) else ():
        if target.rpartition(".")[2] in HEADS:
            raise ConfigError(f"model.lora.targets: {target} is the head, which is never adapted")
    told = Lora(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)
    try:
        adapter = add_adapter(bare, table, told, sizes, seed=seed)
    except McoreAdapterError as error:
        raise ConfigError(f"model.lora on kind: megatron: {error}") from error
    metas = exported_factors(bare, adapter, sizes)
    stored = names_in_files(table)
    weights = (changed_weight(name) for name in metas)
    adapted = frozenset(stored.get(name, name) for name in weights)
    return Trained(adapter, metas, _cut_evenly(metas), Path(model.path).name, adapted)


def changed_weight(trained: str) -> str:
    """Return the name of the parameter that a tensor of an adapter changes, given PEFT's name of
    the tensor: the weight that a factor belongs to, or what is trained in full."""
    module, factor, _ = trained.removeprefix(PREFIX).rpartition(".lora_")
    return f"{module}.weight" if factor else trained.removeprefix(PREFIX)


def _cut_evenly(found: Mapping[str, ShapeAndDtype]) -> Manifest:
    """Build a manifest in which every rank sends an equal part of each tensor.

    This is possible because each rank gathers every full tensor in turn.
    """
    metas = tuple(_meta(name, meta) for name, meta in found.items())
    world = dist.get_world_size()
    return Manifest(metas, tuple(even_cuts(meta.num_elements, 1, world) for meta in metas))


def _meta(name: str, meta: ShapeAndDtype) -> TensorMeta:
    return TensorMeta(name, meta.shape, str(meta.dtype).removeprefix("torch."))


def identity(model: MegatronModel) -> dict[str, object]:
    """Return a description of the model or its adapter, independent of the layout, as plain JSON.

    A checkpoint fits a run if the two have equal descriptions.
    """
    trained = model.trained
    metas = (
        (*model.manifest.tensors, *model.further) if trained is None else trained.manifest.tensors
    )
    shapes = {meta.name: list(meta.shape) for meta in metas}
    known: dict[str, object] = {"model_type": model.table.model_type, "tensors": shapes}
    if trained is not None:
        known["adapter"] = {"base": trained.base, "scale": trained.adapter.lora.scale}
    found: dict[str, object] = json.loads(json.dumps(known))
    return found
