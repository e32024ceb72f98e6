"""Sharding of a model over the ranks: wrapping, mixed precision, offload policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.models.deferred.tensor import move, read_all
from roll.models.parts.host_inputs import checkpoint_layers
from roll.models.trained import select_trained
from roll.strategy.fsdp2 import expert_parallel, tensor_parallel
from roll.strategy.fsdp2.mesh import Meshes
from roll.strategy.training.heads import Head
from roll.strategy.training.token_model import TokenModel

T = TypeVar("T")


def load_sharded(
    config: Fsdp2Config,
    model: ModelConfig,
    head: Head[T],
    *,
    device: torch.device,
    meshes: Meshes,
    trainable: bool,
    seed: int,
) -> TokenModel[T]:
    """Load this rank's shard of the model.

    The parameters stay in the files of the checkpoint until FSDP copies this rank's part of each,
    so no rank ever holds more. Only checkpoints of `deferred_tensors` that are None are loaded as
    a whole first.

    A trainable model holds float32 master weights and computes in `model.dtype`. Its gradients are
    summed over ranks, not averaged. One rank that computes in the dtype of its weights has nothing
    to gather, reduce or convert, so its model is not given to FSDP, which would copy every weight
    and gradient in each pass.

    Args:
        seed: seed of the first factors of an adapter, the same on all ranks.
    """
    compute = getattr(torch, model.dtype)
    whole = head.load(model, torch.float32 if trainable else compute, deferred=True)
    if config.activation_checkpointing and trainable:
        checkpoint_layers(whole.model, device, offload=config.offload_activations)
    select_trained(whole.model, model, trainable=trainable, new_head=whole.new_head, seed=seed)
    whole.compile_layers(model)
    mixed = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 and trainable else None,
        reduce_dtype=getattr(torch, config.reduce_dtype),
    )
    move(whole, device)
    if _as_it_is(config, mixed, meshes, trainable=trainable):
        read_all(whole)
        return whole
    _shard(whole, config, mixed, device, meshes)
    if meshes.shard.size() > 1:  # one rank has no reduction
        _sum_gradients(whole)
    return whole


def _as_it_is(
    config: Fsdp2Config, mixed: MixedPrecisionPolicy, meshes: Meshes, *, trainable: bool
) -> bool:
    """Return whether passes need nothing of FSDP: no other rank, no other dtype, no other place."""
    rounds = trainable and mixed.reduce_dtype != torch.float32
    alone = meshes.shard.size() == 1
    return alone and mixed.param_dtype is None and not rounds and not config.cpu_offload


def _shard(
    whole: TokenModel[T],
    config: Fsdp2Config,
    mixed: MixedPrecisionPolicy,
    device: torch.device,
    meshes: Meshes,
) -> None:
    """Give each layer, then the root, to FSDP, which keeps this rank's part of the parameters."""
    offload = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if config.cpu_offload
        else OffloadPolicy()
    )
    fully = partial(fully_shard, mp_policy=mixed, offload_policy=offload)
    reshard = config.reshard_after_forward
    plan = {} if meshes.tp is None else tensor_parallel.plan(whole.model, meshes.tp.size())
    if meshes.ep is not None:
        expert_parallel.check(whole.model, meshes.ep.size())
    # Inputs of some modules must keep their dtype: outputs of teachers, which the root gets, the
    # cosines of a vision tower, which are float32 in every dtype of the model, and weights of
    # experts, which are float32 in some models.
    as_it_is = replace(mixed, cast_forward_inputs=False)
    seeing = set() if whole.tower is None else set(whole.tower.module.modules())
    for layer in _layers(whole.model):
        mesh = meshes.shard
        if layer in seeing:
            fully(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=as_it_is)
            continue
        if meshes.tp is not None:
            # Layer by layer, because matrices that tensor parallelism has cut stay on the device
            # until FSDP shards the layer.
            tensor_parallel.cut(whole.model, layer, plan, meshes.tp)
            for module in tensor_parallel.uncut(layer):
                # These modules are small, so they stay gathered until the backward pass.
                fully(module, mesh=meshes.shard, reshard_after_forward=False)
            mesh = meshes.shard_cut
        if meshes.ep is not None:
            for experts in expert_parallel.fused(layer):
                expert_parallel.cut(experts, meshes.ep)
                fully(
                    experts,
                    mesh=meshes.shard_cut,
                    reshard_after_forward=reshard,
                    mp_policy=as_it_is,
                )
        fully(layer, mesh=mesh, reshard_after_forward=reshard)
    # The backward pass starts with the root (embeddings, last norm, head), so the root stays
    # gathered.
    fully(whole, mesh=meshes.shard, reshard_after_forward=False, mp_policy=as_it_is)


def _sum_gradients(whole: nn.Module) -> None:
    """Let FSDP sum gradients over ranks: token weights already contain the divisor of the mean.

    With the factor alone FSDP uses a scaled sum, which only NCCL has; hence a plain sum is forced.
    """
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules that Hugging Face declares as units: the decoder layers, and those of a
    vision tower."""
    units = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in units]
