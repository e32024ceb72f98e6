"""Training of reward models: the better of two responses shall get the higher score."""

from __future__ import annotations

from collections.abc import Sequence

from roll.algorithms.loss_interface import ScoreTerms
from roll.algorithms.losses.ranking import BradleyTerryLoss
from roll.config.algorithm import Aggregation
from roll.config.offline import RewardModelConfig
from roll.core.batches import PreferenceBatch
from roll.data.collate import scored_pair_batch
from roll.data.examples import Example
from roll.pipeline.offline import OfflinePipeline
from roll.strategy.training.heads import ScoreHead
from roll.workers.learner import LearnerWorker

ScoreLearner = LearnerWorker[ScoreTerms, PreferenceBatch]


class RewardModelPipeline(OfflinePipeline[RewardModelConfig, PreferenceBatch, ScoreLearner]):
    """Pipeline that minimises -log s(score chosen - score rejected - margin); s is the logistic
    function."""

    config_class = RewardModelConfig

    aggregation = Aggregation.SEQUENCE_MEAN

    def open(self) -> None:
        """Start the cluster that trains the reward model."""
        self.start_learner(LearnerWorker, ScoreHead(), BradleyTerryLoss(self.config.loss))

    def make_batch(self, examples: Sequence[Example]) -> PreferenceBatch:
        return scored_pair_batch(examples)
