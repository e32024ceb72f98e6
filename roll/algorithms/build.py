"""Sum of loss terms; functions that build it and the advantage estimator from `algorithm:`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from roll.algorithms.kl import k3
from roll.algorithms.loss_interface import AdvantageEstimator, PolicyTerms, TokenLoss
from roll.algorithms.mismatch import token_mismatch
from roll.algorithms.registries import ADVANTAGES, LOSSES, ChoosingTerm, LossTerm, PreparedTerm
from roll.config.algorithm import AlgorithmConfig
from roll.config.user_code.own import part_name
from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable

S = TypeVar("S", RolloutBatch, SampleTable)


@dataclass(frozen=True)
class SumLoss:
    """Sum of loss terms, each times the factor that its config has at a point of the run.

    If the batch has `importance_weights`, they multiply the term that estimates the policy
    gradient, to correct it where the engine's distribution differs slightly from the policy's. A
    penalty such as the KL is not weighted.

    Raises:
        ValueError: there are no terms, or two terms report the same part.
    """

    terms: tuple[LossTerm, ...]
    progress: float = 0.0
    """Part of the run that is done: 0 in the first step and 1 in the last."""
    report_entropy: bool = True
    """True if entropies are reported, and so read, even if no term uses them."""

    def __post_init__(self) -> None:
        parts = [_part(term) for term in self.terms]
        if not parts or len(set(parts)) != len(parts):
            raise ValueError(
                f"a loss needs at least one term and each part once; got {parts or 'none'}"
            )

    def at(self, progress: float) -> SumLoss:
        """Return the loss at another point of the run; see `progress`."""
        return replace(self, progress=progress)

    @property
    def reads_entropy(self) -> bool:
        """True if the forward pass must compute entropies."""
        return self.report_entropy or any(term.config.reads_entropy for term in self.terms)

    @property
    def needs_update(self) -> bool:
        """True if a term computes from the tokens of a whole update."""
        return any(isinstance(term, PreparedTerm) for term in self.terms)

    def choose(self, samples: S) -> S:
        """Return the rows that are trained on: pairs of the samples if a term compares them, else
        all samples as they are.

        Call this once per step, after rewards are shaped and samples are masked.

        Raises:
            ValueError: rewards are missing, and a term needs them.
        """
        for term in self.terms:
            if isinstance(term, ChoosingTerm):
                samples = term.choose(samples)
        return samples

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with what the terms need to compute from the whole update.

        Call this once per update, on the driver: after advantages and old log-probs are set, and
        before the batch is split over ranks.

        Raises:
            ValueError: advantages or old log-probs are missing, and a term needs them.
        """
        for term in self.terms:
            if isinstance(term, PreparedTerm):
                batch = term.prepare(batch)
        return batch

    def changing_coefs(self) -> dict[str, float]:
        """Return the factors of those terms whose factor changes in the run, by `coef/<part>`."""
        return {
            f"coef/{_part(term)}": term.config.coef_at(self.progress)
            for term in self.terms
            if term.config.end_coef is not None
        }

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the summed loss per token, its parts and its metrics.

        The parts include their coefficients and add up to the loss. Parts and metrics are detached.

        Raises:
            ValueError: `batch` or `terms` lack something that a term needs, such as `advantages`.
        """
        shares_BT: dict[str, Tensor] = {}
        metrics_BT, maxima_BT = _observed(terms, batch)
        metrics_B: dict[str, Tensor] = {}
        masked = _masked(terms, batch.loss_mask)
        for term in self.terms:
            result = term(masked, batch)
            share_BT = term.config.coef_at(self.progress) * result.loss_BT
            if term.config.estimates_policy_gradient and batch.importance_weights is not None:
                share_BT = share_BT * batch.importance_weights
            shares_BT[_part(term)] = share_BT
            metrics_BT.update(result.metrics_BT)
            metrics_B.update(result.metrics_B)
        first, *rest = shares_BT.values()
        return TokenLoss(
            loss_BT=sum(rest, start=first),
            parts_BT={name: share_BT.detach() for name, share_BT in shares_BT.items()},
            metrics_BT=metrics_BT,
            maxima_BT=maxima_BT,
            metrics_B=metrics_B,
        )


def build_loss(config: AlgorithmConfig) -> SumLoss:
    """Build the sum of the loss terms that the config lists."""
    terms = enumerate(config.loss)
    return SumLoss(
        tuple(LOSSES.build(term, f"algorithm.loss.{i}") for i, term in terms),
        report_entropy=config.report_entropy,
    )


def build_advantage(config: AlgorithmConfig) -> AdvantageEstimator:
    """Build the configured advantage estimator; it must be called with a whole step's batch."""
    return ADVANTAGES.build(config.advantage, "algorithm.advantage")


def _part(term: LossTerm) -> str:
    """Return the name of the term's part of the loss: `loss/<part>` in the metrics."""
    if term.config.estimates_policy_gradient:
        return "policy"
    return part_name(term.config.kind)


def _masked(terms: PolicyTerms, mask_BT: Tensor) -> PolicyTerms:
    """Return the terms with zeros outside the mask, so that no gradient flows there.

    Token weights of zero would not be enough: zero times the gradient of a NaN is NaN.
    """
    entropy_BT = terms.entropy_BT
    divergence_BT = terms.divergence_BT
    return PolicyTerms(
        logprobs_BT=terms.logprobs_BT.masked_fill(~mask_BT, 0.0),
        entropy_BT=None if entropy_BT is None else entropy_BT.masked_fill(~mask_BT, 0.0),
        divergence_BT=None if divergence_BT is None else divergence_BT.masked_fill(~mask_BT, 0.0),
    )


def _observed(
    terms: PolicyTerms, batch: RolloutBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return metrics that are reported whether or not the loss uses them: means and maxima.

    `kl/ref` always uses the estimator k3, whatever estimator the loss uses, so that curves of
    different runs can be compared. Without `old_logprobs` this forward pass is the first one with
    the weights that generated the samples, so its mismatch with the engine is reported as well.
    """
    seen_BT: dict[str, Tensor] = {}
    maxima_BT: dict[str, Tensor] = {}
    if batch.old_logprobs is None and batch.rollout_logprobs is not None:
        seen_BT |= dict(token_mismatch(terms.logprobs_BT.detach(), batch.rollout_logprobs))
        maxima_BT["mismatch/logprob_abs_max"] = seen_BT["mismatch/logprob_abs_mean"]
    if terms.entropy_BT is not None:
        seen_BT["entropy"] = terms.entropy_BT.detach()
    if batch.ref_logprobs is not None:
        seen_BT["kl/ref"] = k3(terms.logprobs_BT.detach(), batch.ref_logprobs)
    return seen_BT, maxima_BT
