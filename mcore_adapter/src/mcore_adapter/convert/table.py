"""A model is a table: each row says the format and the layout of one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_adapter.convert.ops import FormatOp, Shape
from mcore_adapter.convert.shards import Replicated, ShardRule


class PipelineEnd(Enum):
    """Where in the pipeline a parameter that belongs to no layer lies."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Param:
    """One row. `*` in a name is the layer, `@` the expert."""

    op: FormatOp
    shapes: tuple[tuple[int, ...], ...]
    """Of the Hugging Face tensors, in the order of the operator, as `config.json` has them; with
    `stacked`, of one expert."""
    shard: ShardRule = field(default_factory=Replicated)
    layers: range | tuple[int, ...] | None = None
    """Which layers have it; all by default. Of no meaning without `*`."""
    place: PipelineEnd = PipelineEnd.FIRST
    """Of no meaning with `*`, which lies where its layer does."""
    stacked: bool = False
    """The Hugging Face tensors hold all experts, one behind the other in their first dimension."""
    pads_vocab: bool = False
    """Its first dimension is the vocabulary, which Megatron pads to divide over the ranks."""
    copy_of: str | None = None
    """The Megatron name it repeats: an output layer tied to an embedding on another stage."""

    keeps_dtype: bool = False
    """It stays as precise as it is when the checkpoint is converted to another type."""
    optional: bool = False
    """Together with all other optional rows it is there or not, whatever `config.json` says: layers
    that predict further tokens are announced by configurations of checkpoints that have none."""

    @property
    def in_layer(self) -> bool:
        return "*" in self.op.mcore

    @property
    def of_expert(self) -> bool:
        return "@" in self.op.mcore


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """All parameters of one model."""

    model_type: str
    shape: Shape
    params: tuple[Param, ...]
    dropped: tuple[str, ...] = (
        "model.layers.*.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    """Patterns of Hugging Face tensors that carry nothing, as buffers that old versions saved."""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face tensors, and the one that each repeats, where a checkpoint stores some twice.
    They must be equal, are not stored, and are written again on the way back."""
    divisible: Mapping[str, int] = field(default_factory=dict)
    """Further counts that tensor parallel ranks must divide, named as in `config.json`."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The `config.json` it was made from."""
    fused: bool = False
    """Its experts are named and stored as transformers 5 has them, see `convert.fused`."""
    of_adapter: bool = False
    """Its tensors are the factors of a LoRA adapter, which modules have beside those of a model."""
