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
    """True if the gradient of a token depends on the losses of all tokens of its sample."""
    reads_advantages: ClassVar[bool] = True
    """True if the term uses the advantages of the samples."""
    trains_pairs: ClassVar[bool] = False
    """True if the term compares two responses to each prompt; no others are trained on then."""
    compares_rewards: ClassVar[bool] = False
    """True if rewards decide which samples of a prompt the term compares."""
    trains_answers: ClassVar[bool] = False
    """True if the term compares each sample with the answer of its row of the data set."""


class PolicyChoice(LossChoice):
    """Base of the terms that estimate the policy gradient."""

    estimates_policy_gradient: ClassVar[bool] = True
    coef: float = Field(default=1.0, gt=0)
    """Factor of the term in the loss."""
