"""Training steps follow those of Hugging Face and PyTorch in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_adapter.build.data_parallel import data_parallel
from mcore_adapter.build.model import BuildOptions, build_model, init_parallel
from mcore_adapter.build.optimizer import adam, step
from mcore_adapter.load import load, read_config
from mcore_adapter.models import table_of
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.platform import adapt_to_cpu
from mcore_adapter.sizes import ParallelSizes
from tests.convert.parity import forward, mean_loss
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import rows, save_model, targets

STEPS, LR, CLIP, DECAY = 5, 3e-3, 0.5, 0.0


def by_hand(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of PyTorch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for _ in range(STEPS):
        logits = model(input_ids=rows(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets(rows()).flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(
    cases: list[tuple[Path, ParallelSizes, bool]],
) -> list[tuple[list[float], list[float]]]:
    """Losses (on the last stage; of all data parallel ranks) and gradient norms."""
    from megatron.core import parallel_state

    adapt_to_cpu()
    found = []
    for folder, sizes, distributed in cases:
        config = read_config(folder)
        init_parallel(sizes)
        bare = build_model(config, sizes, BuildOptions())
        load(folder, bare, table_of(config), sizes)
        chunks = data_parallel(bare, distributed_optimizer=distributed)
        optimizer = adam(chunks, lr=LR, weight_decay=DECAY, max_grad_norm=CLIP)
        rank = parallel_state.get_data_parallel_rank()
        batches = list(rows()[rank :: parallel_state.get_data_parallel_world_size()].split(1))
        losses, norms = [], []
        for _ in range(STEPS):
            kept = run_schedule(
                chunks,
                batches,
                forward,
                partial(mean_loss, count=len(batches)),
                micro_batch_size=1,
                longest=rows().shape[1],
            )
            norms.append(step(optimizer, chunks).grad_norm)
            if kept:
                loss = torch.stack([each[1] for each in kept]).mean()
                group = parallel_state.get_data_parallel_group()
                torch.distributed.all_reduce(loss, group=group)
                losses.append(float(loss) / group.size())
        found.append((losses, norms))
    return found


def skips_what_is_not_finite(folder: Path) -> bool:
    """Whether weights stay as they are when a gradient is not finite."""
    adapt_to_cpu()
    config, sizes = read_config(folder), ParallelSizes()
    init_parallel(sizes)
    chunks = data_parallel(build_model(config, sizes))
    optimizer = adam(chunks, lr=LR)
    before = [p.detach().clone() for p in chunks[0].parameters()]
    next(chunks[0].parameters()).main_grad.fill_(torch.inf)
    done = step(optimizer, chunks)
    same = all(torch.equal(a, b) for a, b in zip(before, chunks[0].parameters(), strict=True))
    cleared = all(not p.main_grad.any() for p in chunks[0].parameters())
    return done.skipped and same and cleared


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_pytorch(tmp_path: Path) -> None:
    layouts = (
        (ParallelSizes(), False),
        (ParallelSizes(), True),
        (ParallelSizes(tp=2), False),
        (ParallelSizes(pp=2), False),
        (ParallelSizes(pp=2), True),
    )
    folders = [save_model(tmp_path, name) for name in ("qwen3_tied", "qwen3_moe")]
    cases = [(folder, *layout) for folder in folders for layout in layouts]
    cases += [(folders[1], ParallelSizes(ep=2), flag) for flag in (False, True)]
    answers = run_ranks(train, 2, cases)
    for i, case in enumerate(cases):
        losses, norms = by_hand(case[0])
        for answer in answers:
            assert answer[i][1] == pytest.approx(norms, rel=1e-4), case
            assert not answer[i][0] or answer[i][0] == pytest.approx(losses, rel=1e-4), case
        assert any(answer[i][0] for answer in answers)


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    assert run_ranks(skips_what_is_not_finite, 1, save_model(tmp_path, "qwen3")) == [True]
