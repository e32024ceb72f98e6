"""Reinforcement learning from verifiable rewards: GRPO, REINFORCE, ... by config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.algorithms.compose import build_advantage, build_loss
from roll.algorithms.correction import correct, use_engine_logprobs
from roll.algorithms.losses.value import explained_variance
from roll.algorithms.mismatch import mismatch_metrics, teacher_metrics
from roll.algorithms.shaping.compose import build_shaping
from roll.config.algorithm import Aggregation, Need
from roll.config.rlvr import RlvrConfig
from roll.config.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.loop_thread import LoopThread
from roll.core.metrics import Last, Max, Metrics
from roll.core.types import Prompt
from roll.distributed.cluster import Cluster, Launcher
from roll.pipeline.base import Pipeline
from roll.pipeline.cast import Cast, open_cast
from roll.pipeline.checkpoint import RunState, require_written, write_folder
from roll.pipeline.data import RunData, load_data, samples_by_tag
from roll.pipeline.folder import exported_file, mark_export
from roll.pipeline.steps import advantage_metrics, dump_rollouts, updates
from roll.pipeline.teachers import require_same_tokens, teacher_logprobs
from roll.rollout.assemble import assemble, rollout_metrics
from roll.workers.actor import ActorWorker
from roll.workers.critic import CriticWorker
from roll.workers.model import TrainWorker
from roll.workers.reference import ReferenceWorker


class RlvrPipeline(Pipeline[RlvrConfig]):
    """One file, one algorithm box: collect, score, weigh, train, sync."""

    cast: Cast

    def __init__(
        self,
        config: RlvrConfig,
        launcher: Launcher,
        loop: LoopThread,
        *,
        platform: str,
        data: RunData[Prompt],
    ) -> None:
        super().__init__(config, launcher, loop, platform=platform, data=data)
        self.data = data
        self.advantage = build_advantage(config.algorithm)
        self.loss = build_loss(config.algorithm)
        self.shaping = build_shaping(
            config.algorithm, max_new_tokens=config.sampling.max_new_tokens
        )
        self.version = 0

    @classmethod
    def prepare(cls, config: RlvrConfig) -> tuple[RlvrConfig, RunData[Prompt]]:
        return config, load_data(config)

    def open(self) -> None:
        others = ("teachers.", "rewards.")
        require_same_tokens(
            self.config.train_model,
            {key: model for key, model in self.config.models.items() if key.startswith(others)},
        )
        self.cast = open_cast(
            self.config, self.launcher, self.loop, self.data, platform=self.platform
        )

    def step(self, step: int) -> Metrics:
        batch, metrics = self.collect_rollouts(step)
        with self.cast.serving.trainer_busy():
            metrics = metrics | self.learn(batch, step)
        return metrics | self.cast.scorer.take_rates() | self.memory()

    def learn(self, batch: RolloutBatch, step: int) -> Metrics:
        """From a step's samples to the next weights, in the engines too."""
        batch = self.add_values(self.add_logprobs(batch))
        batch, metrics = self.shaping.add_advantages(batch, self.advantage)
        metrics = metrics | teacher_metrics(batch)
        if self.config.scores_old_logprobs:
            metrics = metrics | mismatch_metrics(batch)
        if self.config.algorithm.correction is not None:
            batch, corrected = correct(batch, self.config.algorithm.correction)
            metrics = metrics | corrected
        metrics = metrics | self.train(batch, step)
        self.sync_weights(step + 1, verify=self.config.track.verify_weights == "always")
        return metrics

    def collect_rollouts(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """Wait for a step's groups, which engines generate and rewards judge."""
        config, cast = self.config, self.cast
        cast.scorer.begin_step(samples_by_tag(cast.tag_shares, config.samples_per_step))
        with self.timers.timed("rollout"):
            cast.serving.take_devices()
            result = cast.serving.run(cast.scheduler.collect(step))
        self.timers.add("generate", result.stats.generate_s)
        self.timers.add("reward", result.stats.reward_s)
        every = config.track.rollouts_every
        if every is not None and step % every == 0:
            path = self.output_dir / "rollouts" / f"step_{step:06d}.jsonl"
            dump_rollouts(path, result.groups, limit=config.track.rollouts_samples)
        rate = result.stats.generated_tokens / max(result.stats.elapsed_s, 1e-9)
        metrics = rollout_metrics(result.groups, current_version=self.version)
        metrics = metrics | result.stats.metrics() | cast.serving.fleet.take_metrics()
        weights = {name: reward.weight for name, reward in config.rewards.items()}
        metrics = metrics | {"perf/generated_tokens_per_s": Last(rate)}
        return assemble(result.groups, weights), metrics

    def add_logprobs(self, batch: RolloutBatch) -> RolloutBatch:
        """The reference's and, where updates need it, the policy's own; without gradients."""
        cast = self.cast
        with self.timers.timed("logprob"):
            if cast.reference is not None:
                with cast.colocation.use(Role.REFERENCE):
                    scored = cast.reference.call(ReferenceWorker.add_ref_logprobs, batch)
                batch = replace(batch, ref_logprobs=scored.ref_logprobs)
            elif Need.REFERENCE in self.config.algorithm.needs:  # of an adapter: its base
                with cast.colocation.use(Role.ACTOR_TRAIN):
                    scored = cast.actor.call(ActorWorker.add_base_logprobs, batch)
                batch = replace(batch, ref_logprobs=scored.ref_logprobs)
            if self.config.scores_old_logprobs:
                with cast.colocation.use(Role.ACTOR_TRAIN):
                    scored = cast.actor.call(ActorWorker.add_old_logprobs, batch)
                batch = replace(batch, old_logprobs=scored.old_logprobs)
            if cast.teachers:
                batch = replace(batch, teacher_logprobs=self.teach(batch))
        if self.config.algorithm.old_logprobs == "rollout":
            batch = use_engine_logprobs(batch)
        return batch

    def teach(self, batch: RolloutBatch) -> Tensor:
        """Log-probs of each row by the teacher of its tag."""
        cast = self.cast

        def score(name: str, rows: RolloutBatch) -> Tensor:
            with cast.colocation.use(f"teachers.{name}"):
                scored = cast.teachers[name].call(ReferenceWorker.add_ref_logprobs, rows)
            return scored.require("ref_logprobs", made_by=name)

        ranks = {name: cluster.dp_size for name, cluster in cast.teachers.items()}
        return teacher_logprobs(batch, self.config.teachers, ranks, score)

    def add_values(self, batch: RolloutBatch) -> RolloutBatch:
        """What the critic, where there is one, expected of each token's state."""
        cast = self.cast
        if cast.critic is None:
            return batch
        with cast.colocation.use(Role.CRITIC), self.timers.timed("values"):
            scored = cast.critic.call(CriticWorker.add_values, batch)
        return replace(batch, values=scored.values)

    def train(self, batch: RolloutBatch, step: int) -> Metrics:
        """All optimizer steps on the samples of a step; while a critic warms up, only its own."""
        critic, metrics = self.config.critic, Metrics()
        tokens = 0
        with self.timers.timed("train"):
            if self.cast.critic is not None:
                metrics = metrics | self.train_critic(batch, self.cast.critic)
            if critic is None or step >= critic.warmup_steps:
                metrics = metrics | self.train_actor(batch)
                tokens = int(batch.lengths.sum()) * self.config.actor_train.epochs
        rate = tokens / max(self.timers.seconds("train"), 1e-9)
        return metrics | {"perf/trained_tokens_per_s": Last(rate)}

    def train_actor(self, batch: RolloutBatch) -> Metrics:
        config, actor = self.config, self.cast.actor
        aggregation = config.algorithm.aggregation
        longest = config.algorithm.aggregation_tokens or config.sampling.max_new_tokens
        parts = []
        with self.cast.colocation.use(Role.ACTOR_TRAIN):
            for _ in range(config.actor_train.epochs):
                for update in updates(
                    batch,
                    num_updates=config.updates_per_pass(),
                    ranks=actor.dp_size,
                    aggregation=aggregation,
                    aggregation_tokens=longest,
                    prepare=self.loss.prepare,
                ):
                    trained = actor.call(ActorWorker.train, update)
                    parts.append(trained | advantage_metrics(update))
        return Metrics.concat(parts)

    def train_critic(self, batch: RolloutBatch, critic: Cluster[CriticWorker]) -> Metrics:
        """Every token's value counts the same, whatever the policy's aggregation."""
        config, parts = self.config, []
        alike = replace(batch, sample_weights=None)
        with self.cast.colocation.use(Role.CRITIC):
            for _ in range(config.trained[Role.CRITIC].epochs):
                for update in updates(
                    alike,
                    num_updates=config.updates_per_pass(Role.CRITIC),
                    ranks=critic.dp_size,
                    aggregation=Aggregation.TOKEN_MEAN,
                ):
                    parts.append(critic.call(CriticWorker.train, update))
        metrics = Metrics.concat(parts)
        explained = explained_variance(metrics.values_by_name())
        return metrics.prefixed("critic") | {"critic/value/explained_variance": Last(explained)}

    def sync_weights(self, version: int, *, verify: bool) -> None:
        """Trained weights to every engine; tokens from now on carry `version`."""
        with (
            self.cast.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
            self.timers.timed("weight_sync"),
        ):
            self.cast.serving.update_weights(version, verify=verify)
        self.version = version

    def memory(self) -> Metrics:
        """Resident memory of the worker that has the most, children included."""
        return Metrics({"memory/rss_gb_max": Max(self.cast.memory_gb())})

    def validate(self, step: int) -> dict[str, float]:
        if not self.config.validation.due(step, last=self.config.max_steps):
            return {}
        with self.timers.timed("validate"):
            self.cast.serving.take_devices()
            scores = self.cast.serving.run(self.cast.validator.run(step))
        self.cast.scorer.take_rates()  # belong to no training step
        return {**scores, **self.timers.take().values_by_name()}

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        if checkpoint is not None and state is not None:
            self.cast.prompts.restore(state.sampler["position"], self.cast.find_prompt)
            self.cast.scheduler.restore(state.sampler["scheduler"], self.cast.find_prompt)
            self.shaping.load(state.sampler.get("shaping", {}))
            for role, cluster in self.learners():
                with self.cast.colocation.use(role):
                    cluster.call(TrainWorker.load, checkpoint / role)
        # Also at the very start: a sync that cannot work should fail before the first rollout.
        verify = self.config.track.verify_weights != "never"
        with self.cast.serving.trainer_busy():
            self.sync_weights(state.step if state else 0, verify=verify)
        self.timers.take()

    def save(self, folder: Path) -> None:
        for role, cluster in self.learners():
            with self.cast.serving.trainer_busy(), self.cast.colocation.use(role):
                cluster.call(TrainWorker.save, folder / role)
            require_written(folder / role / "meta.json")

    def learners(self) -> list[tuple[Role, Cluster[Any]]]:
        """The clusters whose models learn."""
        found: list[tuple[Role, Cluster[Any]]] = [(Role.ACTOR_TRAIN, self.cast.actor)]
        if self.cast.critic is not None:
            found.append((Role.CRITIC, self.cast.critic))
        return found

    def export(self, step: int) -> None:
        def write(path: Path) -> None:
            self.cast.actor.call(ActorWorker.save_hf, path)
            require_written(path / exported_file(self.config.train_model))
            mark_export(path, step)

        with self.cast.serving.trainer_busy(), self.cast.colocation.use(Role.ACTOR_TRAIN):
            write_folder(self.output_dir / "hf", write)

    def sampler_state(self) -> dict[str, Any]:
        async def on_loop() -> dict[str, Any]:  # where groups end at any time
            return {
                "position": self.cast.prompts.state(),
                "scheduler": self.cast.scheduler.state(),
            }

        return {**self.cast.serving.run(on_loop()), "shaping": self.shaping.state()}

    def close(self) -> None:
        self.cast.close()
