"""Checks of parts that users bring, for their own tests: one for each kind of part.

from my_loss import Truncated
from roll.testing import check_loss_term

def test_my_loss_keeps_the_contract():
    check_loss_term(Truncated(limit=3.0))

Each raises AssertionError, which says what was tried and found, if the part breaks a rule.
"""

from roll.envs.contract import check_env
from roll.rewards.contract import check_reward
from roll.testing.advantages import check_advantage
from roll.testing.data import check_chat_template, check_curriculum
from roll.testing.losses import check_loss_term
from roll.testing.rollout import check_filter, check_rollout_loop
from roll.testing.shaping import (
    check_advantage_shaping,
    check_reward_shaping,
    check_sample_mask,
    check_sample_weight,
)
from roll.testing.trackers import check_tracker

__all__ = [
    "check_advantage",
    "check_advantage_shaping",
    "check_chat_template",
    "check_curriculum",
    "check_env",
    "check_filter",
    "check_loss_term",
    "check_reward",
    "check_reward_shaping",
    "check_rollout_loop",
    "check_sample_mask",
    "check_sample_weight",
    "check_tracker",
]
