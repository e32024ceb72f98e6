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
    chunks: Sequence[GPTModel], *, distributed_optimizer: bool = False
) -> list[DistributedDataParallel]:
    """Wrap chunks for data parallelism; gradients are kept in fp32 buffers as `param.main_grad`.

    After a schedule with the backward pass the gradients are final: summed over the tensor parallel
    ranks where necessary, summed over the two copies of a tied embedding, and averaged over the
    data parallel ranks.

    Args:
        distributed_optimizer: whether each data parallel rank will update only a part of the
            weights.
    """
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed_optimizer,
            ),
            chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return wrapped
