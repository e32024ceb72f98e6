"""Bytes that a role needs on each of its devices with Megatron-Core; see `formula.py`."""

from __future__ import annotations

from dataclasses import replace

from roll.commands.memory.needs import FULL, Needs, Passes, head_buffers, layer_activations
from roll.commands.memory.sizes import Learned, ModelSizes
from roll.config.sections.strategy import MegatronConfig


def trained(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, learned: Learned) -> Needs:
    """Return what the stage needs that needs most."""
    elements, b = learned.elements, passes.width
    own = _elements(sizes, strategy)
    learning = own * elements // sizes.total
    updated = optimized(sizes, strategy, passes.ranks) * elements // sizes.total
    needs = Needs(
        weights=b * own + (FULL * updated if b < FULL else 0),
        gradients=FULL * learning,
        moments=2 * FULL * updated,
    )
    first = replace(needs, activations=_kept(sizes, strategy, passes, stage=0))
    last = replace(
        needs,
        activations=_kept(sizes, strategy, passes, stage=strategy.pp - 1),
        buffers=_head(sizes, strategy, passes, learns=learned.head),
    )
    if strategy.mtp_loss_weight is not None:
        last = _plus_further(last, sizes, strategy, passes)
    return max(first, last, key=lambda stage: stage.total)


def _plus_further(
    last: Needs, sizes: ModelSizes, strategy: MegatronConfig, passes: Passes
) -> Needs:
    """Return what the last stage needs with the layers that predict further tokens: they are
    trained whole, keep what layers keep, and have logits as the policy has."""
    b, layers = passes.width, sizes.further.layers
    own = _further_elements(sizes, strategy)
    updated = further_optimized(sizes, strategy, passes.ranks)
    tokens, tp = _shares(sizes, strategy, passes)
    layer = layer_activations(sizes, b, tp)
    inputs = (3 * FULL + 5 * b) * sizes.hidden  # norms of embedding and hidden state, both
    each = inputs if strategy.recompute == "full" else inputs + layer
    logits = 3 * b * passes.tokens * sizes.vocab // strategy.tp
    return replace(
        last,
        weights=last.weights + b * own + (FULL * updated if b < FULL else 0),
        gradients=last.gradients + FULL * own,
        moments=last.moments + 2 * FULL * updated,
        activations=last.activations + tokens * layers * each,
        buffers=last.buffers + layers * logits,
    )


def _further_elements(sizes: ModelSizes, strategy: MegatronConfig) -> int:
    """Return a rank's elements of the layers that predict further tokens, and of the copy of the
    embedding that they have if they lie on another stage than it."""
    further = sizes.further
    others = further.elements - further.experts + (sizes.head if strategy.pp > 1 else 0)
    return others // strategy.tp + further.experts // _expert_ranks(strategy)


def further_optimized(sizes: ModelSizes, strategy: MegatronConfig, ranks: int) -> int:
    """Return the elements of these layers of which a rank has masters and moments; 0 if they are
    not trained."""
    if strategy.mtp_loss_weight is None:
        return 0
    own = _further_elements(sizes, strategy)
    if not strategy.distributed_optimizer:
        return own
    return own // max(1, ranks // (strategy.tp * strategy.pp))


def _kept(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, *, stage: int) -> int:
    """Return the bytes that a stage keeps for the backward passes of all micro-batches that are
    under way there."""
    b, layers = passes.width, sizes.layers
    tokens, tp = _shares(sizes, strategy, passes)
    behind, turns = strategy.pp - stage - 1, strategy.vpp
    begun = 1 + (behind if turns == 1 else 2 * behind + (turns - 1) * strategy.pp)
    chunks, all_chunks = min(begun, passes.micro_batches * turns), strategy.pp * turns
    layer = layer_activations(sizes, b, tp)
    ends = (3 * FULL + b) * sizes.hidden if not behind else 0
    if strategy.recompute == "full":
        return tokens * (layers * b * sizes.hidden * chunks // all_chunks + layer + ends)
    return tokens * (layers * layer * chunks // all_chunks + ends)


def _head(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes, *, learns: bool) -> int:
    """Return the bytes of the backward pass of the last stage's head: logits of all tokens, twice
    those of the needed ones, and the chunks of their log-probs; and the gradient of the head before
    it is added to the buffer of gradients. A layer that is computed again comes after it."""
    logits = 3 * passes.width * (passes.tokens // strategy.cp) * sizes.vocab
    chunks = head_buffers(sizes, passes, learns=False)
    found = (logits + chunks + learns * passes.width * sizes.head) // strategy.tp
    if strategy.recompute == "full":
        tokens, tp = _shares(sizes, strategy, passes)
        found -= tokens * layer_activations(sizes, passes.width, tp)
    return max(found, 0)


def _shares(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes) -> tuple[int, int]:
    """Return how many tokens of a micro-batch a rank has in norms and residuals, and the ranks that
    share matrices but not these."""
    divides = strategy.sequence_parallel
    if divides is None:
        divides = sizes.experts > 0 or sizes.latent > 0
    tokens, tp = passes.tokens // strategy.cp, strategy.tp
    return (tokens // tp, 1) if divides else (tokens, tp)


def scored(sizes: ModelSizes, strategy: MegatronConfig, passes: Passes) -> Needs:
    """Return what a frozen model needs; its last stage has logits (or hidden states) of all tokens,
    and once more those of the needed ones."""
    b = passes.width
    tokens, tp = _shares(sizes, strategy, passes)
    logits = 2 * b * (passes.tokens // strategy.cp) * sizes.vocab // strategy.tp
    states = 2 * b * passes.tokens * sizes.hidden
    chunk = 2 * FULL * min(passes.chunk_tokens, passes.tokens) * sizes.vocab // strategy.tp
    return Needs(
        weights=b * _elements(sizes, strategy),
        activations=tokens * b * (4 * sizes.hidden + 3 * sizes.feed_forward // tp),
        buffers=(states if passes.tells_states else logits) + chunk,
    )


def _elements(sizes: ModelSizes, strategy: MegatronConfig) -> int:
    """Return the elements of a rank's part of the model."""
    others = (sizes.total - sizes.experts) // strategy.tp
    return (others + sizes.experts // _expert_ranks(strategy)) // strategy.pp


def optimized(sizes: ModelSizes, strategy: MegatronConfig, ranks: int) -> int:
    """Return the elements of which a rank has masters and moments.

    A distributed optimizer divides those of a part of the model over all ranks that have this
    part; experts may have fewer copies than the rest.
    """
    if not strategy.distributed_optimizer:
        return _elements(sizes, strategy)
    of_others = max(ranks, strategy.tp * strategy.pp)
    of_experts = max(ranks, _expert_ranks(strategy) * strategy.pp)
    return (sizes.total - sizes.experts) // of_others + sizes.experts // of_experts


def _expert_ranks(strategy: MegatronConfig) -> int:
    """Return the number of ranks that share the experts of a layer."""
    return strategy.ep * (strategy.etp or strategy.tp)
