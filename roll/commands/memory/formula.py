"""Bytes that a role needs on each of its devices. docs/memory.md derives the formulas.

P are the elements of all parameters, T those that are trained, b the bytes of an element in forward
and backward passes, n the number of ranks that share the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from roll.commands.memory.sizes import Learned, ModelSizes
from roll.config.base import Config
from roll.config.sections.optimizers.kinds import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from roll.config.sections.strategy import (
    DeepspeedConfig,
    Fsdp2Config,
    HfScoreConfig,
    MegatronConfig,
    ScoreStrategyConfig,
)

S = TypeVar("S", bound=Config)

FULL = 4
"""Bytes of a float32."""
USUAL = AdamWConfig()
"""Optimizer of a role that names none."""


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


def scored(sizes: ModelSizes, strategy: ScoreStrategyConfig, passes: Passes) -> Needs:
    """Return what a frozen model needs."""
    b, whole = passes.width, passes.width * sizes.total
    logits = 2 * FULL * min(passes.chunk_tokens, passes.tokens) * sizes.vocab
    working = passes.tokens * b * (4 * sizes.hidden + 3 * sizes.feed_forward)
    match strategy:
        case HfScoreConfig():
            return Needs(weights=whole, activations=working, buffers=logits)
        case MegatronConfig():
            return _megatron_scored(sizes, strategy, passes)
        case Fsdp2Config():
            shards = max(1, passes.ranks // strategy.replicas)
            sharers = strategy.ranks_per_part
            gathered = b * _gathered(sizes, strategy, shards) + _exchanged(sizes, strategy, passes)
            weights = 0 if strategy.cpu_offload else whole // shards
            return Needs(weights, activations=working // sharers, buffers=logits + gathered)
        case DeepspeedConfig():
            if strategy.stage < 3:
                return Needs(weights=whole, activations=working, buffers=logits)
            copies = passes.ranks > 1 or strategy.offload_parameters
            gathered = b * (sizes.root + 2 * sizes.layer) if copies else 0
            weights = 0 if strategy.offload_parameters else whole // passes.ranks
            return Needs(weights, activations=working, buffers=logits + gathered)


def trained(
    sizes: ModelSizes,
    strategy: Fsdp2Config | DeepspeedConfig | MegatronConfig,
    passes: Passes,
    learned: Learned,
    optimizer: OptimizerConfig = USUAL,
) -> Needs:
    """Return what a trained model needs."""
    match strategy:
        case Fsdp2Config():
            return _fsdp2(sizes, strategy, passes, learned, optimizer)
        case DeepspeedConfig():
            return _deepspeed(sizes, strategy, passes, learned)
        case MegatronConfig():
            return _megatron(sizes, strategy, passes, learned)


def on_its_device(strategy: S) -> S:
    """Return a backend that moves nothing to the memory of the machine: where there are no GPUs,
    that is the memory of the devices."""
    moving = ("cpu_offload", "offload_optimizer", "offload_parameters")
    own = [key for key in moving if key in type(strategy).model_fields]
    return strategy.model_copy(update=dict.fromkeys(own, False))


def copied_states(
    sizes: ModelSizes,
    strategy: Fsdp2Config | DeepspeedConfig | MegatronConfig,
    ranks: int,
    learned: Learned,
    optimizer: OptimizerConfig | None,
) -> int:
    """Return the bytes of a rank's copy of its states for a checkpoint.

    These are the weights in float32 and, with an `optimizer`, its state. If ranks have unequal
    parts, it is the largest.
    """
    states = FULL * learned.elements
    if optimizer is not None:
        states += optimizer_state(sizes, learned, optimizer)
    match strategy:
        case Fsdp2Config():
            return states // max(1, ranks // strategy.replicas)
        case DeepspeedConfig():
            return states // (ranks if strategy.stage else 1)
        case MegatronConfig():
            return states * _megatron_optimized(sizes, strategy, ranks) // sizes.total


def activations(sizes: ModelSizes, tokens: int, b: int, *, recomputed: bool) -> int:
    """Return the bytes that a forward pass keeps for the backward pass.

    Args:
        tokens: number of tokens of the micro-batch, or of this rank's slice of it.
        recomputed: only the inputs of the layers are kept, and one layer is computed again.
    """
    layer = layer_activations(sizes, b)
    ends = (3 * FULL + b) * sizes.hidden  # last norm, and the states before the head
    kept = sizes.layers * b * sizes.hidden + layer if recomputed else sizes.layers * layer
    return tokens * (kept + ends)


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


def optimizer_state(sizes: ModelSizes, learned: Learned, optimizer: OptimizerConfig) -> int:
    """Return the bytes of an optimizer's state, of all ranks together."""
    elements = learned.elements
    match optimizer:
        case AdamWConfig():
            return 2 * FULL * elements
        case AdamW8bitConfig():  # two bytes, and two factors for each block of 256
            return 2 * elements + 2 * FULL * elements // 256
        case SgdConfig():
            return FULL * elements if optimizer.momentum else 0
        case MuonConfig():
            others = min(sizes.root, elements) if learned.head else 0
            return FULL * (elements - others) + 2 * FULL * others
        case AdafactorConfig():  # a number for each row and each column
            return 2 * FULL * elements // sizes.hidden


def whole_step(sizes: ModelSizes, learned: Learned, optimizer: OptimizerConfig) -> int:
    """Return the bytes of the step of the largest parameter, if whole parameters take steps."""
    matrix = sizes.hidden * max(sizes.feed_forward, sizes.queries)
    match optimizer:
        case MuonConfig():
            # Weight, gradient and update in float32; the update, and what becomes of it, in
            # bfloat16.
            return (3 * FULL + 4) * matrix
        case AdamW8bitConfig():  # weight, gradient, both means, and as much for results
            return 7 * FULL * max(matrix, sizes.head if learned.head else 0)
        case AdafactorConfig():  # weight, gradient and update
            return 3 * FULL * max(matrix, sizes.head if learned.head else 0)
    return 0


def _fsdp2(
    sizes: ModelSizes,
    strategy: Fsdp2Config,
    passes: Passes,
    learned: Learned,
    optimizer: OptimizerConfig,
) -> Needs:
    trained = learned.elements
    b, shards = passes.width, max(1, passes.ranks // strategy.replicas)
    kept = 0 if strategy.cpu_offload else 1
    gathered = b * _gathered(sizes, strategy, shards) + _exchanged(sizes, strategy, passes)
    kept_for = activations(
        sizes,
        passes.tokens // strategy.ranks_per_part,
        b,
        recomputed=strategy.activation_checkpointing,
    )
    # The backward pass begins with the head, and ends with the gradients of the root.
    begins = head_buffers(sizes, passes, learns=learned.head)
    ends = (FULL + b) * sizes.root - kept_for if learned.head else 0
    return Needs(
        weights=kept * FULL * sizes.total // shards,
        gradients=kept * FULL * trained // shards,
        moments=kept * optimizer_state(sizes, learned, optimizer) // shards,
        activations=kept_for,
        # A step begins when all activations are gone.
        buffers=max(gathered + max(begins, ends), whole_step(sizes, learned, optimizer) - kept_for),
    )


def _gathered(sizes: ModelSizes, strategy: Fsdp2Config, shards: int) -> int:
    """Return the elements of the parameters that are gathered at once. A rank that shares them with
    no other copies them, too, but no layer before its turn.

    Layers are cut by `tp`, and their experts by `ep`, before they are sharded; embedding, head and
    last norm are not.
    """
    layer = sizes.layer - sizes.layer_experts * (strategy.ep - 1) // strategy.ep
    layers = sizes.total - sizes.root - sizes.experts * (strategy.ep - 1) // strategy.ep
    if strategy.reshard_after_forward:
        layers = (2 if shards > 1 else 1) * layer
    return sizes.root + layers // strategy.tp


def _exchanged(sizes: ModelSizes, strategy: Fsdp2Config, passes: Passes) -> int:
    """Return the bytes of the tokens of a layer on the way to their experts, of which as many come
    as go if the router spreads them evenly."""
    tokens = passes.tokens // strategy.ranks_per_part
    return 2 * passes.width * tokens * sizes.choices * sizes.hidden if strategy.ep > 1 else 0


def _deepspeed(
    sizes: ModelSizes, strategy: DeepspeedConfig, passes: Passes, learned: Learned
) -> Needs:
    trained = learned.elements
    b, ranks = passes.width, passes.ranks
    stage = max(strategy.stage, 1) if b < FULL else strategy.stage
    buffers = head_buffers(sizes, passes, learns=learned.head)
    if stage == 0:
        weights, gradients, moments = FULL * sizes.total, FULL * trained, 2 * FULL * trained
    else:
        kept = 0 if strategy.offload_optimizer else 1
        masters = kept * FULL * trained // ranks
        moments = kept * 2 * FULL * trained // ranks
        copies = ranks if stage == 3 else 1
        weights = (0 if strategy.offload_parameters else b * sizes.total // copies) + masters
        gradients = FULL * trained // (ranks if stage >= 2 else 1)
        if stage == 3:  # their buffer lies where the masters are
            gradients *= kept
        buffers += 2 * FULL * min(strategy.bucket_elements, sizes.total)
        if stage == 3 and (ranks > 1 or strategy.offload_parameters):
            buffers += b * (sizes.root + 2 * sizes.layer)
    kept_for = activations(sizes, passes.tokens, b, recomputed=strategy.activation_checkpointing)
    return Needs(weights, gradients, moments, kept_for, buffers=buffers)


def _megatron(
    sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, learned: Learned
) -> Needs:
    trained = learned.elements
    b = passes.width
    own = _megatron_elements(sizes, strategy)
    learning = own * trained // sizes.total
    optimized = _megatron_optimized(sizes, strategy, passes.ranks) * trained // sizes.total
    needs = Needs(
        weights=b * own + (FULL * optimized if b < FULL else 0),
        gradients=FULL * learning,
        moments=2 * FULL * optimized,
    )
    first = replace(needs, activations=_megatron_kept(sizes, strategy, passes, stage=0))
    last = replace(
        needs,
        activations=_megatron_kept(sizes, strategy, passes, stage=strategy.pp - 1),
        buffers=_megatron_head(sizes, strategy, passes, learns=learned.head),
    )
    return max(first, last, key=lambda stage: stage.total)


def _megatron_kept(
    sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, *, stage: int
) -> int:
    """Return the bytes that a stage keeps for the backward passes of all micro-batches that are
    under way there."""
    b, layers = passes.width, sizes.layers
    tokens, tp = _megatron_shares(sizes, strategy, passes)
    behind, turns = strategy.pp - stage - 1, strategy.vpp
    begun = 1 + (behind if turns == 1 else 2 * behind + (turns - 1) * strategy.pp)
    chunks, all_chunks = min(begun, passes.micro_batches * turns), strategy.pp * turns
    layer = layer_activations(sizes, b, tp)
    ends = (3 * FULL + b) * sizes.hidden if not behind else 0
    if strategy.recompute == "full":
        return tokens * (layers * b * sizes.hidden * chunks // all_chunks + layer + ends)
    return tokens * (layers * layer * chunks // all_chunks + ends)


def _megatron_head(
    sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, *, learns: bool
) -> int:
    """Return the bytes of the backward pass of the last stage's head: logits of all tokens, twice
    those of the needed ones, and the chunks of their log-probs; and the gradient of the head before
    it is added to the buffer of gradients. A layer that is computed again comes after it."""
    logits = 3 * passes.width * (passes.tokens // strategy.cp) * sizes.vocab
    chunks = head_buffers(sizes, passes, learns=False)
    found = (logits + chunks + learns * passes.width * sizes.head) // strategy.tp
    if strategy.recompute == "full":
        tokens, tp = _megatron_shares(sizes, strategy, passes)
        found -= tokens * layer_activations(sizes, passes.width, tp)
    return max(found, 0)


def _megatron_shares(
    sizes: ModelSizes, strategy: MegatronConfig, passes: Passes
) -> tuple[int, int]:
    """Return how many tokens of a micro-batch a rank has in norms and residuals, and the ranks that
    share matrices but not these."""
    divides = strategy.sequence_parallel
    if divides is None:
        divides = sizes.experts > 0 or sizes.latent > 0
    tokens, tp = passes.tokens // strategy.cp, strategy.tp
    return (tokens // tp, 1) if divides else (tokens, tp)


def _megatron_scored(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes) -> Needs:
    """Return what a frozen model needs; its last stage has logits (or hidden states) of all tokens,
    and once more those of the needed ones."""
    b = passes.width
    tokens, tp = _megatron_shares(sizes, strategy, passes)
    logits = 2 * b * (passes.tokens // strategy.cp) * sizes.vocab // strategy.tp
    states = 2 * b * passes.tokens * sizes.hidden
    chunk = 2 * FULL * min(passes.chunk_tokens, passes.tokens) * sizes.vocab // strategy.tp
    return Needs(
        weights=b * _megatron_elements(sizes, strategy),
        activations=tokens * b * (4 * sizes.hidden + 3 * sizes.feed_forward // tp),
        buffers=(states if passes.tells_states else logits) + chunk,
    )


def _megatron_elements(sizes: ModelSizes, strategy: MegatronConfig) -> int:
    """Return the elements of a rank's part of the model."""
    others = (sizes.total - sizes.experts) // strategy.tp
    return (others + sizes.experts // _expert_ranks(strategy)) // strategy.pp


def _megatron_optimized(sizes: ModelSizes, strategy: MegatronConfig, ranks: int) -> int:
    """Return the elements of which a rank has masters and moments.

    A distributed optimizer divides those of a part of the model over all ranks that have this
    part; experts may have fewer copies than the rest.
    """
    if not strategy.distributed_optimizer:
        return _megatron_elements(sizes, strategy)
    of_others = max(ranks, strategy.tp * strategy.pp)
    of_experts = max(ranks, _expert_ranks(strategy) * strategy.pp)
    return (sizes.total - sizes.experts) // of_others + sizes.experts // of_experts


def _expert_ranks(strategy: MegatronConfig) -> int:
    """Return the number of ranks that share the experts of a layer."""
    return strategy.ep * (strategy.etp or strategy.tp)
