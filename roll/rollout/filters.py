"""Which finished groups are worth training on."""

from __future__ import annotations

from roll.rollout.types import Group


def drop_equal_rewards(group: Group) -> str | None:
    """Reject a group whose siblings all got the same reward: every advantage in it is zero (dynamic
    sampling of DAPO, arXiv 2503.14476)."""
    return f"all rewards equal to {group.rewards[0]:g}" if group.equal_rewards else None
