"""Megatron-Core's data parallel wrapper around the chunks of a model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel


def data_parallel(
    chunks: Sequence[GPTModel],
    *,
    distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
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
    return wrapped
