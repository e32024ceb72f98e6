"""Reinforcement learning from verifiable rewards: GRPO, REINFORCE, ... by config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from roll.algorithms.build import build_advantage, build_loss
from roll.algorithms.correction import correct, use_engine_logprobs
from roll.algorithms.implicit.rewards import implicit_metrics
from roll.algorithms.losses.value import explained_variance
from roll.algorithms.mismatch import mismatch_metrics, teacher_metrics
from roll.algorithms.shaping.build import build_shaping
from roll.config.agentic_base import AgenticBase
from roll.config.algorithm import Aggregation
from roll.config.rlvr import RlvrConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.metrics import Last, Metrics
from roll.core.sample_table import SampleTable
from roll.core.types import Prompt
from roll.data.chat.answers import Answers, check_answered
from roll.data.chat.templates import DatedTokenizer
from roll.distributed.cluster import Cluster
from roll.output_dir.checkpoints import RunState, load_sampler
from roll.pipeline.base import Pipeline
from roll.pipeline.batch_scoring import (
    add_implicit_rewards,
    add_logprobs,
    add_sample_logprobs,
    add_teacher_outputs,
    add_values,
)
from roll.pipeline.collect import collect
from roll.pipeline.updates import updates
from roll.rollout.dense import dense
from roll.rollout.rows import JoinedRows, with_rows_of_branches
from roll.runtime.rollouts.replay import load_replay
from roll.runtime.run_data import RunData, load_data
from roll.runtime.runtime import Runtime, start_runtime
from roll.runtime.teachers import check_others
from roll.workers.actor import ActorWorker
from roll.workers.estimators.critic import CriticWorker
from roll.workers.estimators.process_reward import ProcessRewardWorker


class RlvrPipeline(Pipeline[RlvrBase]):
    """Pipeline for reinforcement learning. One step collects samples, scores them, computes
    advantages, trains, and pushes the new weights to the engines."""

    config_class: ClassVar[type[RunConfig]] = RlvrConfig

    data: RunData[Prompt]
    runtime: Runtime
    version = 0
    """Version of the weights that the engines have: the number of steps done."""
    answers: Answers | None = None
    """Function that returns the tokens of the data set's answers; None if nothing trains on
    them."""
    needs_tokens: bool
    """True if the algorithm computes with single tokens of all samples, which the driver then
    needs."""

    @classmethod
    def prepare(cls, config: RlvrBase) -> tuple[RlvrBase, RunData[Prompt]]:
        """Load the prompts, and check tags, teachers and reward models; see `Pipeline.prepare`.

        Raises:
            CheckpointError, ConfigError, DataError: see `load_data`, `load_replay` and
                `check_others`.
        """
        data = load_data(config) if config.generates else load_replay(config)
        if config.algorithm.trains_answers:
            places = (report.unanswered for report in data.train.report)
            check_answered(data.train.in_memory, places)
        target = config.algorithm.distill_target
        check_others(config, data.tokenizer, target, "algorithm.loss (distill)", config.data)
        return config, data

    def open(self) -> None:
        """Build advantage, loss and shaping from the config, and start all clusters as
        `runtime`."""
        config = self.config
        self.advantage = build_advantage(config.algorithm)
        self.loss = build_loss(config.algorithm)
        self.shaping = build_shaping(
            config.algorithm,
            max_new_tokens=config.max_response_tokens,
            domains=config.domains,
            episodes=isinstance(config, AgenticBase),
        )
        self.needs_tokens = (
            self.shaping.needs_tokens(self.advantage)
            or self.loss.needs_update
            or config.critic is not None
            or config.algorithm.correction is not None
            or config.algorithm.old_logprobs == "rollout"
            or bool(config.teachers)
            or config.has_step_rewards
        )
        if config.algorithm.trains_answers:
            dated = DatedTokenizer(self.data.tokenizer, self.data.rendered_at)
            self.answers = Answers.of(dated, config.data, config.max_response_tokens_of)
        self.runtime = start_runtime(
            config, self.launcher, self.loop, self.data, platform=self.platform
        )

    def step(self, step: int) -> Metrics:
        """Collect the samples of a step, learn from them, and push the new weights to the engines;
        return the metrics."""
        runtime = self.runtime
        table, metrics = collect(
            runtime.rollouts,
            runtime.keeper,
            self.config,
            step,
            self.version,
            self.timers,
            read=runtime.read,
            answer=self.answers,
        )
        with runtime.rollouts.trainer_busy():
            metrics = metrics | self.learn(table, step)
        if runtime.keeper is not None:
            metrics = metrics | runtime.keeper.take_metrics()
        return metrics | runtime.rollouts.take_rates()

    def learn(self, table: SampleTable, step: int) -> Metrics:
        """Do all of a step that follows `collect`; return the metrics of these parts.

        Samples get log-probs and advantages, critic and policy train, and the engines get the new
        weights, version `step + 1`. Call this method inside `trainer_busy`.
        """
        learn = self.learn_from_tokens if self.needs_tokens else self.learn_from_samples
        with self.runtime.colocation.renewing(Role.ACTOR_INFER):
            metrics = learn(table, step)
        self.sync_weights(step + 1, verify=self.config.track.verify_weights == "always")
        return metrics

    def learn_from_samples(self, table: SampleTable, step: int) -> Metrics:
        """Do the part of a step between `collect` and the push of weights, for algorithms that give
        all tokens of a sample the same advantage; return its metrics.

        The tokens stay with the workers: the driver has numbers of whole samples only.
        """
        table, metrics = self.shaping.add_advantages(table, self.advantage)
        table = self.loss.choose(table)
        table = with_rows_of_branches(table, self._rows_multiple())
        with self.timers.timed("logprob"):
            table, seen = add_sample_logprobs(table, self.config, self.runtime)
        return metrics | seen | self.train(table, step)

    def learn_from_tokens(self, table: SampleTable, step: int) -> Metrics:
        """Do the part of a step between `collect` and the push of weights, for algorithms that
        compute with single tokens; return its metrics.

        All tokens come to the driver. The reference, the teachers, the critic and the process
        reward, as far as there are any, score the batch, and the process reward trains; advantages
        and corrections are computed; critic and policy train.
        """
        config, runtime = self.config, self.runtime
        rows = with_rows_of_branches(table, self._rows_multiple())
        batch = dense(rows)
        with self.timers.timed("logprob"):
            batch = add_teacher_outputs(add_logprobs(batch, config, runtime), config, runtime)
        if config.algorithm.old_logprobs == "rollout":
            batch = use_engine_logprobs(batch)
        if runtime.critic is not None:
            with self.timers.timed("values"):
                batch = add_values(batch, runtime.critic, runtime.colocation)
        batch, learned = self.learn_implicit_rewards(batch)
        if table.branches is None:
            batch, metrics = self.shaping.add_advantages(batch, self.advantage)
        else:  # an estimator sees each episode as one row
            joined = JoinedRows.of(table, rows)
            samples, metrics = self.shaping.add_advantages(joined.join(batch), self.advantage)
            batch = joined.part(samples, batch)
        batch = self.loss.choose(batch)
        metrics = metrics | learned | teacher_metrics(batch)
        if config.scores_old_logprobs:
            metrics = metrics | mismatch_metrics(batch)
        # No update reads them.
        batch = replace(
            batch, step_rewards=None, step_ends=None, squared_probs=None, implicit_rewards=None
        )
        if config.algorithm.correction is not None:
            batch, corrected = correct(batch, config.algorithm.correction)
            metrics = metrics | corrected
        return metrics | self.train(batch, step)

    def _rows_multiple(self) -> int:
        """Return the number that must divide the rows of a step: all ranks score and train equally
        many of them."""
        reference = self.runtime.reference
        trained = [
            self.config.updates_per_pass(role) * cluster.dp_size
            for role, cluster in self.learners().items()
        ]
        return math.lcm(*trained, 1 if reference is None else reference.dp_size)

    def train(self, batch: RolloutBatch | SampleTable, step: int) -> Metrics:
        """Do all optimizer steps on the samples of a step: first those of the critic, if there is
        one, then those of the policy. During `critic.warmup_steps` only the critic trains."""
        critic, metrics, tokens = self.config.critic, Metrics(), 0
        with self.timers.timed("train"):
            if critic is not None:
                assert isinstance(batch, RolloutBatch), "a critic has values of single tokens"
                metrics = self.train_critic(batch)
            if critic is None or step >= critic.warmup_steps:
                metrics = metrics | self.train_actor(batch, self.config.progress(step))
                self.move_reference(step)
                tokens = int(batch.lengths.sum()) * self.config.actor_train.epochs
        rate = tokens / max(self.timers.seconds("train"), 1e-9)
        return metrics | {"perf/trained_tokens_per_s": Last(rate)}

    def train_actor(self, batch: RolloutBatch | SampleTable, progress: float) -> Metrics:
        """Do the policy's optimizer steps on the samples of a step, one call for each of them.

        Args:
            progress: part of the run that is done, on which factors of the loss can depend.
        """
        actor = self.runtime.actor
        with self.runtime.colocation.use(Role.ACTOR_TRAIN):
            parts = [
                actor.call(ActorWorker.train, update, progress) for update in self._updates(batch)
            ]
        coefs = self.loss.at(progress).changing_coefs()
        return Metrics.concat(parts) | {name: Last(coef) for name, coef in coefs.items()}

    def move_reference(self, step: int) -> None:
        """Move a reference that follows the policy, after the steps in which it is due."""
        follow = self.config.follow
        if follow is not None and (step + 1) % follow.every == 0:
            with self.runtime.colocation.use(Role.ACTOR_TRAIN):
                self.runtime.actor.call(ActorWorker.move_reference, follow.decay)

    def _updates(self, batch: RolloutBatch | SampleTable) -> Iterator[RolloutBatch | SampleTable]:
        """Return an iterator over one batch for each optimizer step of the policy, in all of its
        passes (`epochs`) over the samples.

        Each batch has `token_weights` and, with tokens, what the loss prepares. Its rows are
        ordered so that the ranks get about equally many tokens.
        """
        algorithm = self.config.algorithm
        settings: dict[str, Any] = {
            "epochs": self.config.actor_train.epochs,
            "num_updates": self.config.updates_per_pass(),
            "ranks": self.runtime.actor.dp_size,
            "aggregation": algorithm.aggregation,
            "aggregation_tokens": (algorithm.aggregation_tokens or self.config.max_response_tokens),
        }
        if isinstance(batch, SampleTable):
            return updates(batch, **settings)
        return updates(batch, prepare=self.loss.prepare, **settings)

    def train_critic(self, batch: RolloutBatch) -> Metrics:
        """Do the critic's optimizer steps; return their metrics as `critic/...`. The value of every
        token counts the same, whatever the aggregation of the policy's loss."""
        critic = self.learners()[Role.CRITIC]
        with self.runtime.colocation.use(Role.CRITIC):
            parts = [
                critic.call(CriticWorker.train, update)
                for update in self._updates_beside(batch, Role.CRITIC, Aggregation.TOKEN_MEAN)
            ]
        metrics = Metrics.concat(parts)
        explained = explained_variance(metrics.values_by_name())
        return metrics.prefixed("critic") | {"critic/value/explained_variance": Last(explained)}

    def learn_implicit_rewards(self, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
        """Train the process reward on the outcomes of the step and add its rewards of tokens, in
        the order that `process_reward.score` says; without that role, do nothing."""
        role, cluster = self.config.process_reward, self.runtime.process_reward
        if role is None or cluster is None:
            return batch, Metrics()
        colocation = self.runtime.colocation

        def scored() -> RolloutBatch:
            with self.timers.timed("values"):
                return add_implicit_rewards(batch, cluster, colocation, beta=role.beta)

        if role.score == "before_update":
            found, metrics = scored(), self.train_process_reward(batch)
        else:
            metrics, found = self.train_process_reward(batch), scored()
        return found, metrics | implicit_metrics(found)

    def train_process_reward(self, batch: RolloutBatch) -> Metrics:
        """Do the optimizer steps of the process reward; return their metrics as
        `process_reward/...`. Every response counts the same."""
        cluster = self.learners()[Role.PROCESS_REWARD]
        with self.timers.timed("train"), self.runtime.colocation.use(Role.PROCESS_REWARD):
            parts = [
                cluster.call(ProcessRewardWorker.train, update)
                for update in self._updates_beside(
                    batch, Role.PROCESS_REWARD, Aggregation.SEQUENCE_MEAN
                )
            ]
        return Metrics.concat(parts).prefixed("process_reward")

    def _updates_beside(
        self, batch: RolloutBatch, role: Role, aggregation: Aggregation
    ) -> Iterator[RolloutBatch]:
        """Return an iterator over one batch for each optimizer step of a role that learns beside
        the policy, in all of its passes over the samples."""
        return updates(
            replace(batch, sample_weights=None, teacher_outputs=None),
            epochs=self.config.trained[role].epochs,
            num_updates=self.config.updates_per_pass(role),
            ranks=self.learners()[role].dp_size,
            aggregation=aggregation,
        )

    def sync_weights(self, version: int, *, verify: bool) -> None:
        """Push the trained weights to all engines of the policy, whose later tokens carry
        `version`, and to those opponents whose turn it is. Call this method inside
        `trainer_busy`."""
        with self.timers.timed("weight_sync"):
            self.runtime.rollouts.update_weights(version, verify=verify)
        self.version = version

    def validate(self, step: int) -> dict[str, float]:
        """Return the scores `val/...` and `time/validate_s` after `step` steps; empty if none is
        due. The engines generate with the weights that they have. See `Pipeline.validate`."""
        if not self.config.validation.due(step, last=self.config.max_steps):
            return {}
        with self.timers.timed("validate"):
            scores = self.runtime.rollouts.validate(step, lambda: self.wish.reason is not None)
        return {**scores, **self.timers.take().values_by_name()}

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """Restore data, groups that wait, shaping and models from a checkpoint, if there is one;
        then push the weights to the engines. CheckpointError if the checkpoint is of another
        run."""
        if checkpoint is not None and state is not None:
            sampler = load_sampler(checkpoint, state)
            self.runtime.rollouts.restore(sampler)
            self.shaping.load(sampler.get("shaping", {}))
            self.load(checkpoint)
        # Without a checkpoint too: a push that cannot work should fail before the first rollout.
        verify = self.config.track.verify_weights != "never"
        with self.runtime.rollouts.trainer_busy():
            self.sync_weights(state.step if state else 0, verify=verify)
        self.timers.take()

    def learners(self) -> dict[Role, Cluster[Any]]:
        runtime = self.runtime
        beside = {Role.CRITIC: runtime.critic, Role.PROCESS_REWARD: runtime.process_reward}
        found = {role: cluster for role, cluster in beside.items() if cluster is not None}
        return {Role.ACTOR_TRAIN: runtime.actor, **found}

    @contextmanager
    def exclusive_devices(self, role: Role) -> Iterator[None]:
        """Move a role onto its devices inside the block, in which no restarted replica gets weights
        (`Rollouts.trainer_busy`)."""
        with self.runtime.rollouts.trainer_busy(), self.runtime.colocation.use(role):
            yield

    def save(self, folder: Path) -> None:
        """See `Pipeline.save`. The samples of all steps before the checkpoint are in their files
        first, because a resumed run does not make them again."""
        if self.runtime.keeper is not None:
            self.runtime.keeper.settle()
        super().save(folder)

    def sampler_state(self) -> dict[str, Any]:
        return {**self.runtime.rollouts.state(), "shaping": self.shaping.state()}

    def close(self) -> None:
        self.runtime.close()
