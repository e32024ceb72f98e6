"""Megatron-Core's data parallel wrapper around the chunks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn


def data_parallel(
    chunks: Sequence[GPTModel],
    *,
    distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_elements: int | None = None,
) -> list[DistributedDataParallel]:
    """Wrap chunks for data parallelism; gradients are kept in fp32 buffers as `param.main_grad`.

    After a schedule with the backward pass the gradients are final: summed over the tensor parallel
    ranks where necessary, summed over the two copies of a tied embedding, and averaged over the
    data parallel ranks.

    Args:
        distributed_optimizer: whether each data parallel rank will update only a part of the
            weights.
        overlap_grad_reduce: whether the backward pass of the last micro-batch reduces gradients,
            bucket by bucket, while it goes on. Every trained parameter must then get a gradient in
            each backward pass.
        overlap_param_gather: whether the next forward pass gathers updated weights, bucket by
            bucket, while it goes on. Until then each rank has only its own part of them, and
            whatever else reads weights must call `gather_weights` before. Needs the two above.
        bucket_elements: elements of a bucket of the first stage's first chunk; others are one
            bucket. None: Megatron-Core's number, at least 40 million. Without
            `overlap_grad_reduce` there is one bucket.
    """
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed_optimizer,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
                bucket_size=bucket_elements,
            ),
            chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if overlap_grad_reduce:
        # The schedule holds reductions back with it until the last micro-batch.
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    if overlap_param_gather:
        for chunk in wrapped:
            _wait_before_layers(chunk)
            for group in _bucket_groups(chunk):
                group.param_gather_dispatched = True  # every rank has been given all weights
    return wrapped


def gather_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the updated weights that no forward pass has gathered yet. Collective.

    Does nothing if there are none, or without `overlap_param_gather`.
    """
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for group in _bucket_groups(chunk):
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)


def _bucket_groups(chunk: DistributedDataParallel) -> list[Any]:
    """Return Megatron-Core's groups of buckets, each of which is gathered at once."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _wait_before_layers(chunk: DistributedDataParallel) -> None:
    """Let each layer wait for all of its weights before it begins.

    Megatron-Core lets a module wait for its own weights, when it is called. Some are read without a
    call, such as those of grouped experts.
    """
    for layer in chunk.modules():
        if isinstance(layer, BaseTransformerLayer):
            assert isinstance(layer, nn.Module)
            found = (chunk.param_to_bucket_group.get(p) for p in layer.parameters())
            layer.register_forward_pre_hook(_wait([*dict.fromkeys(g for g in found if g)]))


def _wait(groups: Sequence[Any]) -> Callable[..., None]:
    """Return a hook before a forward pass that waits for the weights of groups of buckets."""

    def hook(*_: object) -> None:
        for group in groups:
            group.finish_param_sync()

    return hook
