"""A step's samples: wait for engines and rewards, and write some down for reading."""

from __future__ import annotations

from pathlib import Path

from roll.config.rlvr import RlvrConfig
from roll.core.batches import RolloutBatch
from roll.core.metrics import Last, Metrics
from roll.core.timing import Timers
from roll.pipeline.updates import dump_rollouts
from roll.rollout.assemble import assemble, rollout_metrics
from roll.runtime.run_data import samples_by_tag
from roll.runtime.runtime import Runtime


def collect(
    runtime: Runtime, config: RlvrConfig, step: int, version: int, timers: Timers
) -> tuple[RolloutBatch, Metrics]:
    """The samples of a step, which engines generate and rewards judge.

    Args:
        version: of the weights that are trained next.
    """
    runtime.reward_router.begin_step(samples_by_tag(runtime.tag_shares, config.samples_per_step))
    with timers.timed("rollout"):
        runtime.inference.take_devices()
        result = runtime.inference.run(runtime.scheduler.collect(step))
    stats, groups = result.stats, result.groups
    timers.add("generate", stats.generate_s)
    timers.add("reward", stats.reward_s)
    every = config.track.rollouts_every
    if every is not None and step % every == 0:
        path = Path(config.output_dir) / "rollouts" / f"step_{step:06d}.jsonl"
        dump_rollouts(path, groups, limit=config.track.rollouts_samples, read=runtime.read)
    metrics = rollout_metrics(groups, current_version=version)
    metrics = metrics | stats.metrics() | runtime.inference.fleet.take_metrics()
    rate = stats.generated_tokens / max(stats.elapsed_s, 1e-9)
    weights = {name: reward.weight for name, reward in config.rewards.items()}
    return assemble(groups, weights), metrics | {"perf/generated_tokens_per_s": Last(rate)}
