"""Bases of the loss terms, with what the rest of a config has to know of each."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from roll.config.algorithm.needs import Choice


class LossChoice(Choice):
    """Base of every entry of `algorithm.loss`."""

    estimates_policy_gradient: ClassVar[bool] = False
    """True for terms that estimate the policy gradient from samples of the engine, so importance
    weights multiply their losses. A loss has at most one such term: two would add up to a step of
    twice the length."""
    whole_sequences: ClassVar[bool] = False
    """True if the gradient of a token depends on the losses of all tokens of its sample; see
    `couples_tokens`."""
    reads_advantages: ClassVar[bool] = True
    """True if the term uses the advantages of the samples."""
    reads_entropy: ClassVar[bool] = False
    """True if the term uses the entropies of the policy's distributions."""
    trains_pairs: ClassVar[bool] = False
    """True if the term compares two responses to each prompt; no others are trained on then."""
    compares_rewards: ClassVar[bool] = False
    """True if rewards decide which samples of a prompt the term compares."""
    trains_answers: ClassVar[bool] = False
    """True if the term compares each sample with the answer of its row of the data set."""
    coef: float = Field(default=1.0, gt=0)
    """Factor of the term in the loss."""
    end_coef: float | None = Field(default=None, ge=0)
    """Factor in the last step (`max_steps`), to which that of the first step, `coef`, changes by
    the same amount each step. null: `coef` in all steps."""

    @property
    def couples_tokens(self) -> bool:
        """True if the gradient of a token depends on the losses of all tokens of its sample, as the
        term is configured."""
        return self.whole_sequences

    def coef_at(self, progress: float) -> float:
        """Return the factor of the term in a step.

        Args:
            progress: part of the run that is done, 0 in the first step and 1 in the last.
        """
        if self.end_coef is None:
            return self.coef
        return self.coef + (self.end_coef - self.coef) * progress


class PolicyChoice(LossChoice):
    """Base of the terms that estimate the policy gradient."""

    estimates_policy_gradient: ClassVar[bool] = True
