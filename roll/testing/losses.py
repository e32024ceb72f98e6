"""Check of loss terms that users bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roll.algorithms.build import SumLoss
from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.own.bases import LossTerm, PolicyLoss
from roll.algorithms.own.calls import own_term
from roll.algorithms.weights import token_weights
from roll.config.algorithm import Aggregation
from roll.core.batches import RolloutBatch
from roll.testing.rules import case, littered, require, require_equal, widened
from roll.testing.samples import batch, table

KEY = "algorithm.loss"
STEP = 1e-4
"""Change of a log-prob with which the gradient is measured, in nats."""


@dataclass(frozen=True)
class _Pass:
    """An update, and the results of a forward pass over it."""

    batch: RolloutBatch
    logprobs_BT: Tensor
    entropy_BT: Tensor

    def select(self, rows: Tensor) -> _Pass:
        """Return these rows, without the padding that none of them needs."""
        some = self.batch.select(rows)
        width = int(some.lengths.max())
        return _Pass(
            widened(some, width - some.tokens.shape[1]),
            self.logprobs_BT[rows, :width],
            self.entropy_BT[rows, :width],
        )


@dataclass(frozen=True)
class _Found:
    """Loss of an update, and its gradients."""

    loss: TokenLoss
    total: float
    by_logprob_BT: Tensor
    by_entropy_BT: Tensor


def check_loss_term(term: LossTerm, *, stops_gradients: bool = False) -> None:
    """Raise AssertionError, which names the rule, if a loss term breaks one.

    The rules: the loss has one number per token, is finite also for extreme log-probs and
    advantages, and has a gradient; two calls give the same; the sum over micro-batches is that of
    the whole update, in any order, with any padding; numbers outside the loss mask have no effect;
    the gradient is that of the loss (by finite differences); metrics are detached. Of a
    `PolicyLoss`, the gradient raises the log-probs of samples with a positive advantage.

    Args:
        stops_gradients: True for a term whose gradient is not that of its value on purpose, such as
            `-weight.detach() * advantage * logprob`; it is not compared then.

    Raises:
        AssertionError: the term breaks a rule.
    """
    whole = _whole()
    found = try_loss_term(term)
    again = _pass(term, whole, "a second call")
    require(torch.equal(found.loss.loss_BT, again.loss.loss_BT), "two calls give different losses")
    for kind in (found.loss.metrics_BT, found.loss.maxima_BT, found.loss.metrics_B):
        for name, values in kind.items():
            require(not values.requires_grad, f"the metric {name} has a gradient; detach it")
    _check_division(term, whole, found)
    _check_outside(term, whole, found)
    if not stops_gradients:
        _check_gradient(term, whole, found)
    for what, odd in _extremes(whole):
        _pass(term, odd, what)
    if isinstance(term, PolicyLoss):
        _check_direction(term, whole)


def try_loss_term(term: LossTerm) -> _Found:
    """Return the loss of a made-up update; AssertionError if the term raises an error, its loss has
    another shape or is not finite, or it has no gradient."""
    found = _pass(term, _whole(), "an update of 12 samples")
    moves = bool((found.by_logprob_BT != 0).any() or (found.by_entropy_BT != 0).any())
    require(moves, f"{term.kind} has no gradient: is its loss made of `terms`, and not detached?")
    return found


def _whole() -> _Pass:
    """Return an update whose policy has moved a little since the samples were drawn."""
    rows = batch(table())
    mask_BT, g = rows.loss_mask, torch.Generator().manual_seed(3)
    advantages_B = torch.randn(len(rows), generator=g)
    assert rows.old_logprobs is not None
    drift_BT = 0.3 * torch.randn(mask_BT.shape, generator=g, dtype=torch.float64)
    return _Pass(
        replace(
            rows,
            advantages=advantages_B[:, None] * mask_BT,
            token_weights=token_weights(mask_BT, Aggregation.TOKEN_MEAN),
        ),
        (rows.old_logprobs.double() + drift_BT) * mask_BT,
        torch.rand(mask_BT.shape, generator=g, dtype=torch.float64) * mask_BT,
    )


def _pass(term: LossTerm, of: _Pass, what: str, *, prepared: bool = False) -> _Found:
    """Return loss and gradients; AssertionError, which names the case, if a number is not finite.

    Args:
        prepared: True if the term has seen the whole update that the rows are a part of.
    """
    loss, rows = SumLoss((own_term(term, KEY),)), of.batch
    logprobs_BT = of.logprobs_BT.detach().requires_grad_()
    entropy_BT = of.entropy_BT.detach().requires_grad_()
    with case(what):
        rows = rows if prepared else loss.prepare(rows)
        result = loss(PolicyTerms(logprobs_BT, entropy_BT if term.reads_entropy else None), rows)
    weights_BT = rows.require("token_weights", made_by="the check")
    total = (result.loss_BT * weights_BT).sum()
    by_logprob_BT, by_entropy_BT = torch.zeros_like(logprobs_BT), torch.zeros_like(entropy_BT)
    if total.requires_grad:
        pair = torch.autograd.grad(total, [logprobs_BT, entropy_BT], allow_unused=True)
        by_logprob_BT = by_logprob_BT if pair[0] is None else pair[0]
        by_entropy_BT = by_entropy_BT if pair[1] is None else pair[1]
    mask_BT = rows.loss_mask
    finite = bool(torch.isfinite(result.loss_BT[mask_BT]).all())
    require(finite, f"{what}: {term.kind} has a loss that is not finite")
    finite = bool(torch.isfinite(by_logprob_BT).all() and torch.isfinite(by_entropy_BT).all())
    require(finite, f"{what}: {term.kind} has a gradient that is not finite")
    return _Found(result, total.item(), by_logprob_BT, by_entropy_BT)


def _check_division(term: LossTerm, whole: _Pass, found: _Found) -> None:
    """Raise AssertionError unless the sum over micro-batches, in another order, is the whole."""
    loss = SumLoss((own_term(term, KEY),))
    ready = replace(whole, batch=loss.prepare(whole.batch))
    order = torch.randperm(len(whole.batch), generator=torch.Generator().manual_seed(4))
    total, by_logprob_BT = 0.0, torch.zeros_like(found.by_logprob_BT)
    for rows in (order[:1], order[1:5], order[5:7], order[7:]):
        part = _pass(term, ready.select(rows), "a micro-batch", prepared=True)
        total += part.total
        by_logprob_BT[rows, : part.by_logprob_BT.shape[1]] = part.by_logprob_BT
    told = "the sum over micro-batches in another order is not that of the whole update"
    require_equal(torch.tensor(total), torch.tensor(found.total), told)
    told = "the gradient of a token depends on the other rows of its micro-batch"
    require_equal(by_logprob_BT, found.by_logprob_BT, told)


def _check_outside(term: LossTerm, whole: _Pass, found: _Found) -> None:
    """Raise AssertionError if numbers outside the loss mask have an effect."""
    mask_BT, weights_BT = whole.batch.loss_mask, whole.batch.token_weights
    odd = replace(littered(whole.batch, mask_BT), token_weights=weights_BT)
    told = _pass(term, replace(whole, batch=odd), "large numbers outside the loss mask")
    broken = "numbers outside the loss mask change the loss inside"
    require_equal(told.loss.loss_BT * mask_BT, found.loss.loss_BT * mask_BT, broken)
    broken = "numbers outside the loss mask change the gradient"
    require_equal(told.by_logprob_BT, found.by_logprob_BT, broken)


def _check_gradient(term: LossTerm, whole: _Pass, found: _Found) -> None:
    """Raise AssertionError unless the gradient is the change of the loss by a change of each
    log-prob and entropy. Places where the loss has a bend are left out."""

    def total(logprobs_BT: Tensor, entropy_BT: Tensor) -> float:
        return _pass(term, _Pass(whole.batch, logprobs_BT, entropy_BT), "a small change").total

    logprobs_BT, entropy_BT = whole.logprobs_BT, whole.entropy_BT
    pairs: list[tuple[str, Tensor, Callable[[Tensor], float]]] = [
        ("log-prob", found.by_logprob_BT, lambda by_BT: total(logprobs_BT + by_BT, entropy_BT)),
        ("entropy", found.by_entropy_BT, lambda by_BT: total(logprobs_BT, entropy_BT + by_BT)),
    ]
    scale = max(g.abs().max().item() for _, g, _ in pairs)
    for name, gradient_BT, moved in pairs:
        for row, token in whole.batch.loss_mask.nonzero()[::3].tolist():
            step_BT = torch.zeros_like(gradient_BT)
            step_BT[row, token] = STEP
            up, down = moved(step_BT) - found.total, found.total - moved(-step_BT)
            if abs(up - down) > 0.02 * scale * STEP:
                continue
            measured, told = (up + down) / (2 * STEP), gradient_BT[row, token].item()
            require(
                abs(measured - told) <= 0.01 * scale,
                f"the gradient with respect to the {name} of token {token} of row {row} is "
                f"{told:.4g}, and the loss changes by {measured:.4g}; check a term that stops "
                "gradients on purpose with stops_gradients=True",
            )


def _extremes(whole: _Pass) -> Iterator[tuple[str, _Pass]]:
    """Yield what is odd about updates, and the updates."""
    rows, mask_BT = whole.batch, whole.batch.loss_mask
    assert rows.advantages is not None
    once = replace(rows, old_logprobs=None)
    yield "one update per step (no old_logprobs)", replace(whole, batch=once)
    for gap in (-60.0, 60.0):
        far_BT = (whole.logprobs_BT + gap) * mask_BT
        yield f"log-probs {gap:g} nats from the old ones", replace(whole, logprobs_BT=far_BT)
    big = replace(rows, advantages=1e4 * rows.advantages)
    yield "advantages of ten thousand", replace(whole, batch=big)
    zero = replace(rows, advantages=0 * rows.advantages)
    yield "advantages that are all 0", replace(whole, batch=zero)
    kept = rows.keep(torch.arange(len(rows)) > 0)
    weights_BT = token_weights(kept.loss_mask, Aggregation.TOKEN_MEAN)
    kept = replace(kept, token_weights=weights_BT)
    yield "a row without trained tokens", replace(whole, batch=kept)


def _check_direction(term: PolicyLoss, whole: _Pass) -> None:
    """Raise AssertionError unless a step against the gradient raises the log-probs of samples with
    a positive advantage, where the policy is that of the samples."""
    rows = whole.batch
    old_BT = rows.require("old_logprobs", made_by="the check")
    here = _Pass(replace(rows, ref_logprobs=old_BT), old_BT.double(), whole.entropy_BT)
    found = _pass(term, here, "the policy that drew the samples")
    advantages_BT = rows.require("advantages", made_by="the check")
    raised = -(found.by_logprob_BT * advantages_BT).sum().item()
    require(
        raised > 0,
        "the gradient lowers the log-probs of samples with a positive advantage: is a sign wrong?",
    )
