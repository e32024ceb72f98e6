"""Models that return one number per token, a value or a score, in place of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.table import ModelTable, Param, PipelineEnd
from mcore_adapter.models.common import LM_HEAD, OUTPUT_LAYER


@dataclass(frozen=True, kw_only=True)
class ScoreHead:
    """Linear layer with one output, which takes the place of a model's output layer."""

    weight: str
    """Hugging Face name of the weight `[1, hidden]`, such as `score.weight`."""
    bias: str | None = None
    """Hugging Face name of the bias `[1]`; None: the layer has no bias."""
    stored: bool = False
    """True if the checkpoint must have the head. If False, a head of which the checkpoint lacks a
    tensor is new and starts at zero."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the tensors, the weight first."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def with_head(table: ModelTable, head: ScoreHead, *, new: bool) -> ModelTable:
    """Return the table of a model with a score head in place of its output layer.

    A checkpoint may have the tensors of an output layer, and of another head, which are not read.

    Args:
        new: the head is not read from the checkpoint either, but starts at zero.
    """
    module, width = head.weight.removesuffix("weight"), table.shape.hidden
    shapes = ((1, width), (1,))
    rows = [
        Param(
            op=Rename(f"output_layer.{kind}", name),
            shapes=(shape,),
            place=PipelineEnd.LAST,
            of_head=True,
            new=new,
        )
        for kind, name, shape in zip(("weight", "bias"), head.names, shapes, strict=False)
    ]
    kept = [row for row in table.params if row.op.mcore != OUTPUT_LAYER]
    return replace(
        table,
        params=(*kept, *rows),
        repeats={name: of for name, of in table.repeats.items() if name != LM_HEAD},
        dropped=(*table.dropped, LM_HEAD, f"{module}weight", f"{module}bias"),
        held=None if table.held is None else with_head(table.held, head, new=new),
    )
