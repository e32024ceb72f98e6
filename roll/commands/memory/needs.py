"""Needs of a role on a device, passes of its model, and what these keep.

The names P, T, b and n are those of `formula.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.commands.memory.sizes import ModelSizes

FULL = 4
"""Bytes of a float32."""
INPUTS_AT_ONCE = 4
"""Most inputs of layers that are on the device at once if they are kept in host memory: that of the
layer that runs, two on the way, and, with an adapter, that of the first layer."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on one device, by what they are for."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    kv_cache: int = 0
    buffers: int = 0
    """Gathered parameters, logits of a chunk, buckets of reductions and pushes."""
    copied: int = 0
    """Copy of the states of a rank for a checkpoint, in the memory of the machine; on a GPU it is
    not in `total`."""
    hosted: int = 0
    """Inputs of layers in the memory of the machine, which the backward pass gets from there."""

    @property
    def total(self) -> int:
        return self.resident + self.gradients + self.activations + self.kv_cache + self.buffers

    @property
    def resident(self) -> int:
        """Bytes that stay while nothing runs."""
        return self.weights + self.moments


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward and backward passes of a role."""

    tokens: int
    """Tokens of a micro-batch, padding included."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    ranks: int
    width: int
    """Bytes of an element (b)."""
    micro_batches: int = 1
    """Micro-batches of a rank between two optimizer steps."""
    tells_states: bool = False
    """True for a teacher of whole distributions, whose passes end with hidden states."""


def activations(
    sizes: ModelSizes, tokens: int, b: int, *, recomputed: bool, offloaded: bool = False
) -> int:
    """Return the bytes that a forward pass keeps on the device for the backward pass.

    Args:
        tokens: number of tokens of the micro-batch, or of this rank's slice of it.
        recomputed: only the inputs of the layers are kept, and one layer is computed again.
        offloaded: the inputs of most layers are in the memory of the machine.
    """
    layer = layer_activations(sizes, b)
    ends = (3 * FULL + b) * sizes.hidden  # last norm, and the states before the head
    inputs = min(sizes.layers, INPUTS_AT_ONCE) if offloaded else sizes.layers
    kept = inputs * b * sizes.hidden + layer if recomputed else sizes.layers * layer
    return tokens * (kept + ends)


def hosted_inputs(sizes: ModelSizes, tokens: int, b: int) -> int:
    """Return the bytes of the inputs of all layers in the memory of the machine. Each takes a
    power of two there, to which PyTorch rounds pinned memory up.

    Args:
        tokens: as in `activations`.
    """
    each = tokens * b * sizes.hidden
    return sizes.layers * (1 << (each - 1).bit_length())


def layer_activations(sizes: ModelSizes, b: int, tp: int = 1) -> int:
    """Return the bytes of a token that a layer keeps for the backward pass.

    Args:
        tp: number of ranks that share the matrices, but not norms and residuals.
    """
    norm = 3 * FULL if b == FULL else FULL + 2 * b  # input in float32, normalised, scaled
    head_norm = 2 * FULL if b == FULL else FULL + b
    heads = sizes.queries + sizes.keys
    shared = (
        (head_norm * heads if sizes.head_norms else 0)
        + b * (2 * sizes.queries + 2 * sizes.keys)  # queries and result; keys and values
        + FULL * sizes.heads
        + 4 * b * sizes.feed_forward
    )
    return 2 * norm * sizes.hidden + shared // tp


def head_buffers(sizes: ModelSizes, passes: Passes, *, learns: bool) -> int:
    """Return the bytes of the backward pass of the chunked log-probs: three times the logits of a
    chunk, and the gradient of the head, in float32 and in the dtype of the passes."""
    chunk = min(passes.chunk_tokens, passes.tokens)
    gradient = (FULL + passes.width) * sizes.head if learns else 0
    return (2 * FULL + passes.width) * chunk * sizes.vocab + gradient
