"""Samples without training: what the model of a run writes, scored and kept (`roll rollout`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError, RollError
from roll.core.metrics import Metrics
from roll.core.types import Prompt
from roll.distributed.cluster import Cluster
from roll.output_dir.checkpoints import RunState, load_sampler
from roll.output_dir.sample_files import sample_file
from roll.pipeline.agentic import AgenticPipeline
from roll.pipeline.base import Pipeline
from roll.pipeline.collect import collect
from roll.pipeline.rlvr import RlvrPipeline
from roll.runtime.rollouts.generation import start_generation
from roll.runtime.run_data import RunData
from roll.runtime.sample_keeper import WRITE_TIMEOUT_S, start_keeper


class RolloutPipeline(Pipeline[RlvrBase]):
    """Pipeline that generates, scores and keeps the samples of one step after another, and trains
    nothing: all samples are of the weights in the model's files."""

    data: RunData[Prompt]

    @classmethod
    def prepare(cls, config: RlvrBase) -> tuple[RlvrBase, RunData[Prompt]]:
        """Load the data as the training run does; see `Pipeline.prepare`."""
        agents = isinstance(config, AgenticBase)
        return (AgenticPipeline if agents else RlvrPipeline).prepare(config)

    def open(self) -> None:
        """Start engines, rewards, environments and the worker that writes samples."""
        config = self.config
        keeper = start_keeper(config, self.launcher, self.data)
        assert keeper is not None, "the samples are what this run is for"
        self.keeper = keeper
        self.generation, _ = start_generation(
            config,
            self.launcher,
            self.loop,
            self.data,
            keeper,
            platform=self.platform,
            trains=False,
        )

    def close(self) -> None:
        self.generation.close()
        self.keeper.close()

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """Restore the position in the data and groups that wait.

        Raises:
            CheckpointError: the checkpoint is of a run that trains, or of other data.
        """
        if checkpoint is None or state is None:
            return
        if (checkpoint / Role.ACTOR_TRAIN).exists():
            raise CheckpointError(
                f"{checkpoint} is of a run that trains, which this one must not go on with; give "
                "`roll rollout` a folder of its own (--out)"
            )
        self.generation.restore(load_sampler(checkpoint, state))

    def step(self, step: int) -> Metrics:
        """Collect the samples of a step, and wait until they are in their file.

        Raises:
            RollError: they could not be written.
        """
        _, metrics = collect(
            self.generation,
            self.keeper,
            self.config,
            step,
            0,
            self.timers,
            read=self.data.tokenizer.decode,
        )
        self.keeper.settle(WRITE_TIMEOUT_S)
        file = sample_file(self.output_dir, "train", step)
        if not file.is_file():
            raise RollError(
                f"{file} could not be written, the warning before says why; make room, and the "
                f"same command goes on with step {step}"
            )
        return metrics | self.generation.take_rates()

    def validate(self, step: int) -> dict[str, float]:
        """Return nothing: there are no validation sets."""
        return {}

    def learners(self) -> dict[Role, Cluster[Any]]:
        return {}

    @contextmanager
    def exclusive_devices(self, role: Role) -> Iterator[None]:
        """Move nothing: no role trains."""
        yield

    def sampler_state(self) -> dict[str, Any]:
        return self.generation.state()
