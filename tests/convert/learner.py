"""A model that learns, on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_adapter.checkpoint import restore, save
from mcore_adapter.convert.table import ModelTable
from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.modeling.optimizer import Step, adam, step
from mcore_adapter.models import table_of
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.parity import forward, mean_loss
from tests.convert.tiny_models import rows


@dataclass(frozen=True)
class Learner:
    chunks: Sequence[Any]
    optimizer: Any
    table: ModelTable
    sizes: ParallelSizes

    @classmethod
    def build(
        cls, folder: Path, sizes: ParallelSizes, *, distributed: bool = False, **options: Any
    ) -> Learner:
        """With the weights of a Hugging Face folder; `options` are those of `adam`."""
        adapt_to_cpu()
        config = read_config(folder)
        table = table_of(config)
        init_parallel(sizes, seed=1)
        bare = build_model(config, sizes)
        load(folder, bare, table, sizes)
        chunks = data_parallel(bare, distributed_optimizer=distributed)
        return cls(chunks, adam(chunks, **{"lr": 3e-3, **options}), table, sizes)

    def backward(self, tokens_BT: Tensor | None = None) -> float | None:
        """Gradients of the mean loss of all ranks' rows, and that loss on the last stage."""
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        group = parallel_state.get_data_parallel_group()
        tokens_BT = rows() if tokens_BT is None else tokens_BT
        batches = list(tokens_BT[rank :: group.size()].split(1))
        kept = run_schedule(
            self.chunks,
            batches,
            forward,
            partial(mean_loss, count=len(batches)),
            micro_batch_size=1,
            longest=tokens_BT.shape[1],
        )
        if not kept:
            return None
        loss = torch.stack([each[1].detach() for each in kept]).mean()
        torch.distributed.all_reduce(loss, group=group)
        return float(loss) / group.size()

    def step(self, lr: float | None = None) -> Step:
        return step(self.optimizer, self.chunks, lr=lr)

    def save(self, folder: Path, **extra: Any) -> None:
        save(folder, self.chunks, self.optimizer, self.table, self.sizes, extra)

    def restore(self, folder: Path) -> dict[str, Any]:
        return restore(folder, self.chunks, self.optimizer, self.table, self.sizes)
