"""Everything that parts of your own are made of: bases, and the types that they take and return.

    from roll.extend import SampleAdvantage, Samples, Tensor

A run file names a class by its import path, in the place of a `kind`:
`advantage: {kind: my_module:MyAdvantage, option: 3}`. See docs/extend.md; `roll.testing` has a test
for each kind of part. A name is imported when it is used, because some import much.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from roll.algorithms.advantages.rewards import total_rewards
    from roll.algorithms.loss_interface import Estimate, PolicyTerms, Samples, TokenLoss
    from roll.algorithms.losses.policy.ratio import log_ratio
    from roll.algorithms.own.bases import Advantage, LossTerm, PolicyLoss, SampleAdvantage
    from roll.algorithms.own.shaping import (
        AdvantageShaping,
        RewardShaping,
        SampleMask,
        SampleWeight,
    )
    from roll.algorithms.shaping.rewards import Rewards
    from roll.algorithms.siblings import Siblings
    from roll.config.agentic import AgenticConfig
    from roll.config.algorithm.needs import Need
    from roll.config.offline import DistillationConfig, DpoConfig, RewardModelConfig, SftConfig
    from roll.config.rlvr import RlvrConfig
    from roll.core.batches import RolloutBatch
    from roll.core.completion import Completion
    from roll.core.metrics import Last, Max, Mean, Metrics, Sum
    from roll.core.sample_table import SampleTable
    from roll.core.types import Prompt, Sample
    from roll.data.own.curriculum import Curriculum, Seen
    from roll.data.own.template import ChatTemplate
    from roll.envs.api import Env
    from roll.output_dir.trackers.interface import Record, TrackedRun, Tracker
    from roll.pipeline.agentic import AgenticPipeline
    from roll.pipeline.distill import DistillPipeline
    from roll.pipeline.dpo import DpoPipeline
    from roll.pipeline.reward_model import RewardModelPipeline
    from roll.pipeline.rlvr import RlvrPipeline
    from roll.pipeline.sft import SftPipeline
    from roll.rewards.api import Reward, RewardContext
    from roll.rollout.own.bases import Filter, RolloutLoop
    from roll.rollout.own.writing import Writing
    from roll.rollout.types import Group
    from roll.workers.reward import RewardWorker

__all__ = [
    "Advantage",
    "AdvantageShaping",
    "AgenticConfig",
    "AgenticPipeline",
    "ChatTemplate",
    "Completion",
    "Curriculum",
    "DistillPipeline",
    "DistillationConfig",
    "DpoConfig",
    "DpoPipeline",
    "Env",
    "Estimate",
    "Filter",
    "Group",
    "Last",
    "LossTerm",
    "Max",
    "Mean",
    "Metrics",
    "Need",
    "PolicyLoss",
    "PolicyTerms",
    "Prompt",
    "Record",
    "Reward",
    "RewardContext",
    "RewardModelConfig",
    "RewardModelPipeline",
    "RewardShaping",
    "RewardWorker",
    "Rewards",
    "RlvrConfig",
    "RlvrPipeline",
    "RolloutBatch",
    "RolloutLoop",
    "Sample",
    "SampleAdvantage",
    "SampleMask",
    "SampleTable",
    "SampleWeight",
    "Samples",
    "Seen",
    "SftConfig",
    "SftPipeline",
    "Siblings",
    "Sum",
    "Tensor",
    "TokenLoss",
    "TrackedRun",
    "Tracker",
    "Writing",
    "log_ratio",
    "total_rewards",
]

_MODULES = {
    "roll.algorithms.advantages.rewards": ("total_rewards",),
    "roll.algorithms.loss_interface": (
        "Estimate",
        "PolicyTerms",
        "Samples",
        "TokenLoss",
    ),
    "roll.algorithms.losses.policy.ratio": ("log_ratio",),
    "roll.algorithms.own.bases": (
        "Advantage",
        "LossTerm",
        "PolicyLoss",
        "SampleAdvantage",
    ),
    "roll.algorithms.own.shaping": (
        "AdvantageShaping",
        "RewardShaping",
        "SampleMask",
        "SampleWeight",
    ),
    "roll.algorithms.shaping.rewards": ("Rewards",),
    "roll.algorithms.siblings": ("Siblings",),
    "roll.config.agentic": ("AgenticConfig",),
    "roll.config.algorithm.needs": ("Need",),
    "roll.config.offline": (
        "DistillationConfig",
        "DpoConfig",
        "RewardModelConfig",
        "SftConfig",
    ),
    "roll.config.rlvr": ("RlvrConfig",),
    "roll.core.batches": ("RolloutBatch",),
    "roll.core.completion": ("Completion",),
    "roll.core.metrics": (
        "Last",
        "Max",
        "Mean",
        "Metrics",
        "Sum",
    ),
    "roll.core.sample_table": ("SampleTable",),
    "roll.core.types": (
        "Prompt",
        "Sample",
    ),
    "roll.data.own.curriculum": (
        "Curriculum",
        "Seen",
    ),
    "roll.data.own.template": ("ChatTemplate",),
    "roll.envs.api": ("Env",),
    "roll.output_dir.trackers.interface": (
        "Record",
        "TrackedRun",
        "Tracker",
    ),
    "roll.pipeline.agentic": ("AgenticPipeline",),
    "roll.pipeline.distill": ("DistillPipeline",),
    "roll.pipeline.dpo": ("DpoPipeline",),
    "roll.pipeline.reward_model": ("RewardModelPipeline",),
    "roll.pipeline.rlvr": ("RlvrPipeline",),
    "roll.pipeline.sft": ("SftPipeline",),
    "roll.rewards.api": ("Reward", "RewardContext"),
    "roll.rollout.own.bases": (
        "Filter",
        "RolloutLoop",
    ),
    "roll.rollout.own.writing": ("Writing",),
    "roll.rollout.types": ("Group",),
    "roll.workers.reward": ("RewardWorker",),
    "torch": ("Tensor",),
}
"""Module -> public names that it defines."""


def __getattr__(name: str) -> Any:
    """Import and return a public name; AttributeError for any other one."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
