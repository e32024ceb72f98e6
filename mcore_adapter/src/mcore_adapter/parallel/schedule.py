"""Pipeline schedule, which runs micro-batches through the stages of a model."""

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
    """Run the forward pass of all micro-batches, and the backward pass unless `forward_only`.

    With one stage the micro-batches run one after the other; with several stages, in
    Megatron-Core's 1F1B order; with several chunks per stage, in its interleaved order. In the
    interleaved order, the number of micro-batches must be a multiple of the number of stages.

    Args:
        chunks: this rank's chunks, wrapped or not.
        forward: function that runs a chunk on a micro-batch; the input from the stage before is
            already set.
        loss: function of the last chunk's output, `[B, T, vocabulary / tp]` or, with a score head,
            `[B, T, 1]`, and of the micro-batch. It returns the loss and a result to keep; the
            losses of all micro-batches are added.
        micro_batch_size: number of rows of each micro-batch.
        longest: number of tokens of each row, the same in all micro-batches unless the model's
            config sets `variable_seq_lengths`.

    Returns:
        The results on the last stage; an empty list on the others.
    """
    kept = get_forward_backward_func()(
        forward_step_func=_forward_step(forward, loss, len(batches)),
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=longest,
        forward_only=forward_only,
    )
    return [each["result"] for each in kept]


def _forward_step(
    forward: Callable[[nn.Module, Batch], Tensor],
    loss: Callable[[Tensor, Batch], tuple[Tensor, Result]],
    num_batches: int,
) -> Callable[[Iterator[Batch], nn.Module], tuple[Tensor, Callable[..., Any]]]:
    """Return the schedule's step, a function that runs the next micro-batch through a chunk.

    It returns the output, and the function that the schedule calls with the last chunk's output.
    """

    def step(iterator: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)

        def reduce(output: Tensor) -> tuple[Tensor, dict[str, Result]]:
            value, result = loss(output, batch)
            # The schedule divides by the number of micro-batches.
            return value * num_batches, {"result": result}

        return forward(chunk, batch), reduce

    return step
