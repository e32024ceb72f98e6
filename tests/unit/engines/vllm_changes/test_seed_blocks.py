"""Seeds of vLLM's sampler, drawn in blocks: the tokens are those that vLLM draws by itself."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import vllm._custom_ops  # noqa: F401  # loads the kernels

from roll.strategy.vllm.worker_side.seeds import BLOCK, BlockSampler, SeedBlocks


class Worker(SeedBlocks):
    """A worker with nothing but vLLM's sampler."""

    def __init__(self, mode: str, *, fp64: bool = False) -> None:
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

        class Runner:
            class sampler:
                topk_topp_sampler: Any = TopKTopPSampler(mode, use_fp64_gumbel=fp64)

        self.model_runner = Runner()

    @property
    def sampler(self) -> Any:
        return self.model_runner.sampler.topk_topp_sampler


def both(mode: str) -> tuple[Any, Any]:
    """vLLM's sampler as it is, and with blocks."""
    changed = Worker(mode)
    changed.roll_draw_seeds_in_blocks()
    return Worker(mode).sampler, changed.sampler


def numbered(count: int) -> dict[int, torch.Generator]:
    return {i: torch.Generator().manual_seed(100 + i) for i in range(count)}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("limits", [False, True])
def test_requests_that_come_and_go_get_the_tokens_of_vllm_itself(mode: str, limits: bool) -> None:
    own, changed = both(mode)
    theirs, ours = numbered(6), numbered(6)
    dice = random.Random(0)
    for _ in range(3 * BLOCK):
        there = dice.sample(range(6), dice.randint(1, 6))  # rows move, requests rest
        logits = torch.randn(len(there), 50)
        k = torch.full((len(there),), 7) if limits else None
        p = torch.full((len(there),), 0.9) if limits else None
        found = []
        for sampler, generators in ((own, theirs), (changed, ours)):
            rows = {row: generators[request] for row, request in enumerate(there)}
            found.append(sampler(logits.clone(), rows, k, p))
        (tokens, with_them), (own_tokens, own_with_them) = found
        assert torch.equal(tokens, own_tokens)
        if mode == "raw_logprobs":
            assert with_them is own_with_them is None
        else:
            assert torch.equal(with_them, own_with_them)


def test_rows_without_a_seed_are_drawn_by_the_default_generator_beside_those_with_one() -> None:
    own, changed = both("raw_logprobs")
    logits = torch.randn(4, 50)
    drawn = []
    for sampler in (own, changed):
        torch.manual_seed(3)
        generators = {1: torch.Generator().manual_seed(5), 3: torch.Generator().manual_seed(6)}
        drawn.append([sampler(logits.clone(), generators, None, None)[0] for _ in range(5)])
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
    assert len({tuple(row.tolist()) for row in drawn[0]}) > 1


def test_seeds_of_a_request_that_is_gone_are_forgotten() -> None:
    sampler = BlockSampler("raw_logprobs")
    generators = numbered(3)
    sampler.seeds(3, generators)
    assert len(sampler._drawn) == 3
    generators.clear()
    gc.collect()
    assert len(sampler._drawn) == 0


def test_a_sampler_that_draws_no_seeds_stays() -> None:
    worker = Worker("raw_logprobs", fp64=True)
    before = worker.sampler.forward
    worker.roll_draw_seeds_in_blocks()
    assert worker.sampler.forward == before
