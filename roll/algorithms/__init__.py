"""Advantages, losses and their aggregation: tensors in, tensors out.

Importing the package imports every built-in, so the registries are full whoever asks first.
"""

from roll.algorithms.advantages.group import Grpo
from roll.algorithms.advantages.reinforce import Reinforce
from roll.algorithms.compose import SumLoss, build_advantage, build_loss
from roll.algorithms.losses.entropy import EntropyBonus
from roll.algorithms.losses.kl import KlToReference
from roll.algorithms.losses.ppo import PpoClip
from roll.algorithms.weights import token_weights

__all__ = [
    "EntropyBonus",
    "Grpo",
    "KlToReference",
    "PpoClip",
    "Reinforce",
    "SumLoss",
    "build_advantage",
    "build_loss",
    "token_weights",
]
