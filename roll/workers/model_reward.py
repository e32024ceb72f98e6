"""`ModelReward`: scores whole responses with a reward model."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch

from roll.config.sections.reward import RewardConfig
from roll.config.sections.strategy import HfScoreConfig
from roll.core.batches import TokenBatch
from roll.core.errors import WaitTimeoutError
from roll.core.metrics import Metrics
from roll.core.types import Sample, WorkerSpec
from roll.distributed.dispatch import BROADCAST, dispatch
from roll.rewards.api import Reward, RewardContext
from roll.rewards.execution.counters import Purpose, Scored, counters_of
from roll.strategy.backend_setup import ModelSetup
from roll.strategy.hf.score import HfScore
from roll.strategy.training.heads import ScoreHead
from roll.workers.reward import RewardWorker, fetched

PASS_S = 600.0
"""Longest time of the forward pass of a micro-batch, in seconds."""


class ModelReward(RewardWorker):
    """A reward that hosts a sequence classifier with one label (`model` in the config).

    The classifier reads the token ids of prompt and response as the policy has them, so it must use
    the policy's tokenizer. The score of a response is the classifier's output at the last token.
    """

    def __init__(self, spec: WorkerSpec, name: str, config: RewardConfig) -> None:
        super().__init__(spec, name, config)
        self._scorer: HfScore[Any] | None = None
        self.pass_s = PASS_S
        self._counters = counters_of(name, config)
        self._here = asyncio.Event()
        """Event that is set while the model is on its device."""
        # One forward pass at a time: passes run in threads, and the event loop takes further calls.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model onto its device."""
        assert self.config.model is not None
        setup = ModelSetup(
            spec=self.spec,
            model=self.config.model,
            head=ScoreHead(),
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
        )
        self._scorer = HfScore(HfScoreConfig(), setup)
        self._here.set()

    async def begin_step(self, expected_samples: int, purpose: Purpose = Purpose.TRAINING) -> None:
        self._counters[purpose].begin_step(expected_samples)

    async def score_samples(
        self, samples: list[Sample], purpose: Purpose = Purpose.TRAINING
    ) -> list[Scored]:
        """Score all samples, with as few forward passes as `max_tokens_per_microbatch` allows. Wait
        while the model is not on its device.

        Raises:
            RewardError: the share of scores that are not finite exceeds `max_error_rate`.
            WaitTimeoutError: with the model on its device, a pass took longer than `PASS_S`.
        """
        counters = self._counters[purpose]
        budget = counters.opened()
        clock = asyncio.get_running_loop().time
        arrived_s = clock()
        begun_s, scores = await self._scores_here(await fetched(samples))
        counters.took(begun_s - arrived_s, clock() - begun_s, len(samples))
        scored = []
        for sample, score in zip(samples, scores, strict=True):
            if math.isfinite(score):
                one = Scored(Reward(score))
            else:
                path = self.config.model.path if self.config.model else ""
                line = f"{path} scores it as {score}; is the model sound in this dtype?"
                one = counters.failed(sample, budget, line, line)
            counters.count(one, budget)
            scored.append(one)
        return scored

    async def take_metrics(self, purpose: Purpose = Purpose.TRAINING) -> Metrics:
        return self._counters[purpose].take_metrics()

    @dispatch(BROADCAST)
    async def offload(self) -> None:
        """Move the model off its device after the current pass. Samples then wait until
        `onload`."""
        self._here.clear()
        async with self._turn:
            assert self._scorer is not None
            await asyncio.to_thread(self._scorer.offload)

    @dispatch(BROADCAST)
    async def onload(self) -> None:
        """Move the model back to its device; samples that waited are scored then."""
        async with self._turn:
            assert self._scorer is not None
            await asyncio.to_thread(self._scorer.onload)
        self._here.set()

    def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        """Score a single sample. The pipeline calls `score_samples` instead, with many samples."""
        return Reward(self._scores([sample])[0])

    async def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        await super().close()

    async def _scores_here(self, samples: list[Sample]) -> tuple[float, list[float]]:
        """Wait for the model to be on its device, and for its turn; return the time at which that
        was, on the clock of the event loop, and the model's scores."""
        while True:
            await self._here.wait()
            async with self._turn:
                if self._here.is_set():  # `offload` may have held the lock meanwhile
                    begun_s = asyncio.get_running_loop().time()
                    return begun_s, await self._scores_in_time(samples)

    async def _scores_in_time(self, samples: list[Sample]) -> list[float]:
        """Return the model's scores; WaitTimeoutError if no micro-batch ends within `pass_s`. The
        time for which samples wait for the device, or for their turn, does not count."""
        assert self._scorer is not None
        scoring = asyncio.ensure_future(asyncio.to_thread(self._scores, samples))
        while not scoring.done():
            before = self._scorer.passes
            await asyncio.wait({scoring}, timeout=self.pass_s)
            if not scoring.done() and self._scorer.passes == before:
                raise WaitTimeoutError(
                    f"reward {self.ctx.name!r}: {self.spec.name} scores {len(samples)} samples, "
                    f"and its model has done nothing for {self.pass_s:g} s; its device may hang"
                )
        return scoring.result()

    def _scores(self, samples: list[Sample]) -> list[float]:
        """Return the model's score at the last token of each sample, prompt included; ValueError
        before `start`."""
        if self._scorer is None:
            raise ValueError(f"reward {self.ctx.name!r}: call start first")
        rows = [torch.tensor([*s.prompt.tokens, *s.completion.tokens]) for s in samples]
        lengths_B = torch.tensor([len(row) for row in rows])
        tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        pictures = [sample.prompt.pictures for sample in samples]
        batch = TokenBatch(
            tokens=tokens_BT, lengths=lengths_B, pictures=pictures if any(pictures) else None
        )
        scored = self._scorer.score(batch)
        scores: list[float] = scored.scores_BT[torch.arange(len(rows)), lengths_B - 1].tolist()
        return scores
