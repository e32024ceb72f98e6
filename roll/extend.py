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
    from roll.config.algorithm.needs import Need
    from roll.core.batches import RolloutBatch
    from roll.core.metrics import Last, Max, Mean, Metrics, Sum

__all__ = [
    "Advantage",
    "AdvantageShaping",
    "Estimate",
    "Last",
    "LossTerm",
    "Max",
    "Mean",
    "Metrics",
    "Need",
    "PolicyLoss",
    "PolicyTerms",
    "RewardShaping",
    "Rewards",
    "RolloutBatch",
    "SampleAdvantage",
    "SampleMask",
    "SampleWeight",
    "Samples",
    "Siblings",
    "Sum",
    "Tensor",
    "TokenLoss",
    "log_ratio",
    "total_rewards",
]

_MODULES = {
    "roll.algorithms.advantages.rewards": ("total_rewards",),
    "roll.algorithms.loss_interface": ("Estimate", "PolicyTerms", "Samples", "TokenLoss"),
    "roll.algorithms.losses.policy.ratio": ("log_ratio",),
    "roll.algorithms.own.bases": ("Advantage", "LossTerm", "PolicyLoss", "SampleAdvantage"),
    "roll.algorithms.own.shaping": (
        "AdvantageShaping",
        "RewardShaping",
        "SampleMask",
        "SampleWeight",
    ),
    "roll.algorithms.shaping.rewards": ("Rewards",),
    "roll.algorithms.siblings": ("Siblings",),
    "roll.config.algorithm.needs": ("Need",),
    "roll.core.batches": ("RolloutBatch",),
    "roll.core.metrics": ("Last", "Max", "Mean", "Metrics", "Sum"),
    "torch": ("Tensor",),
}
"""Module -> public names that it defines."""


def __getattr__(name: str) -> Any:
    """Import and return a public name; AttributeError for any other one."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
