"""Reinforcement learning of an agent that takes turns with environments."""

from __future__ import annotations

from roll.config.agentic import AgenticConfig
from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.core.types import Prompt
from roll.pipeline.rlvr import RlvrPipeline
from roll.runtime.rollouts.replay import load_replay
from roll.runtime.run_data import RunData, load_task_data
from roll.runtime.teachers import check_others


class AgenticPipeline(RlvrPipeline):
    """Pipeline for agents: that of RLVR, in which a sample is an episode."""

    config_class = AgenticConfig

    @classmethod
    def prepare(cls, config: RlvrBase) -> tuple[RlvrBase, RunData[Prompt]]:
        """Load the tasks, and check tags, teachers and reward models; see `Pipeline.prepare`.

        Raises:
            CheckpointError, ConfigError, DataError: see `load_task_data`, `load_replay` and
                `check_others`.
        """
        assert isinstance(config, AgenticBase)
        data = load_task_data(config) if config.generates else load_replay(config)
        target = config.algorithm.distill_target
        check_others(config, data.tokenizer, target, "algorithm.loss (distill)")
        return config, data
