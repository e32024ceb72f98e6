"""Settings of opponents in environments of several players."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from roll.config.sections.model import ModelConfig
from roll.config.sections.training import InferRole


class OpponentConfig(InferRole):
    """Opponent of the policy, on engines of its own. It plays with the sampling of the run, and is
    not trained."""

    model: ModelConfig | None = None
    """Model that plays, with the tokens of the policy: for example `hf` of an earlier run, or the
    folder that `roll merge` makes of a checkpoint. It stays as it is. Set either this or
    `every`."""
    every: int | None = Field(default=None, ge=1)
    """Number of steps after which it gets the weights of the policy anew; in between it keeps those
    of an earlier step. A run that resumes begins with the weights of its checkpoint, and an engine
    that is replaced with the present ones."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        """Require exactly one of `model` and `every`, and no adapter."""
        if (self.model is None) == (self.every is None):
            raise ValueError(
                "set exactly one of `model` (weights that stay) and `every` (those of the policy, "
                "every so many steps)"
            )
        if self.model is not None and self.model.lora is not None:
            raise ValueError("model.lora: an opponent is not trained; drop it")
        return self
