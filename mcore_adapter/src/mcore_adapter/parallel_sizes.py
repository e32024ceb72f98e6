"""Parallel sizes, and the stage and expert parallel rank that own each layer and expert.

No other module computes ownership.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_adapter.errors import LayoutError

_MOST_RANKS = 65_536
"""Largest size on one axis."""


def padded_vocab(vocab: int, tp: int) -> int:
    """Return the number of rows of an embedding: `vocab` rounded up to a multiple of `tp`.

    The rows beyond `vocab` are zero.
    """
    return -(-vocab // tp) * tp


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Numbers of ranks over which a model is divided.

    Data and context parallelism copy the weights, so they have no field here.
    """

    tp: int = 1
    """Number of tensor parallel ranks, for everything but experts."""
    pp: int = 1
    """Number of pipeline stages."""
    vpp: int = 1
    """Number of chunks of layers on each stage (virtual pipeline)."""
    ep: int = 1
    """Number of expert parallel ranks."""
    etp: int | None = None
    """Number of tensor parallel ranks of experts; None: `tp`."""
    layers: tuple[int, ...] | None = None
    """Number of layers in each of the `pp * vpp` chunks, in the order of the model; None: the same
    number in all chunks."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp"):
            size = getattr(self, name)
            if size is not None and not 1 <= size <= _MOST_RANKS:
                raise LayoutError(f"{name} is {size}, expected 1 to {_MOST_RANKS}")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp is {self.vpp} but pp is 1: chunks take turns between stages")
        if self.layers is not None and len(self.layers) != self.pp * self.vpp:
            raise LayoutError(
                f"layers names {len(self.layers)} chunks, expected pp * vpp = {self.pp * self.vpp}"
            )

    @property
    def expert_tp(self) -> int:
        """Number of tensor parallel ranks of experts."""
        return self.tp if self.etp is None else self.etp

    def chunks(self, num_layers: int) -> list[range]:
        """Return the layers of each chunk, in the order of the model.

        Raises:
            LayoutError: the layers do not divide evenly, or `layers` adds up to another number of
                layers.
        """
        count = self.pp * self.vpp
        if self.layers is None:
            if num_layers % count:
                raise LayoutError(
                    f"{num_layers} layers do not divide into pp * vpp = {count} chunks; name the "
                    "layers of each chunk"
                )
            lengths: Sequence[int] = [num_layers // count] * count
        else:
            lengths = self.layers
            if sum(lengths) != num_layers or min(lengths) < 0:
                raise LayoutError(
                    f"layers {list(lengths)} make {sum(lengths)}, the model has {num_layers}"
                )
        starts = [sum(lengths[:i]) for i in range(count)]
        return [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Return the stage that holds a layer: chunk c lies on stage c modulo pp.

        Raises:
            LayoutError: the model has no such layer, or its layers do not divide.
        """
        for chunk, held in enumerate(self.chunks(num_layers)):
            if layer in held:
                return chunk % self.pp
        raise LayoutError(f"layer {layer} of a model of {num_layers}")

    def layers_of(self, stage: int, chunk: int, num_layers: int) -> range:
        """Return the layers of a stage's chunk, numbered from 0; raise as `chunks` does."""
        return self.chunks(num_layers)[chunk * self.pp + stage]

    def expert_rank(self, expert: int, num_experts: int) -> int:
        """Return the expert parallel rank that holds an expert; raise as `experts_each` does."""
        return expert // self.experts_each(num_experts)

    def experts_each(self, num_experts: int) -> int:
        """Return the number of experts on each expert parallel rank.

        Raises:
            LayoutError: the experts do not divide over the ranks.
        """
        if num_experts % self.ep:
            raise LayoutError(f"{num_experts} experts do not divide over ep = {self.ep} ranks")
        return num_experts // self.ep
