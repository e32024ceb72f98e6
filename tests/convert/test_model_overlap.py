"""Gradients whose buckets are reduced while the backward pass goes on, and weights whose buckets
are gathered while the next forward pass does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.data_parallel import data_parallel, gather_weights
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.modeling.optimizer import adam, step
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


GATHERED = ("deepseek_v3", "qwen3_next")
"""Models with latent attention, convolutions, and experts whose weights are read without a call of
their modules."""


def weights(folders: list[Path]) -> list[tuple[Any, Any]]:
    """Of each model, all weights after some updates, gathered at once and meanwhile; and how many
    buckets were on their way or there when the embedding had run."""
    adapt_to_cpu()
    return [(trained(folder, gather=False), trained(folder, gather=True)) for folder in folders]


def trained(folder: Path, *, gather: bool) -> tuple[dict[str, Tensor], list[int], int]:
    config, sizes = read_config(folder), ParallelSizes()
    init_parallel(sizes)
    bare = build_model(config, sizes, BuildOptions(grouped_experts=True))
    load(folder, bare, table_of(config), sizes)
    chunks = data_parallel(
        bare,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=gather,
        bucket_elements=1500,
    )
    optimizer = adam(chunks, lr=1e-2)
    groups = chunks[0].bucket_groups + chunks[0].expert_parallel_bucket_groups
    there: list[int] = []
    bare[0].embedding.register_forward_hook(
        lambda *_: there.append(sum(group.param_gather_dispatched for group in groups))
    )
    for passes in PASSES:
        mine = list(rows(passes).split(1))[torch.distributed.get_rank() :: 2]
        run_schedule(
            chunks,
            mine,
            forward,
            partial(mean_loss, count=len(mine)),
            micro_batch_size=1,
            longest=12,
        )
        step(optimizer, chunks)
    gather_weights(chunks)
    return {name: p.clone() for name, p in bare[0].named_parameters()}, there, len(groups)


@pytest.mark.slow
def test_buckets_are_gathered_while_the_forward_pass_goes_on_and_to_the_same_bits(
    tmp_path: Path,
) -> None:
    folders = [save_model(tmp_path, name) for name in GATHERED]
    for answer in run_ranks(weights, 2, folders):
        for folder, ((wanted, _, _), (found, there, groups)) in zip(folders, answer, strict=True):
            # Micro-batches of a rank before those that begin the second and the third update.
            for first in (PASSES[0] // 2, (PASSES[0] + PASSES[1]) // 2):
                assert 0 < there[first] < groups, (folder.name, there, groups)
            for name, weight in wanted.items():
                assert torch.equal(found[name], weight), (folder.name, name)
