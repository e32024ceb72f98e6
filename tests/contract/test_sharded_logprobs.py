"""Log-probs and entropy over a vocabulary spread over ranks, against those of whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.core.types import WorkerSpec
from roll.platform import get_platform
from roll.strategy.megatron.logprobs import from_shards
from tests.contract.ranks import run_ranks

TOKENS, VOCAB, PADDED, TEMPERATURE = 7, 11, 16, 0.7


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Logits with a padded vocabulary, targets, and a gradient for each result."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, PADDED, generator=g) * 3
    return (
        logits,
        torch.randint(0, VOCAB, (TOKENS,), generator=g),
        torch.randn(2, TOKENS, generator=g),
    )


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    get_platform("cpu").init_process_group(spec, timeout_s=60)
    logits, targets, grads = inputs()
    results: dict[str, Any] = {}
    for chunk in (3, 100):
        shard = logits.chunk(spec.world_size, dim=1)[spec.rank].clone().requires_grad_()
        untouched = shard.detach().clone()
        logprobs, entropy = from_shards(
            shard,
            targets,
            vocab=VOCAB,
            temperature=TEMPERATURE,
            chunk_tokens=chunk,
            entropy=True,
            group=dist.group.WORLD,
        )
        (logprobs * grads[0] + entropy * grads[1]).sum().backward()
        assert torch.equal(shard, untouched)
        results[str(chunk)] = (logprobs.detach(), entropy.detach(), shard.grad)
    return results


@pytest.mark.parametrize("world", [1, 2, 4])  # four: the last rank has nothing but padding
def test_results_and_gradients_equal_those_of_whole_logits(tmp_path: Path, world: int) -> None:
    logits, targets, grads = inputs()
    logits.requires_grad_()
    logp = (logits[:, :VOCAB] / TEMPERATURE).log_softmax(-1)
    want = logp.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    (want * grads[0] + entropy * grads[1]).sum().backward()
    ranks = run_ranks(world, job, tmp_path, timeout_s=120)
    for chunk in ("3", "100"):
        for result in ranks:
            torch.testing.assert_close(result[chunk][0], want)
            torch.testing.assert_close(result[chunk][1], entropy)
        gradient = torch.cat([result[chunk][2] for result in ranks], dim=1)
        torch.testing.assert_close(gradient, logits.grad)
