"""Model in training: the model chunks of this rank, and the running of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from mcore_adapter.convert.lora_table import Lora
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConfigError
from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.lora import Adapter, add_adapter
from mcore_adapter.modeling.model import build_model
from mcore_adapter.modeling.mtp import set_mtp_logits
from mcore_adapter.modeling.optimizer import adam
from mcore_adapter.models import table_of
from mcore_adapter.models.shared_rows import why_not_packed
from mcore_adapter.optimizer_state import load_masters
from mcore_adapter.parallel.logprobs import token_logprobs
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.train.data.dataset import Dataset
from mcore_adapter.train.data.micro_batches import Micro, Plan, micro, plan
from mcore_adapter.train.settings import Batch, Settings

Result = TypeVar("Result")

Reduce = Callable[[Sequence[Tensor], Micro], tuple[Tensor, Result]]
"""Function that computes the loss of a micro-batch.

It gets the micro-batch and a list of log-probabilities: first `[N]`, those of the trained tokens,
then one tensor for each further layer (MTP), with the trained tokens that this layer predicts. It
returns the part of the loss that comes from this micro-batch, and a result to keep. The loss is the
sum of the parts of all micro-batches of all ranks.
"""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Torch data type of each value of `dtype` in the settings."""


@dataclass(frozen=True)
class Policy:
    """Model in training, of which this rank holds some chunks, with its optimizer."""

    chunks: Sequence[DistributedDataParallel]
    """Model chunks of this rank, one per virtual pipeline stage."""
    optimizer: MegatronOptimizer
    table: ModelTable
    """Table of the model."""
    adapter: Adapter | None
    """LoRA adapter that is trained; None: the weights of the model are trained."""
    sizes: ParallelSizes
    batch: Batch
    mtp_loss_weight: float
    device: torch.device

    @property
    def trained(self) -> ModelTable:
        """Table of the trained weights, which are those in checkpoints: adapter or model."""
        return self.table if self.adapter is None else self.adapter.table

    def without_adapter(self) -> AbstractContextManager[None]:
        """Switch off the adapter within the block, if there is one.

        The model then is the one that training started from. Without an adapter this method does
        nothing.
        """
        return nullcontext() if self.adapter is None else self.adapter.off()

    @property
    def answers(self) -> bool:
        """True if this rank is the one that counts the results of its data parallel replica.

        This is the rank on the last pipeline stage with tensor parallel rank 0.
        """
        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def run(
        self,
        dataset: Dataset,
        examples: Sequence[int],
        reduce: Reduce[Result],
        *,
        forward_only: bool,
    ) -> list[Result]:
        """Run this rank's micro-batches of a step, forward and, unless `forward_only`, backward.

        This is a collective: all ranks call it with the same examples.

        Args:
            examples: numbers of the examples of the step, of all ranks together.
            reduce: function that computes the loss of a micro-batch.
            forward_only: compute no gradients, and use neither dropout nor further layers (MTP).

        Returns:
            On the last pipeline stage the results that `reduce` returned, one per micro-batch with
            sequences; on other stages an empty list.
        """
        made, micros = self._micro_batches(dataset, examples)
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if self.mtp_loss_weight:
                set_mtp_logits(chunk, on=not forward_only)
        with torch.set_grad_enabled(not forward_only):
            kept = run_schedule(
                self.chunks,
                micros,
                _forward,
                lambda logits_BTV, of: self._loss(logits_BTV, of, reduce),
                micro_batch_size=made.rows,
                longest=made.width,
                forward_only=forward_only,
            )
        return [result for result in kept if result is not None]

    def _micro_batches(self, dataset: Dataset, examples: Sequence[int]) -> tuple[Plan, list[Micro]]:
        """Return the plan of a step, the same on all ranks, and this rank's micro-batches."""
        replicas = parallel_state.get_data_parallel_world_size()
        # With virtual stages, the schedule runs each chunk on groups of pp micro-batches.
        turns = self.sizes.pp if self.sizes.vpp > 1 else 1
        packing = self.batch.packing
        made = plan(
            [dataset.lengths_of(example) for example in examples],
            capacity=self.batch.tokens,
            packing=packing,
            width_multiple=self.sizes.tp,
            count_multiple=replicas * turns,
        )
        mine = made.parts[parallel_state.get_data_parallel_rank() :: replicas]
        parts = [[examples[place] for place in part] for part in mine]
        return made, [
            micro(dataset, part, made, packing=packing, device=self.device) for part in parts
        ]

    def _loss(
        self, logits_BTV: Tensor, of: Micro, reduce: Reduce[Result]
    ) -> tuple[Tensor, Result | None]:
        """Return the loss of a micro-batch, for Megatron-Core to divide, and the result to keep.

        A micro-batch without sequences has the loss 0 and the result None. Collective over the
        tensor parallel ranks.
        """
        if not of.sequences:
            return logits_BTV[:0].float().sum(), None
        every = logits_BTV.split(len(of.tokens_BT))
        logprobs = [self._logprobs(each, of, ahead) for ahead, each in enumerate(every, 1)]
        value, result = reduce(logprobs, of)
        # Megatron-Core divides the gradients by the number of data parallel ranks; undo this here.
        return value * parallel_state.get_data_parallel_world_size(), result

    def total(self, sums: Iterable[Tensor], like: int) -> list[float]:
        """Add the sums of all micro-batches of all ranks, and return the total on all ranks.

        This is a collective: all ranks call it.

        Args:
            sums: sums of this rank's micro-batches, `[like]` each.
            like: number of values of a sum.
        """
        found = torch.zeros(like, dtype=torch.float64, device=self.device)
        if self.answers:
            for each in sums:
                found += each
        dist.all_reduce(found)
        return found.tolist()

    def _logprobs(self, logits_BTV: Tensor, of: Micro, ahead: int) -> Tensor:
        """Return the log-probability of each trained token of a micro-batch.

        A token is predicted from the tokens of its sequence up to `ahead` places before it. Trained
        tokens with fewer than `ahead` tokens before them are left out.

        Args:
            logits_BTV: logits of the layer that predicts `ahead` tokens ahead,
                `[B, T, padded vocabulary / tp]`.
            ahead: distance of the predicted token; 1: the next token.

        Returns:
            Natural log-probabilities, fp32 `[N]`, or fewer than N values with `ahead` > 1.
        """
        places_N = of.places_N
        if ahead > 1:
            places_N = places_N[of.positions_BT.flatten()[places_N] >= ahead]
        logprobs_N, _, _ = token_logprobs(
            logits_BTV.flatten(0, 1).index_select(0, places_N - ahead),
            of.tokens_BT.flatten()[places_N],
            vocab=self.table.shape.vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return logprobs_N


def load_policy(settings: Settings, device: torch.device) -> Policy:
    """Build this rank's part of the model and load its weights from the folder of the model.

    Raises:
        ConfigError: the model cannot be built or cannot be trained with packing, or it lacks the
            target layers of the adapter.
        LayoutError: the model does not divide over the parallel sizes.
        ConversionError: the folder has no usable config or weights.
        UnknownModelError: there is no table for the model type.
    """
    config, sizes = read_config(settings.model), settings.layout.sizes
    table = table_of(config)
    options = BuildOptions(
        dtype=DTYPES[settings.dtype],
        sequence_parallel=settings.layout.sequence_parallel,
        recompute=settings.layout.recompute,
        grouped_experts=settings.layout.grouped_experts,
        mtp=settings.mtp_loss_weight > 0,
    )
    bare = build_model(config, sizes, options)
    if settings.batch.packing and (why := why_not_packed(config)):
        raise ConfigError(f"{why}; say batch.packing=false")
    load(settings.model, bare, table, sizes)
    adapter = None
    if settings.lora is not None:
        lora = Lora(**settings.lora.model_dump())
        adapter = add_adapter(bare, table, lora, sizes, seed=settings.seed)
    chunks = data_parallel(bare, distributed_optimizer=settings.layout.distributed_optimizer)
    how = settings.optimizer
    optimizer = adam(
        chunks,
        lr=how.lr,
        betas=how.betas,
        eps=how.eps,
        weight_decay=how.weight_decay,
        max_grad_norm=how.max_grad_norm,
    )
    if adapter is None:
        load_masters(settings.model, chunks, optimizer, table, sizes)
    weight = settings.mtp_loss_weight
    return Policy(chunks, optimizer, table, adapter, sizes, settings.batch, weight, device)


def _forward(chunk: nn.Module, of: Micro) -> Tensor:
    """Run a chunk on a micro-batch; return its output, which on the last chunk are logits."""
    return chunk(of.tokens_BT, of.positions_BT, None, packed_seq_params=of.packed)
