"""Reinforcement learning from verifiable rewards: GRPO, REINFORCE, ... by config."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.algorithms.compose import build_advantage
from roll.algorithms.mismatch import mismatch_metrics
from roll.config.pipelines import RlvrConfig
from roll.config.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.metrics import Last, Max, Metrics
from roll.distributed.cluster import Launcher
from roll.pipeline.base import Pipeline
from roll.pipeline.cast import Cast, open_cast
from roll.pipeline.checkpoint import RunState, require_written, write_folder
from roll.pipeline.data import RunData, samples_by_tag
from roll.pipeline.folder import mark_export
from roll.pipeline.paths import absolute_paths
from roll.pipeline.steps import add_advantages, dump_rollouts, updates
from roll.rollout.assemble import assemble, rollout_metrics
from roll.workers.actor import ActorWorker
from roll.workers.reference import ReferenceWorker


class RlvrPipeline(Pipeline[RlvrConfig]):
    """One file, one algorithm box: collect, score, weigh, train, sync."""

    cast: Cast

    def __init__(
        self,
        config: RlvrConfig,
        launcher: Launcher,
        runner: asyncio.Runner,
        *,
        platform: str,
        data: RunData,
    ) -> None:
        super().__init__(absolute_paths(config), launcher, written=config)
        self.runner = runner
        self.platform = platform
        self.data = data
        self.advantage = build_advantage(config.algorithm)
        self.version = 0

    def open(self) -> None:
        self.cast = open_cast(self.config, self.launcher, self.data, platform=self.platform)

    def step(self, step: int) -> Metrics:
        batch, metrics = self.collect_rollouts(step)
        batch = self.add_logprobs(batch)
        batch = add_advantages(batch, self.advantage)
        if batch.old_logprobs is not None:
            metrics = metrics | mismatch_metrics(batch)
        metrics = metrics | self.train(batch)
        self.sync_weights(step + 1, verify=self.config.track.verify_weights == "always")
        return metrics | self.cast.scorer.take_rates() | self.memory()

    def collect_rollouts(self, step: int) -> tuple[RolloutBatch, Metrics]:
        """Generate and reward a step's groups, on the engines' current weights."""
        config, cast = self.config, self.cast
        cast.scorer.begin_step(samples_by_tag(cast.tag_shares, config.samples_per_step))
        with cast.colocation.use(Role.ACTOR_INFER), self.timers.timed("rollout"):
            result = self.runner.run(
                cast.scheduler.collect(config.data.prompts_per_step, step=step)
            )
        self.timers.add("generate", result.stats.generate_s)
        self.timers.add("reward", result.stats.reward_s)
        every = config.track.rollouts_every
        if every is not None and step % every == 0:
            path = self.output_dir / "rollouts" / f"step_{step:06d}.jsonl"
            dump_rollouts(path, result.groups, limit=config.track.rollouts_samples)
        rate = result.stats.generated_tokens / max(self.timers.seconds("rollout"), 1e-9)
        metrics = rollout_metrics(result.groups, current_version=self.version)
        metrics = metrics | result.stats.metrics()
        return assemble(result.groups), metrics | {"perf/generated_tokens_per_s": Last(rate)}

    def add_logprobs(self, batch: RolloutBatch) -> RolloutBatch:
        """The reference's and, where updates need it, the policy's own; without gradients."""
        cast = self.cast
        with self.timers.timed("logprob"):
            if cast.reference is not None:
                with cast.colocation.use(Role.REFERENCE):
                    scored = cast.reference.call(ReferenceWorker.add_ref_logprobs, batch)
                batch = replace(batch, ref_logprobs=scored.ref_logprobs)
            if self.config.scores_old_logprobs:
                with cast.colocation.use(Role.ACTOR_TRAIN):
                    scored = cast.actor.call(ActorWorker.add_old_logprobs, batch)
                batch = replace(batch, old_logprobs=scored.old_logprobs)
        return batch

    def train(self, batch: RolloutBatch) -> Metrics:
        """All optimizer steps on the samples of a step."""
        config, cast = self.config, self.cast
        parts: list[Metrics] = []
        with cast.colocation.use(Role.ACTOR_TRAIN), self.timers.timed("train"):
            for _ in range(config.actor_train.epochs):
                for update in updates(
                    batch,
                    num_updates=config.samples_per_step // config.samples_per_update,
                    ranks=cast.actor.dp_size,
                    aggregation=config.algorithm.aggregation,
                    aggregation_tokens=(
                        config.algorithm.aggregation_tokens or config.sampling.max_new_tokens
                    ),
                ):
                    parts.append(cast.actor.call(ActorWorker.train, update))
        tokens = int(batch.lengths.sum()) * config.actor_train.epochs
        rate = tokens / max(self.timers.seconds("train"), 1e-9)
        return Metrics.concat(parts) | {"perf/trained_tokens_per_s": Last(rate)}

    def sync_weights(self, version: int, *, verify: bool) -> None:
        """Trained weights to every engine; tokens from now on carry `version`."""
        with (
            self.cast.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
            self.timers.timed("weight_sync"),
        ):
            self.cast.push_weights(version, verify=verify)
        self.version = version

    def memory(self) -> Metrics:
        """Resident memory of the worker that has the most, children included."""
        return Metrics({"memory/rss_gb_max": Max(self.cast.memory_gb())})

    def validate(self, step: int) -> dict[str, float]:
        if not self.cast.validator.due(step, last=self.config.max_steps):
            return {}
        with self.cast.colocation.use(Role.ACTOR_INFER), self.timers.timed("validate"):
            scores = self.runner.run(self.cast.validator.run(step))
        self.cast.scorer.take_rates()  # belong to no training step
        return {**scores, **self.timers.take().values_by_name()}

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        if checkpoint is not None and state is not None:
            self.cast.prompts.restore(state.sampler["position"])
            self.cast.scheduler.restore(state.sampler["scheduler"], self.cast.find_prompt)
            with self.cast.colocation.use(Role.ACTOR_TRAIN):
                self.cast.actor.call(ActorWorker.load, checkpoint / "actor_train")
        # Also at the very start: a sync that cannot work should fail before the first rollout.
        verify = self.config.track.verify_weights != "never"
        self.sync_weights(state.step if state else 0, verify=verify)
        self.timers.take()

    def save(self, folder: Path) -> None:
        with self.cast.colocation.use(Role.ACTOR_TRAIN):
            self.cast.actor.call(ActorWorker.save, folder / "actor_train")
        require_written(folder / "actor_train" / "meta.json")

    def export(self, step: int) -> None:
        def write(path: Path) -> None:
            self.cast.actor.call(ActorWorker.save_hf, path)
            require_written(path / "config.json")
            mark_export(path, step)

        with self.cast.colocation.use(Role.ACTOR_TRAIN):
            write_folder(self.output_dir / "hf", write)

    def sampler_state(self) -> dict[str, Any]:
        return {"position": self.cast.prompts.state(), "scheduler": self.cast.scheduler.state()}
