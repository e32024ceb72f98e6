"""Advantage estimators, losses and their aggregation: functions from tensors to tensors.

Importing this package imports every built-in, so the registries are complete for every caller.
"""

from roll.algorithms.advantages.distill import Distill
from roll.algorithms.advantages.gae import Gae
from roll.algorithms.advantages.gdpo import Gdpo
from roll.algorithms.advantages.gpg import Gpg
from roll.algorithms.advantages.group import Grpo, Rloo
from roll.algorithms.advantages.optimal import Opo, Otb
from roll.algorithms.advantages.pass_k import PassK
from roll.algorithms.advantages.reinforce import Reinforce
from roll.algorithms.advantages.reinforce_pp import ReinforcePp
from roll.algorithms.advantages.remax import Remax
from roll.algorithms.advantages.turns.gigpo import Gigpo
from roll.algorithms.advantages.turns.turn_gae import TurnGae
from roll.algorithms.advantages.win_rate import WinRate
from roll.algorithms.build import SumLoss, build_advantage, build_loss
from roll.algorithms.correction import correct, use_engine_logprobs
from roll.algorithms.implicit.advantage import Prime
from roll.algorithms.implicit.loss import OutcomeLoss
from roll.algorithms.losses.distill import DistillTerm
from roll.algorithms.losses.entropy import EntropyBonus
from roll.algorithms.losses.kl import KlToReference
from roll.algorithms.losses.nll import PositiveNll
from roll.algorithms.losses.policy.cispo import Cispo
from roll.algorithms.losses.policy.covariance.clip_cov import ClipCov
from roll.algorithms.losses.policy.covariance.kl_cov import KlCov
from roll.algorithms.losses.policy.dppo import Dppo
from roll.algorithms.losses.policy.dro import Dro
from roll.algorithms.losses.policy.gmpo import Gmpo
from roll.algorithms.losses.policy.gspo import Gspo
from roll.algorithms.losses.policy.kimi import Kimi
from roll.algorithms.losses.policy.pg import PolicyGradient
from roll.algorithms.losses.policy.ppo import PpoClip
from roll.algorithms.losses.policy.sapo import Sapo
from roll.algorithms.losses.policy.topr import Topr
from roll.algorithms.losses.preference import PreferenceTerm
from roll.algorithms.losses.spin import SpinTerm
from roll.algorithms.losses.value import ClippedValueLoss, explained_variance
from roll.algorithms.shaping.advantages import ClipAdvantage, WhitenAdvantage
from roll.algorithms.shaping.build import Shaping, build_shaping
from roll.algorithms.shaping.difficulty import DifficultyMask, DifficultyWeight
from roll.algorithms.shaping.kl_in_reward import KlInReward
from roll.algorithms.shaping.length import LengthPenalty, LengthWeight
from roll.algorithms.shaping.normalize import NormalizeReward
from roll.algorithms.shaping.overlong import OverlongMask, OverlongPenalty
from roll.algorithms.shaping.pointwise import ClipReward, ScaleReward
from roll.algorithms.shaping.spread import SpreadMask
from roll.algorithms.weights import token_weights

__all__ = [
    "Cispo",
    "ClipAdvantage",
    "ClipCov",
    "ClipReward",
    "ClippedValueLoss",
    "DifficultyMask",
    "DifficultyWeight",
    "Distill",
    "DistillTerm",
    "Dppo",
    "Dro",
    "EntropyBonus",
    "Gae",
    "Gdpo",
    "Gigpo",
    "Gmpo",
    "Gpg",
    "Grpo",
    "Gspo",
    "Kimi",
    "KlCov",
    "KlInReward",
    "KlToReference",
    "LengthPenalty",
    "LengthWeight",
    "NormalizeReward",
    "Opo",
    "Otb",
    "OutcomeLoss",
    "OverlongMask",
    "OverlongPenalty",
    "PassK",
    "PolicyGradient",
    "PositiveNll",
    "PpoClip",
    "PreferenceTerm",
    "Prime",
    "Reinforce",
    "ReinforcePp",
    "Remax",
    "Rloo",
    "Sapo",
    "ScaleReward",
    "Shaping",
    "SpinTerm",
    "SpreadMask",
    "SumLoss",
    "Topr",
    "TurnGae",
    "WhitenAdvantage",
    "WinRate",
    "build_advantage",
    "build_loss",
    "build_shaping",
    "correct",
    "explained_variance",
    "token_weights",
    "use_engine_logprobs",
]
