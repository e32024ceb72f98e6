"""The model in training: this rank's chunks, and micro-batches through them."""

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
from mcore_adapter.modeling.mtp import predict_further
from mcore_adapter.modeling.optimizer import adam
from mcore_adapter.models import table_of
from mcore_adapter.parallel.logprobs import token_logprobs
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.train.data.dataset import Dataset
from mcore_adapter.train.data.micro_batches import Micro, micro, plan
from mcore_adapter.train.settings import Batch, Settings

Result = TypeVar("Result")

Reduce = Callable[[Sequence[Tensor], Micro], tuple[Tensor, Result]]
"""Of the log-probs [N] of the tokens of a micro-batch that are trained on, and then of those that
each further layer predicts: its part of the loss, whose parts are added over all ranks, and what to
keep."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    table: ModelTable
    """Of the model."""
    adapter: Adapter | None
    """What is trained, if not the model."""
    sizes: ParallelSizes
    batch: Batch
    mtp_loss_weight: float
    device: torch.device

    @property
    def trained(self) -> ModelTable:
        """Of what is trained: what checkpoints hold."""
        return self.table if self.adapter is None else self.adapter.table

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within, the model is the one that training starts from, if it trains an adapter."""
        return nullcontext() if self.adapter is None else self.adapter.off()

    @property
    def answers(self) -> bool:
        """Whether this rank is the first of those that have the results of its micro-batches."""
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
        """All micro-batches of a step that are this rank's; a collective.

        Args:
            examples: of all ranks.
            reduce: of a micro-batch.

        Returns:
            What was kept, on the last stage; nothing on the others.
        """
        replicas = parallel_state.get_data_parallel_world_size()
        # With virtual stages, chunks take turns in groups of pp micro-batches.
        turns = self.sizes.pp if self.sizes.vpp > 1 else 1
        made = plan(
            [dataset.lengths_of(example) for example in examples],
            capacity=self.batch.tokens,
            packing=self.batch.packing,
            width_multiple=self.sizes.tp,
            count_multiple=replicas * turns,
        )
        mine = made.parts[parallel_state.get_data_parallel_rank() :: replicas]
        micros = [
            micro(
                dataset,
                [examples[place] for place in part],
                made,
                packing=self.batch.packing,
                device=self.device,
            )
            for part in mine
        ]

        for chunk in self.chunks:
            chunk.train(not forward_only)
            if self.mtp_loss_weight:
                predict_further(chunk, on=not forward_only)
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

    def _loss(
        self, logits_BTV: Tensor, of: Micro, reduce: Reduce[Result]
    ) -> tuple[Tensor, Result | None]:
        """Of a micro-batch, which may have no sequences."""
        if not of.sequences:
            return logits_BTV[:0].float().sum(), None
        every = logits_BTV.split(len(of.tokens_BT))
        logprobs = [self._logprobs(each, of, ahead) for ahead, each in enumerate(every, 1)]
        value, result = reduce(logprobs, of)
        # Megatron-Core takes the mean over data parallel ranks.
        return value * parallel_state.get_data_parallel_world_size(), result

    def total(self, sums: Iterable[Tensor], like: int) -> list[float]:
        """Sums [`like`] of micro-batches over all ranks, on all of them; a collective."""
        found = torch.zeros(like, dtype=torch.float64, device=self.device)
        if self.answers:
            for each in sums:
                found += each
        dist.all_reduce(found)
        values: list[float] = found.tolist()
        return values

    def _logprobs(self, logits_BTV: Tensor, of: Micro, ahead: int) -> Tensor:
        """[N], of each token that is trained on, given those of its sequence up to `ahead` places
        before it; without those that have not as many before them."""
        places_N = of.places_N
        if ahead > 1:
            places_N = places_N[of.positions_BT.flatten()[places_N] >= ahead]
        logprobs_N, _ = token_logprobs(
            logits_BTV.flatten(0, 1)[places_N - ahead],
            of.tokens_BT.flatten()[places_N],
            vocab=self.table.shape.vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return logprobs_N


def load_policy(settings: Settings, device: torch.device) -> Policy:
    """This rank's part of the model, filled from its folder.

    Raises:
        ConfigError: it cannot be packed, not be built, or has no such layers for an adapter.
        LayoutError: something does not divide.
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
    if settings.batch.packing and bare[0].config.experimental_attention_variant is not None:
        raise ConfigError(
            f"{table.model_type} has linear attention, which runs over the bounds of packed "
            "sequences; say batch.packing=false"
        )
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
    weight = settings.mtp_loss_weight
    return Policy(chunks, optimizer, table, adapter, sizes, settings.batch, weight, device)


def _forward(chunk: nn.Module, of: Micro) -> Tensor:
    output: Tensor = chunk(of.tokens_BT, of.positions_BT, None, packed_seq_params=of.packed)
    return output
