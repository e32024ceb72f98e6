"""From `algorithm:` in the config to one loss and one advantage estimator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.api import AdvantageEstimator, Loss, PolicyTerms, TokenLoss
from roll.algorithms.kl import k3
from roll.algorithms.mismatch import token_mismatch
from roll.algorithms.registries import ADVANTAGES, LOSSES, LossTerm
from roll.config.algorithm import AlgorithmConfig
from roll.core.batches import RolloutBatch


@dataclass(frozen=True)
class SumLoss:
    """A sum of terms, each with its coefficient: `((1.0, PpoClip()), (0.001, KlToReference()))`.

    Raises:
        ValueError: no terms, or two that report the same part.
    """

    terms: tuple[tuple[float, LossTerm], ...]

    def __post_init__(self) -> None:
        parts = [term.part for _, term in self.terms]
        if not parts or len(set(parts)) != len(parts):
            raise ValueError(
                f"a loss needs at least one term and each part once; got {parts or 'none'}"
            )

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """The parts, coefficient included, add up to the loss; parts and metrics are detached."""
        shares_BT: dict[str, Tensor] = {}
        metrics_BT, maxima_BT = _observed(terms, batch)
        for coef, term in self.terms:
            result = term(terms, batch)
            shares_BT[term.part] = coef * result.loss_BT
            metrics_BT.update(result.metrics_BT)
        first, *rest = shares_BT.values()
        return TokenLoss(
            loss_BT=sum(rest, start=first),
            parts_BT={name: share_BT.detach() for name, share_BT in shares_BT.items()},
            metrics_BT=metrics_BT,
            maxima_BT=maxima_BT,
        )


def build_loss(config: AlgorithmConfig) -> Loss:
    """The sum of the config's loss terms."""
    terms = []
    for term in config.loss:
        options = term.model_dump(exclude={"kind", "coef"})
        terms.append((term.coef, LOSSES[term.kind](**options)))
    return SumLoss(tuple(terms))


def build_advantage(config: AlgorithmConfig) -> AdvantageEstimator:
    """The config's advantage estimator; give it the batch of a whole step."""
    options = config.advantage.model_dump(exclude={"kind"})
    return ADVANTAGES[config.advantage.kind](**options)


def _observed(
    terms: PolicyTerms, batch: RolloutBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is worth a curve whether or not it is trained on: means and maxima.

    `kl/ref` is k3 with every estimator in the loss, so that curves of different runs compare.
    Without `old_logprobs` this forward pass is the first with the weights that generated, so it
    also shows the mismatch with the engine.
    """
    seen_BT: dict[str, Tensor] = {}
    maxima_BT: dict[str, Tensor] = {}
    if batch.old_logprobs is None and batch.rollout_logprobs is not None:
        seen_BT |= token_mismatch(terms.logprobs_BT.detach(), batch.rollout_logprobs)
        maxima_BT["mismatch/logprob_abs_max"] = seen_BT["mismatch/logprob_abs_mean"]
    if terms.entropy_BT is not None:
        seen_BT["entropy"] = terms.entropy_BT.detach()
    if batch.ref_logprobs is not None:
        seen_BT["kl/ref"] = k3(terms.logprobs_BT.detach(), batch.ref_logprobs)
    return seen_BT, maxima_BT
