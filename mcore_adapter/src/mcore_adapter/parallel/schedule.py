"""Micro-batches through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def run_schedule(
    chunks: Sequence[nn.Module],
    batches: Sequence[Batch],
    forward: Callable[[nn.Module, Batch], Tensor],
    loss: Callable[[Tensor, Batch], tuple[Tensor, Result]],
    *,
    micro_batch_size: int,
    longest: int,
    forward_only: bool = False,
) -> list[Result]:
    """Forward, and backward unless `forward_only`, of all micro-batches.

    With one stage they go one after the other, with several in Megatron-Core's 1F1B order, with
    several chunks a stage interleaved (the number of micro-batches must then divide by the number
    of stages).

    Args:
        chunks: of this rank, wrapped or not.
        forward: runs a chunk on a micro-batch; its input from the stage before is already set.
        loss: of the last chunk's output [B, T, vocabulary / tp]: the loss (the losses of all
            micro-batches are added) and a result to keep.
        micro_batch_size: rows of each micro-batch.
        longest: tokens of each row, the same in all micro-batches unless the config of the model
            says `variable_seq_lengths`.

    Returns:
        The results, on the last stage; nothing on the others.
    """

    def step(iterator: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)

        def reduce(output: Tensor) -> tuple[Tensor, dict[str, Result]]:
            value, result = loss(output, batch)
            # The schedule takes the mean over micro-batches.
            return value * len(batches), {"result": result}

        return forward(chunk, batch), reduce

    kept = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=longest,
        forward_only=forward_only,
    )
    return [each["result"] for each in kept]
