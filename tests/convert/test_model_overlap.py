"""Gradients whose buckets are reduced while the backward pass goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.models import table_of
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.parity import forward, mean_loss
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import rows, save_model

NAMES = ("gemma4", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_next")
"""Models with all kinds of layers; each parameter must get a gradient from each micro-batch."""
PASSES = (4, 2, 6)
"""Micro-batches of both ranks in each update."""


def gradients(folders: list[Path]) -> list[tuple[Any, Any]]:
    """Of each model, all gradients after the reduction, one at the end and one meanwhile; and how
    many buckets had begun when the backward pass reached the embedding."""
    adapt_to_cpu()
    return [(updates(folder, overlap=False), updates(folder, overlap=True)) for folder in folders]


def updates(folder: Path, *, overlap: bool) -> tuple[list[dict[str, Tensor]], list[int], int]:
    config, sizes = read_config(folder), ParallelSizes()
    init_parallel(sizes)
    bare = build_model(config, sizes)
    load(folder, bare, table_of(config), sizes)
    (chunk,) = data_parallel(bare, overlap_grad_reduce=overlap, bucket_elements=1500)
    groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    begun: list[int] = []

    def look(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(
            lambda _: begun.append(sum(group.grad_reduce_handle is not None for group in groups))
        )

    bare[0].embedding.register_forward_hook(look)
    found = []
    for passes in PASSES:
        mine = list(rows(passes).split(1))[torch.distributed.get_rank() :: 2]
        run_schedule(
            [chunk],
            mine,
            forward,
            partial(mean_loss, count=len(mine)),
            micro_batch_size=1,
            longest=12,
        )
        found.append({name: p.main_grad.clone() for name, p in bare[0].named_parameters()})
        chunk.zero_grad_buffer()
    return found, begun, len(groups)


@pytest.mark.slow
def test_buckets_are_reduced_before_the_backward_pass_ends_and_to_the_same_bits(
    tmp_path: Path,
) -> None:
    folders = [save_model(tmp_path, name) for name in NAMES]
    for answer in run_ranks(gradients, 2, folders):
        for folder, ((wanted, before, _), (found, begun, groups)) in zip(
            folders, answer, strict=True
        ):
            assert not any(before)
            # Micro-batches before the last one of an update begin nothing, nor does the first.
            last = [sum(PASSES[: update + 1]) // 2 - 1 for update in range(len(PASSES))]
            assert [begun[i] > 1 for i in range(len(begun))] == [
                i in last[1:] for i in range(len(begun))
            ], (folder.name, begun, groups)
            for ours, theirs in zip(found, wanted, strict=True):
                for name, gradient in theirs.items():
                    assert torch.equal(ours[name], gradient), (folder.name, name)
