"""Distillation on given texts: train a student to predict each token as its teacher does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.distill import DistillLoss
from roll.algorithms.teacher_divergence import comparison
from roll.config.algorithm import Aggregation
from roll.config.offline import DistillationConfig
from roll.core.batches import TrainBatch
from roll.data.collate import text_batch
from roll.data.examples import Example
from roll.models.vocabulary import num_tokens
from roll.pipeline.offline import OfflinePipeline
from roll.runtime.run_data import RunData, check_tags
from roll.runtime.teachers import Teachers, check_others, other_tokens, start_teacher
from roll.strategy.training.heads import PolicyHead
from roll.workers.learner import LearnerWorker

Student = LearnerWorker[PolicyTerms, TrainBatch]


class DistillPipeline(OfflinePipeline[DistillationConfig, TrainBatch, Student]):
    """Pipeline that minimises a divergence between the student's and the teacher's distribution of
    each token."""

    config_class = DistillationConfig

    @classmethod
    def prepare(cls, config: DistillationConfig) -> tuple[DistillationConfig, RunData[Example]]:
        """Load the rows, and check that each has a teacher with the student's tokens; see
        `Pipeline.prepare`.

        Raises:
            CheckpointError, ConfigError, DataError: see `load_offline`, `check_others` and
                `check_tags`.
        """
        config, data = super().prepare(config)
        check_others(config, data.tokenizer, config.loss, "loss", config.data)
        for rows in (data.train, data.held_out):
            check_tags(rows, "teacher", config.teachers.values())
        return config, data

    def open(self) -> None:
        """Start the student and then the teachers; students of hidden states get the teachers'
        heads."""
        config, loss, tokenizer = self.config, self.config.loss, self.data.tokenizer
        self.aggregation = Aggregation(config.aggregation)
        compared = comparison(loss, num_tokens(tokenizer))
        head = PolicyHead(1.0, config.actor_train.logprob_chunk_tokens, compared)
        self.start_learner(LearnerWorker, head, DistillLoss(loss))
        others = other_tokens(config.teachers, loss, tokenizer, config.data)
        clusters = {
            name: self.sharing.share(
                f"teachers.{name}",
                start_teacher(
                    name,
                    role,
                    self.launcher,
                    target=loss,
                    tokenizer=others[name].teacher if name in others else tokenizer,
                    seed=config.seed,
                ),
            )
            for name, role in config.teachers.items()
        }
        self.teachers = Teachers(config.teachers, clusters, self.sharing.colocation, others)
        if loss.top_k is None:
            self.teachers.introduce(self.learner)

    def make_batch(self, examples: Sequence[Example]) -> TrainBatch:
        """Return the rows with `teacher_outputs`: for each row the address of its teacher's output.
        The outputs themselves never pass through the driver."""
        batch = text_batch(examples)
        with self.timers.timed("teach"):
            teacher_outputs = self.teachers.outputs(batch, [example.tag for example in examples])
        return replace(batch, teacher_outputs=teacher_outputs)
