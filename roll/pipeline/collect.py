"""Collection of a step's samples: has them generated or read, and writes a few samples down."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from roll.config.rlvr_base import RlvrBase
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.core.timing import Timers
from roll.core.types import Prompt
from roll.output_dir.sample_files import DUMPS
from roll.pipeline.outputs.rollout_files import dump_rollouts
from roll.rollout.assemble import assemble, rollout_metrics, with_answers
from roll.runtime.rollouts.stage import Rollouts
from roll.runtime.sample_keeper import SampleKeeper


def collect(
    rollouts: Rollouts,
    keeper: SampleKeeper | None,
    config: RlvrBase,
    step: int,
    version: int,
    timers: Timers,
    *,
    read: Callable[[Sequence[int]], str],
    answer: Callable[[Prompt], array[int]] | None = None,
) -> tuple[SampleTable, Metrics]:
    """Return the scored samples of a step. Write a few of them to `rollouts/` in the steps that
    `track.rollouts_every` selects, and have all of them kept if `track.samples` says so.

    Args:
        rollouts: makes or reads the samples.
        keeper: keeps whole samples; None: they are not kept.
        step: number of the step.
        version: version of the weights that this step trains; staleness is counted from it.
        timers: get the times spent on rollout, generation and rewards.
        read: function that decodes token ids to text, special tokens included.
        answer: function that returns the tokens of the data set's answer to a prompt; None: the
            samples get no answers.

    Returns:
        The samples, and the metrics of the rollout.
    """
    groups, metrics = rollouts.collect(step, timers)
    every = config.track.rollouts_every
    if every is not None and step % every == 0:
        path = Path(config.output_dir) / DUMPS / f"step_{step:06d}.jsonl"
        dump_rollouts(
            path,
            groups,
            limit=config.track.rollouts_samples,
            read=read,
            find=rollouts.find_prompt,
        )
    if keeper is not None:
        keeper.keep_step(step, groups)
    table = assemble(
        groups,
        config.reward_weights if config.rewards else None,
        config.temperature if config.has_temperatures else None,
    )
    metrics = rollout_metrics(groups, current_version=version) | metrics
    if answer is None:
        return table, metrics
    table, of_answers = with_answers(table, groups, answer)
    return table, metrics | of_answers
