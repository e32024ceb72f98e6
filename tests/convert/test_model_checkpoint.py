"""A checkpoint written in one layout goes on in another as if nothing had happened."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from mcore_adapter.build.data_parallel import data_parallel
from mcore_adapter.build.model import build_model, init_parallel
from mcore_adapter.build.optimizer import adam, step
from mcore_adapter.checkpoint import restore, save
from mcore_adapter.load import load, read_config
from mcore_adapter.models import table_of
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.platform import adapt_to_cpu
from mcore_adapter.sizes import ParallelSizes
from tests.convert.parity import forward, mean_loss
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import rows, save_model

STEPS = 3


def go_on(
    folder: Path, sizes: ParallelSizes, distributed: bool, before: Path | None, after: Path | None
) -> list[float]:
    """Steps from a checkpoint or from the start; the losses, on the last stage."""
    from megatron.core import parallel_state

    adapt_to_cpu()
    config = read_config(folder)
    table = table_of(config)
    init_parallel(sizes, seed=1)
    bare = build_model(config, sizes)
    if before is None:
        load(folder, bare, table, sizes)
    chunks = data_parallel(bare, distributed_optimizer=distributed)
    optimizer = adam(chunks, lr=3e-3)
    if before is not None:
        assert restore(before, chunks, optimizer, table, sizes) == {"data": 7}
    rank = parallel_state.get_data_parallel_rank()
    group = parallel_state.get_data_parallel_group()
    batches = list(rows()[rank :: group.size()].split(1))
    losses = []
    for _ in range(STEPS):
        kept = run_schedule(
            chunks,
            batches,
            forward,
            partial(mean_loss, count=len(batches)),
            micro_batch_size=1,
            longest=rows().shape[1],
        )
        step(optimizer, chunks)
        if kept:
            loss = torch.stack([each[1] for each in kept]).mean()
            torch.distributed.all_reduce(loss, group=group)
            losses.append(float(loss) / group.size())
    if after is not None:
        save(after, chunks, optimizer, table, sizes, {"data": 7})
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_in_another_layout(name: str, distributed: bool, tmp_path: Path) -> None:
    folder, kept, again = save_model(tmp_path, name), tmp_path / "kept", tmp_path / "again"
    two_by_two = ParallelSizes(tp=2, pp=2)
    run_ranks(go_on, 4, folder, two_by_two, False, None, kept)
    assert not list(tmp_path.glob(".*.partial-*"))
    expected = max(run_ranks(go_on, 4, folder, two_by_two, False, kept, None), key=len)
    layouts = [(ParallelSizes(), 1), (ParallelSizes(), 2), (ParallelSizes(pp=2), 2)]
    if name == "qwen3_moe":
        layouts.append((ParallelSizes(ep=2), 2))
    for i, (sizes, ranks) in enumerate(layouts):
        after = again.with_name(f"again{i}")
        answers = run_ranks(go_on, ranks, folder, sizes, distributed, kept, after)
        assert max(answers, key=len) == pytest.approx(expected, rel=1e-5), (sizes, ranks)
    # What the last of them wrote goes on in the first layout.
    there = run_ranks(go_on, 4, folder, two_by_two, distributed, after, None)
    here = run_ranks(go_on, ranks, folder, sizes, distributed, after, None)
    assert max(there, key=len) == pytest.approx(max(here, key=len), rel=1e-5)
