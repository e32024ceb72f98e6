"""How a step's samples are collected."""

from pydantic import Field

from roll.config.base import Config


class RolloutConfig(Config):
    drop_equal_rewards: bool = False
    """Dynamic sampling: groups whose samples all got the same reward teach nothing and are
    replaced by new prompts (DAPO, arXiv 2503.14476)."""
    extra_prompts: int = Field(default=0, ge=0)
    """Prompts in flight beyond what the step still needs; leftovers are aborted."""
    max_prompts_factor: float = Field(default=4.0, ge=1)
    """A step that has tried this many times its prompts without filling up stops the run."""
    max_in_flight_groups: int = Field(default=256, ge=1)
    """Prompts generated at once over all replicas."""
    request_timeout_s: float = Field(default=600, gt=0)
    """For one prompt's samples."""
