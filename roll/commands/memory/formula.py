"""Bytes that a role needs on each of its devices. docs/memory.md derives the formulas.

P are the elements of all parameters, T those that are trained, b the bytes of an element in forward
and backward passes, n the number of ranks that share the parameters.
"""

from __future__ import annotations

from typing import TypeVar

from roll.commands.memory import megatron
from roll.commands.memory.needs import (
    FULL,
    Needs,
    Passes,
    activations,
    head_buffers,
    hosted_inputs,
)
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

USUAL = AdamWConfig()
"""Optimizer of a role that names none."""


def scored(sizes: ModelSizes, strategy: ScoreStrategyConfig, passes: Passes) -> Needs:
    """Return what a frozen model needs."""
    b, whole = passes.width, passes.width * sizes.total
    logits = 2 * FULL * min(passes.chunk_tokens, passes.tokens) * sizes.vocab
    working = passes.tokens * b * (4 * sizes.hidden + 3 * sizes.feed_forward)
    match strategy:
        case HfScoreConfig():
            return Needs(weights=whole, activations=working, buffers=logits)
        case MegatronConfig():
            return megatron.scored(sizes, strategy, passes)
        case Fsdp2Config():
            shards = max(1, passes.ranks // strategy.replicas)
            sharers = strategy.ranks_per_part
            copied = passes.ranks > 1 or strategy.cpu_offload
            gathered = b * _gathered(sizes, strategy, shards) if copied else 0
            gathered += _exchanged(sizes, strategy, passes)
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
            return megatron.trained(sizes, strategy, passes, learned)


def on_its_device(strategy: S) -> S:
    """Return a backend that moves nothing to the memory of the machine: where there are no GPUs,
    that is the memory of the devices."""
    moving = ("cpu_offload", "offload_optimizer", "offload_parameters", "offload_activations")
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
            own = states * megatron.optimized(sizes, strategy, ranks) // sizes.total
            numbers = 1 if optimizer is None else 3
            return own + numbers * FULL * megatron.further_optimized(sizes, strategy, ranks)


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
    rounds = b < FULL or strategy.reduce_dtype != "float32"
    copied = passes.ranks > 1 or rounds or strategy.cpu_offload
    gathered = b * _gathered(sizes, strategy, shards) if copied else 0
    gathered += _exchanged(sizes, strategy, passes)
    kept_for, hosted = _kept(sizes, strategy, passes.tokens // strategy.ranks_per_part, b)
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
        hosted=hosted,
    )


def _kept(
    sizes: ModelSizes, strategy: Fsdp2Config | DeepspeedConfig, tokens: int, b: int
) -> tuple[int, int]:
    """Return the bytes that the forward pass of a rank's tokens keeps on the device, and those in
    the memory of the machine."""
    offloaded = strategy.offload_activations
    kept = activations(
        sizes, tokens, b, recomputed=strategy.activation_checkpointing, offloaded=offloaded
    )
    return kept, hosted_inputs(sizes, tokens, b) if offloaded else 0


def _gathered(sizes: ModelSizes, strategy: Fsdp2Config, shards: int) -> int:
    """Return the elements of the parameters that are gathered at once. A rank that shares them with
    no other and converts them copies them, too, but no layer before its turn.

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
    kept_for, hosted = _kept(sizes, strategy, passes.tokens, b)
    return Needs(weights, gradients, moments, kept_for, buffers=buffers, hosted=hosted)
