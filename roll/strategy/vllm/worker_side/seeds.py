"""Seeds of vLLM's sampler without a GPU, drawn for many tokens at once.

For each token the sampler draws a seed from the request's generator, by three calls of PyTorch. For
64 requests this takes 0.3 ms of each step (benchmarks/seed_blocks.py). Here a generator draws the
seeds of the next tokens of its request in one call. They are the same numbers, so the same tokens
come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

BLOCK = 64
"""Number of seeds that a generator draws at once."""
END = 2**31
"""Seeds are smaller than this, as vLLM draws them."""


class SeedBlocks:
    """Part of `RollWorker` that lets the sampler draw seeds in blocks; the worker provides
    `model_runner`."""

    model_runner: Any

    def roll_draw_seeds_in_blocks(self) -> None:
        """Replace the last part of the sampler. With `use_fp64_gumbel` it draws no seeds, and
        stays."""
        sampler = self.model_runner.sampler.topk_topp_sampler
        if not sampler.use_fp64_gumbel:
            sampler.forward = BlockSampler(sampler.logprobs_mode).sample


class BlockSampler:
    """Does what `TopKTopPSampler.forward_cpu` of vLLM does, with seeds drawn in blocks.

    Args:
        logprobs_mode: vLLM's name of what is returned beside the tokens.
    """

    def __init__(self, logprobs_mode: str) -> None:
        self._mode = logprobs_mode
        self._drawn: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
        """Generator of a request -> seeds that it has drawn for later tokens, the next one last."""

    def sample(
        self,
        logits_BV: Tensor,
        generators: Mapping[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Draw a token for each row.

        Args:
            generators: row -> generator of its request, for requests with a seed.
            k: number of tokens to draw from, for each row; None: all.
            p: probability of the tokens to draw from, for each row; None: 1.

        Returns:
            The tokens, and the logits or log-probs that they were drawn with, or None, as
            `logprobs_mode` says.
        """
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits_BV = apply_top_k_top_p(logits_BV, k, p)
        drawn_with = None
        if self._mode == "processed_logits":
            drawn_with = logits_BV
        elif self._mode == "processed_logprobs":
            drawn_with = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        seeds_B = self.seeds(len(logits_BV), generators)
        return torch.ops._C.fused_gumbel_argmax(logits_BV.float(), seeds_B), drawn_with

    def seeds(self, rows: int, generators: Mapping[int, torch.Generator]) -> Tensor:
        """Return the seed of each row's next token; one of the default generator for others."""
        seeds = [0] * rows
        if len(generators) < rows:
            seeds = torch.randint(0, END, (rows,)).tolist()
        for row, generator in generators.items():
            drawn = self._drawn.get(generator)
            if not drawn:
                drawn = torch.randint(0, END, (BLOCK,), generator=generator).tolist()[::-1]
                self._drawn[generator] = drawn
            seeds[row] = drawn.pop()
        return torch.tensor(seeds)
