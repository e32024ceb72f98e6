"""Construction of Megatron-Core's parallel groups and of this rank's part of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mcore_adapter.errors import LayoutError
from mcore_adapter.parallel_sizes import ParallelSizes, padded_vocab
from mcore_adapter.platform import mend_missing_te, quiet_imports

with quiet_imports():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        model_parallel_cuda_manual_seed,
        set_tensor_model_parallel_attributes,
    )

    from mcore_adapter.modeling.config import BuildOptions, ModelConfig, model_config
    from mcore_adapter.modeling.mtp import GPTModelWithMTP
    from mcore_adapter.modeling.specs import HAVE_TE, block_spec, mtp_spec
    from mcore_adapter.modeling.traits import (
        ScoreLayer,
        cap_logits,
        leave_out_padding,
        scale_embedding,
    )
    from mcore_adapter.modeling.vision.model import GPTModelWithTower, check_deepstack


def init_parallel(
    sizes: ParallelSizes,
    *,
    cp: int = 1,
    seed: int = 0,
    timeout: timedelta = timedelta(minutes=30),
) -> None:
    """Divide the ranks of the default process group into Megatron-Core's groups.

    A collective: all ranks call it. The default process group must exist. Groups of an earlier call
    are destroyed first.

    Args:
        cp: number of ranks that share the tokens of each row (context parallelism).
        seed: seed of dropout and of weights that are not loaded.
        timeout: time limit of a collective in the new groups.

    Raises:
        LayoutError: the number of ranks is not a multiple of the parallel sizes.
    """
    ranks = dist.get_world_size()
    for size, what in (
        (sizes.tp * cp * sizes.pp, "tp * pp" if cp == 1 else "tp * cp * pp"),
        (sizes.expert_tp * sizes.ep * sizes.pp, "etp * ep * pp"),
    ):
        if ranks % size:
            raise LayoutError(f"{ranks} ranks do not divide by {what} = {size}")
    leave_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        # Gloo groups are for a world of nccl; in a world of gloo they would be duplicates.
        create_gloo_process_groups=dist.get_backend() != "gloo",
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def seed_dropout(seed: int, step: int) -> None:
    """Seed the dropout of one training step.

    The same step gets the same seed in every run. Within a step, every pipeline stage and every
    data or context parallel rank gets a different seed.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    text = f"{seed} {step} {stage} {replica}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
    model_parallel_cuda_manual_seed(number, force_reset_rng=True)


def leave_parallel() -> None:
    """Destroy the groups that `init_parallel` made, if there are any. All ranks call it.

    Megatron-Core itself only forgets its groups. Their sockets and threads would stay, dozens for
    each layout, and slow down all processes of the machine. Groups that are gone already are left
    alone: Megatron-Core destroys those of gloo itself, and with the default process group all end.
    """
    groups = _cut_groups()
    parallel_state.destroy_model_parallel()
    for name in [n for n, v in vars(parallel_state).items() if isinstance(v, dist.ProcessGroup)]:
        setattr(parallel_state, name, None)
    # The order must be the same on all ranks: with some backends, they wait for each other.
    alive = {group for group in groups - {dist.group.WORLD} if _exists(group)}
    for group in sorted(alive, key=lambda each: str(each.group_name)):
        dist.destroy_process_group(group)


def _exists(group: dist.ProcessGroup) -> bool:
    """Return whether a group has not been destroyed yet."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def _cut_groups() -> set[dist.ProcessGroup]:
    """Return all process groups that Megatron-Core's `parallel_state` holds."""
    kept = [*vars(parallel_state).values()]
    kept += [each for value in kept if isinstance(value, list) for each in value]
    return {each for each in kept if isinstance(each, dist.ProcessGroup)}


def build_model(
    config: Mapping[str, Any], sizes: ParallelSizes, options: BuildOptions | None = None
) -> list[GPTModel]:
    """Build this rank's chunks of the model that a `config.json` describes, with random weights
    unless `options` leaves them out.

    There is one chunk, or `vpp` chunks in a virtual pipeline. Call `init_parallel(sizes)` first,
    and on a machine without CUDA `adapt_to_cpu()`.

    Raises:
        ConfigError: the config describes a model that cannot be built.
        LayoutError: the model does not divide over `sizes`, or the options do not fit.
        UnknownModelError: there is no family for its `model_type`.
    """
    options = options or BuildOptions()
    if not HAVE_TE:
        mend_missing_te()
    if options.te and not HAVE_TE:
        raise LayoutError(
            "layers of Transformer Engine are asked for, which is not installed: with CUDA, "
            "pip install transformer-engine[pytorch]"
        )
    made = model_config(config, sizes, options)
    if made.vision is not None:
        check_deepstack(made.vision, sizes, made.transformer.num_layers)
    return [_chunk(made, sizes, chunk) for chunk in range(sizes.vpp)]


def _chunk(made: ModelConfig, sizes: ParallelSizes, chunk: int) -> GPTModel:
    """Build chunk number `chunk` of this pipeline stage, on the GPU if there is one."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = sizes.layers_of(stage, chunk, made.transformer.num_layers)
    last = stage == sizes.pp - 1 and chunk == sizes.vpp - 1
    kind, further = _kind(made, last=last)
    model = kind(
        config=made.transformer,
        transformer_layer_spec=block_spec(made, layers),
        vocab_size=padded_vocab(made.vocab, sizes.tp),
        max_sequence_length=made.longest,
        pre_process=stage == 0 and chunk == 0,
        post_process=last,
        share_embeddings_and_output_weights=made.tied,
        vp_stage=chunk if sizes.vpp > 1 else None,
        **further,
    )
    _set_rope(model, made)
    # Layers that predict further tokens have the embedding on the last stage, too.
    if made.pad is not None and hasattr(model, "embedding"):
        leave_out_padding(model, made.pad)
    if model.pre_process and made.traits.embedding_scale != 1.0:
        scale_embedding(model, made.traits.embedding_scale)
    if model.post_process and made.head is not None:
        model.output_layer = ScoreLayer(model, bias=made.head.bias is not None)
    elif model.post_process and made.traits.logit_cap is not None:
        cap_logits(model, made.traits.logit_cap)
    if not made.transformer.perform_initialization:
        _mark_cut(model)
    _mark_experts(model)
    if torch.cuda.is_available():
        model.cuda()
    return model


def _kind(made: ModelConfig, *, last: bool) -> tuple[type[GPTModel], dict[str, Any]]:
    """Return the class of a chunk, and the arguments that only this class needs.

    Args:
        last: whether the chunk is the last one of the model.
    """
    if made.vision is not None:
        return GPTModelWithTower, {"vision": made.vision, "rope": made.rope}
    rope = {"position_embedding_type": "rope"}
    if made.transformer.mtp_num_layers and last:
        return GPTModelWithMTP, {**rope, "mtp_block_spec": mtp_spec(made)}
    return GPTModel, rope


def _mark_cut(model: GPTModel) -> None:
    """Mark the weights of which each tensor parallel rank has a part.

    Megatron-Core sets the mark while it draws their values. Without it, the norm of the gradients
    would count the part of one rank only.
    """
    for name, module in model.named_modules():
        if not isinstance(
            module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
        ):
            continue
        if module.weight is None or hasattr(module.weight, "tensor_model_parallel"):
            continue
        # A rank's part of a gated layer is a part of the gate and one of the rest.
        gated = model.config.gated_linear_unit and name.endswith("linear_fc1")
        set_tensor_model_parallel_attributes(
            module.weight,
            True,
            dim=1 if isinstance(module, RowParallelLinear) else 0,
            stride=2 if gated else 1,
        )


def _mark_experts(model: GPTModel) -> None:
    """Mark the parameters of experts so that their gradients are reduced over the right ranks.

    These are the ranks that hold the same experts, and no others. Megatron-Core sets the mark only
    for ep > 1; without the mark, gradients would stay different on ranks that hold the same experts
    where etp is less than tp. Megatron-Core would also sum gradients of experts' biases over the
    tensor parallel ranks.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False


def _set_rope(model: GPTModel, made: ModelConfig) -> None:
    """Replace the rotary frequencies of the model by those of its config.

    Megatron-Core computes frequencies of fewer kinds, and some of them with fixed constants. Models
    that see have the frequencies of their config from the beginning.
    """
    if made.rope is not None and made.vision is None:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = made.rope.inverse_frequencies.to(rotary.inv_freq.device)
