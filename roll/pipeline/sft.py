"""Supervised fine-tuning: imitate given responses, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.text import TextLoss
from roll.config.algorithm import Aggregation
from roll.config.offline import SftConfig
from roll.core.batches import TrainBatch
from roll.data.collate import text_batch
from roll.data.examples import Example
from roll.pipeline.offline import OfflinePipeline
from roll.strategy.training.heads import PolicyHead
from roll.workers.learner import LearnerWorker

TextLearner = LearnerWorker[PolicyTerms, TrainBatch]


class SftPipeline(OfflinePipeline[SftConfig, TrainBatch, TextLearner]):
    """Pipeline that minimises -log p(token | tokens before it) over the tokens of responses."""

    config_class = SftConfig

    def open(self) -> None:
        """Start the cluster that trains the model."""
        self.aggregation = Aggregation(self.config.aggregation)
        head = PolicyHead(1.0, self.config.actor_train.logprob_chunk_tokens)
        self.start_learner(LearnerWorker, head, TextLoss())

    def make_batch(self, examples: Sequence[Example]) -> TrainBatch:
        return text_batch(examples)
