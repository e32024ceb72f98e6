"""`ModelReward`: the score that a reward model gives a whole response."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch

from roll.config.reward import RewardConfig
from roll.config.strategy import HfScoreConfig
from roll.core.batches import TokenBatch
from roll.core.errors import RewardError
from roll.core.metrics import Mean, Metrics
from roll.core.types import Sample, WorkerSpec
from roll.rewards.api import Reward, RewardContext
from roll.rewards.pool import Scored
from roll.strategy.heads import ScoreHead
from roll.strategy.hf.score import HfScore
from roll.strategy.setup import ModelSetup
from roll.workers.reward import RewardWorker


class ModelReward(RewardWorker):
    """Hosts a sequence classifier with one label (`model` in the config).

    It reads the policy's own tokens, prompt and response, so it must have the policy's tokenizer.
    A response counts as it ends: the score is that of its last token.
    """

    def __init__(self, spec: WorkerSpec, name: str, config: RewardConfig) -> None:
        super().__init__(spec, name, config)
        self._scorer: HfScore[Any] | None = None
        self._seen = Mean(0.0, 0.0)
        # One forward pass at a time: calls come from an event loop, passes run in a thread.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model."""
        assert self.config.model is not None
        setup = ModelSetup(
            spec=self.spec,
            model=self.config.model,
            head=ScoreHead(),
            max_tokens_per_microbatch=self.config.max_tokens_per_microbatch,
        )
        self._scorer = HfScore(HfScoreConfig(), setup)

    async def begin_step(self, expected_samples: int) -> None:
        """There is no failure budget: a model that cannot score ends the run."""

    async def score_samples(self, samples: list[Sample]) -> list[Scored]:
        """All in as few passes as their tokens allow.

        Raises:
            RewardError: the model gives a score that is no number.
        """
        async with self._turn:
            scores = await asyncio.to_thread(self._scores, samples)
        for sample, score in zip(samples, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(
                    f"reward {self.ctx.name!r}: {self._path} scores sample {sample.id} as "
                    f"{score}; is the model sound in this dtype?"
                )
            self._seen = self._seen.merge(Mean(score))
        return [Scored(Reward(score)) for score in scores]

    async def take_metrics(self) -> Metrics:
        seen, self._seen = self._seen, Mean(0.0, 0.0)
        return Metrics({f"reward/{self.ctx.name}/mean": seen} if seen.weight else {})

    def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        """One sample by itself; the pipeline asks for many at once."""
        return Reward(self._scores([sample])[0])

    async def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        await super().close()

    @property
    def _path(self) -> str:
        return self.config.model.path if self.config.model else ""

    def _scores(self, samples: list[Sample]) -> list[float]:
        if self._scorer is None:
            raise ValueError(f"reward {self.ctx.name!r}: call start first")
        rows = [torch.tensor([*s.prompt.tokens, *s.completion.tokens]) for s in samples]
        lengths_B = torch.tensor([len(row) for row in rows])
        tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        scored = self._scorer.score(TokenBatch(tokens=tokens_BT, lengths=lengths_B))
        scores: list[float] = scored.scores_BT[torch.arange(len(rows)), lengths_B - 1].tolist()
        return scores
