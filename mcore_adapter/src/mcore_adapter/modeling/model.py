"""This rank's part of a model."""

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
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mcore_adapter.modeling.config import BuildOptions, ModelConfig, model_config
    from mcore_adapter.modeling.mtp import FurtherModel
    from mcore_adapter.modeling.specs import HAVE_TE, block_spec, mtp_spec


def init_parallel(
    sizes: ParallelSizes, *, seed: int = 0, timeout: timedelta = timedelta(minutes=30)
) -> None:
    """Cut the ranks of the default process group, which must exist, into Megatron-Core's groups.

    What was cut before is dissolved. All ranks call it.

    Args:
        seed: of dropout and of weights that are not loaded.
        timeout: of a collective in the new groups.

    Raises:
        LayoutError: the ranks do not divide.
    """
    ranks = dist.get_world_size()
    for size, what in (
        (sizes.tp * sizes.pp, "tp * pp"),
        (sizes.expert_tp * sizes.ep * sizes.pp, "etp * ep * pp"),
    ):
        if ranks % size:
            raise LayoutError(f"{ranks} ranks do not divide by {what} = {size}")
    leave_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        # They are for a world of nccl; in one of gloo they would be second copies.
        create_gloo_process_groups=dist.get_backend() != "gloo",
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def seed_dropout(seed: int, step: int) -> None:
    """What is dropped from now on: of a step the same in every run, on every stage and for every
    data parallel rank something else."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank()
    text = f"{seed} {step} {stage} {replica}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
    model_parallel_cuda_manual_seed(number, force_reset_rng=True)


def leave_parallel() -> None:
    """Dissolve what `init_parallel` cut. All ranks call it; without a cut it does nothing.

    Megatron-Core by itself only forgets its groups, whose sockets and threads then stay: dozens per
    layout, which slow down all processes of the machine.
    """
    groups = _cut_groups()
    parallel_state.destroy_model_parallel()
    for name in [n for n, v in vars(parallel_state).items() if isinstance(v, dist.ProcessGroup)]:
        setattr(parallel_state, name, None)
    # In an order that all ranks share: some backends wait for each other.
    for group in sorted(groups - {dist.group.WORLD}, key=lambda each: str(each.group_name)):
        dist.destroy_process_group(group)


def _cut_groups() -> set[dist.ProcessGroup]:
    kept = [*vars(parallel_state).values()]
    kept += [each for value in kept if isinstance(value, list) for each in value]
    return {each for each in kept if isinstance(each, dist.ProcessGroup)}


def build_model(
    config: Mapping[str, Any], sizes: ParallelSizes, options: BuildOptions | None = None
) -> list[GPTModel]:
    """The chunks of this rank, one unless there is a virtual pipeline, with random weights.

    `init_parallel(sizes)` comes first, and `adapt_to_cpu()` on a machine without CUDA.

    Args:
        config: the content of a `config.json`.

    Raises:
        ConfigError: the config says what cannot be built.
        LayoutError: something does not divide.
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
    return [_chunk(made, sizes, chunk) for chunk in range(sizes.vpp)]


def _chunk(made: ModelConfig, sizes: ParallelSizes, chunk: int) -> GPTModel:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = sizes.layers_of(stage, chunk, made.transformer.num_layers)
    last = stage == sizes.pp - 1 and chunk == sizes.vpp - 1
    further: dict[str, Any] = {}
    if made.transformer.mtp_num_layers and last:
        spec = mtp_spec(made.transformer, grouped=made.grouped, out_bias=made.out_bias)
        further = {"mtp_block_spec": spec}
    model = (FurtherModel if further else GPTModel)(
        config=made.transformer,
        transformer_layer_spec=block_spec(
            made.transformer, layers, te=made.te, grouped=made.grouped, out_bias=made.out_bias
        ),
        vocab_size=padded_vocab(made.vocab, sizes.tp),
        max_sequence_length=made.longest,
        pre_process=stage == 0 and chunk == 0,
        post_process=last,
        share_embeddings_and_output_weights=made.tied,
        position_embedding_type="rope",
        vp_stage=chunk if sizes.vpp > 1 else None,
        **further,
    )
    _set_rope(model, made)
    _mark_experts(model)
    if torch.cuda.is_available():
        model.cuda()
    return model


def _mark_experts(model: GPTModel) -> None:
    """Gradients of experts are reduced over the ranks that hold the same experts, and over no
    others. Megatron-Core marks their parameters only for ep > 1, and so leaves gradients apart
    where etp is less than tp; and it sums those of biases over the tensor parallel ranks, too."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False


def _set_rope(model: GPTModel, made: ModelConfig) -> None:
    """Megatron-Core computes frequencies of fewer kinds, and some with fixed constants."""
    if made.rope is not None:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = made.rope.inverse_frequencies.to(rotary.inv_freq.device)
