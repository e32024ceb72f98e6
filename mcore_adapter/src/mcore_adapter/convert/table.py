"""Table of a model: each row gives the format and the layout of one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_adapter.convert.ops import FormatOp, Shape
from mcore_adapter.convert.shards import Replicated, ShardRule

TOWER = "visual."
"""Prefix of the Megatron names of the parameters of a vision tower."""


class PipelineEnd(Enum):
    """End of the pipeline at which a parameter lies that belongs to no layer."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Param:
    """Row of a table: one parameter of a model, or the same parameter of all layers and experts.

    In names, `*` stands for the number of the layer and `@` for the number of the expert.
    """

    op: FormatOp
    """Operator between the Hugging Face tensors and the Megatron tensor."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors according to `config.json`, in the order of the operator.
    If `stacked`, the shapes of one expert."""
    shard: ShardRule = field(default_factory=Replicated)
    """Rule that cuts the Megatron tensor over tensor parallel ranks."""
    layers: range | tuple[int, ...] | None = None
    """Numbers of the layers that have the parameter; None: all. Ignored if the name has no `*`."""
    place: PipelineEnd = PipelineEnd.FIRST
    """End of the pipeline that holds the parameter. Ignored if the name has `*`: such a parameter
    lies on the stage of its layer."""
    stacked: bool = False
    """True if each Hugging Face tensor holds all experts, stacked along a new first dimension."""
    pads_vocab: bool = False
    """True if the first dimension is the vocabulary, which Megatron pads to divide over ranks."""
    copy_of: str | None = None
    """Megatron name of the tensor that this one copies. Used for an output layer that is tied to
    the embedding but lies on another stage."""

    keeps_dtype: bool = False
    """True if the tensor keeps its data type when the checkpoint is converted to another type."""
    optional: bool = False
    """True if a checkpoint may lack the parameter. All optional rows are present or absent
    together. `config.json` does not tell: it may announce layers that predict further tokens
    although the checkpoint has none."""
    of_head: bool = False
    """True if the parameter belongs to a head with one output per token (`models.scores`). Such a
    head is trained in full, also beside an adapter."""
    new: bool = False
    """True if the parameter is not read from a Hugging Face checkpoint, but starts at zero."""

    @property
    def in_layer(self) -> bool:
        """True if the parameter belongs to a layer."""
        return "*" in self.op.mcore

    @property
    def of_expert(self) -> bool:
        """True if the parameter belongs to a routed expert."""
        return "@" in self.op.mcore

    @property
    def of_tower(self) -> bool:
        """True if the parameter belongs to a vision tower."""
        return self.op.mcore.startswith(TOWER)


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """Table of one model: all its parameters."""

    model_type: str
    shape: Shape
    params: tuple[Param, ...]
    dropped: tuple[str, ...] = (
        "model.layers.*.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    """Name patterns of Hugging Face tensors that carry no information, such as buffers that old
    versions of transformers saved."""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face tensors that a checkpoint may store although they equal another tensor: name of
    the repetition -> name of the original. Both must be equal. The Megatron layout stores only the
    original; the conversion back to Hugging Face writes both."""
    divisible: Mapping[str, int] = field(default_factory=dict)
    """Further counts that must divide over tensor parallel ranks, by key of `config.json`."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Content of the `config.json` that the table was made from."""
    fused: bool = False
    """True if tensors are named and stored as transformers 5 holds them, see
    `convert.fused_experts`."""
    held: ModelTable | None = None
    """Table of the model for checkpoints in which tensors are named and stored as transformers 5
    holds them; its rows are in the same order. None: `convert.fused_experts` derives it."""
    of_adapter: bool = False
    """True if the table lists the factors of a LoRA adapter instead of the weights of a model."""
