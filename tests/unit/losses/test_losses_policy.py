"""Every policy term against its paper's formula in loops, and what all of them have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from roll.algorithms import SumLoss, token_weights
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.registries import LOSSES, LossTerm
from roll.config.algorithm import (
    Aggregation,
    DistillTermConfig,
    EntropyConfig,
    LossTermConfig,
    PreferenceTermConfig,
    SpinConfig,
)
from roll.core.batches import RolloutBatch
from roll.strategy.training.reduce import weighted_sum
from tests.tiny import rollout_batch

TERM: TypeAdapter[LossTermConfig] = TypeAdapter(LossTermConfig)


@dataclass(frozen=True)
class Row:
    """The trained tokens of one row; `at` are the log-probs where gradients are stopped."""

    new: list[float]
    at: list[float]
    old: list[float]
    ref: list[float]
    adv: list[float]
    chosen: list[bool]

    @property
    def ratios(self) -> list[float]:
        return [math.exp(n - o) for n, o in zip(self.new, self.old, strict=True)]

    @property
    def stopped_ratios(self) -> list[float]:
        return [math.exp(n - o) for n, o in zip(self.at, self.old, strict=True)]

    @property
    def units(self) -> list[float]:
        return [math.exp(n - a) for n, a in zip(self.new, self.at, strict=True)]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(ratio: float, adv: float, low: float, high: float) -> float:
    return -min(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)


def pg(row: Row) -> list[float]:
    return [-a * u for a, u in zip(row.adv, row.units, strict=True)]


def ppo_clip(row: Row) -> list[float]:
    return [ppo(r, a, 0.2, 0.28) for r, a in zip(row.ratios, row.adv, strict=True)]


def gspo(row: Row) -> list[float]:
    s = math.prod(row.ratios) ** (1 / len(row.new))
    return [ppo(s, a, 0.1, 0.2) for a in row.adv]


def gspo_token(row: Row) -> list[float]:
    s = math.prod(row.stopped_ratios) ** (1 / len(row.new))
    return [ppo(s * u, a, 0.1, 0.2) for u, a in zip(row.units, row.adv, strict=True)]


def gmpo(row: Row) -> list[float]:
    product = 1.0
    for ratio, adv in zip(row.ratios, row.adv, strict=True):
        sign = 1 if adv >= 0 else -1
        clipped = clip(ratio, math.exp(-0.3), math.exp(0.4))
        product *= sign * min(sign * ratio, sign * clipped)
    return [-a * product ** (1 / len(row.new)) for a in row.adv]


def cispo(row: Row) -> list[float]:
    weights = [clip(r, 0.8, 1.3) for r in row.stopped_ratios]
    return [-w * a * u for w, a, u in zip(weights, row.adv, row.units, strict=True)]


def dppo(row: Row, divergence: Callable[[float, float], float], bound: float) -> list[float]:
    losses = []
    for i, ratio in enumerate(row.stopped_ratios):
        p, q, adv = math.exp(row.old[i]), math.exp(row.at[i]), row.adv[i]
        outward = (adv > 0 and ratio > 1) or (adv < 0 and ratio < 1)
        masked = outward and divergence(p, q) > bound
        losses.append(0.0 if masked else -min(ratio, 1.3) * adv * row.units[i])
    return losses


def dppo_tv(row: Row) -> list[float]:
    return dppo(row, lambda p, q: abs(p - q), 0.1)


def dppo_kl(row: Row) -> list[float]:
    def kl(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    return dppo(row, kl, 0.02)


def sapo(row: Row) -> list[float]:
    losses = []
    for ratio, adv in zip(row.ratios, row.adv, strict=True):
        tau = 1.0 if adv > 0 else 1.05
        losses.append(-adv * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
    return losses


def topr(row: Row) -> list[float]:
    s = math.prod(row.stopped_ratios)
    weights = [1.5 if a >= 0 else 0.5 * clip(s, 0, 1) for a in row.adv]
    return [-w * a * u for w, a, u in zip(weights, row.adv, row.units, strict=True)]


def squared(row: Row, anchor: list[float], tau: float) -> list[float]:
    square = sum(n - x for n, x in zip(row.new, anchor, strict=True)) ** 2
    share = tau / 2 * square / len(row.new)
    return [-a * u + share for a, u in zip(row.adv, row.units, strict=True)]


def kimi(row: Row) -> list[float]:
    return squared(row, row.old, 0.7)


def dro(row: Row) -> list[float]:
    return squared(row, row.ref, 0.6)


def kimi_token(row: Row) -> list[float]:
    values = zip(row.adv, row.units, row.new, row.old, strict=True)
    return [-a * u + 0.35 * (n - o) ** 2 for a, u, n, o in values]


def clip_cov(row: Row) -> list[float]:
    losses = ppo_clip(row)
    return [0.0 if c else x for c, x in zip(row.chosen, losses, strict=True)]


def kl_cov(row: Row) -> list[float]:
    losses = []
    for i, ratio in enumerate(row.ratios):
        penalty = 0.9 * abs(row.new[i] - row.old[i]) if row.chosen[i] else 0.0
        losses.append(-ratio * row.adv[i] + penalty)
    return losses


def nll(row: Row) -> list[float]:
    return [-n if sum(row.adv) > 0 else 0.0 for n in row.new]


def kl_k1(row: Row) -> list[float]:
    return [n - r for n, r in zip(row.new, row.ref, strict=True)]


def kl_k3(row: Row) -> list[float]:
    return [math.exp(r - n) - 1 - (r - n) for n, r in zip(row.new, row.ref, strict=True)]


def loss_term(kind: str, **options: Any) -> LossTerm:
    """The term of this kind, with the coefficient 1 where no other is given."""
    return LOSSES.build(TERM.validate_python({"kind": kind, "coef": 1.0, **options}))


ORACLES: dict[str, tuple[LossTerm, Callable[[Row], list[float]]]] = {
    "pg": (loss_term("pg"), pg),
    "ppo_clip": (loss_term("ppo_clip", clip_low=0.2, clip_high=0.28), ppo_clip),
    "gspo": (loss_term("gspo", clip_low=0.1, clip_high=0.2), gspo),
    "gspo_token": (loss_term("gspo", clip_low=0.1, clip_high=0.2, token_level=True), gspo_token),
    "gmpo": (loss_term("gmpo", clip_low=0.3, clip_high=0.4), gmpo),
    "cispo": (loss_term("cispo", clip_low=0.2, clip_high=0.3), cispo),
    "dppo_tv": (loss_term("dppo", threshold=0.1, upper=1.3), dppo_tv),
    "dppo_kl": (loss_term("dppo", divergence="kl", threshold=0.02, upper=1.3), dppo_kl),
    "sapo": (loss_term("sapo"), sapo),
    "topr": (loss_term("topr", positive_weight=1.5, negative_weight=0.5), topr),
    "kimi": (loss_term("kimi", tau=0.7), kimi),
    "kimi_token": (loss_term("kimi", tau=0.7, level="token"), kimi_token),
    "dro": (loss_term("dro", tau=0.6), dro),
    "clip_cov": (loss_term("clip_cov", clip_low=0.2, clip_high=0.28), clip_cov),
    "kl_cov": (loss_term("kl_cov", penalty=0.9), kl_cov),
    "nll": (loss_term("nll"), nll),
    "kl_k1": (loss_term("kl", estimator="k1"), kl_k1),
    "kl_k3": (loss_term("kl", estimator="k3"), kl_k3),
}
STOPPED = {"pg", "gspo_token", "cispo", "topr", "kimi", "kimi_token", "dro", "dppo_tv", "dppo_kl"}
DEFAULTS = ["pg", "ppo_clip", "gspo", "gmpo", "cispo", "dppo", "sapo", "topr", "kimi", "dro"]
DEFAULTS += ["kl_cov"]


def example(seed: int = 0, *, rows: int = 5, per_row: bool = False) -> tuple[Tensor, RolloutBatch]:
    """Float64 log-probs and a batch with all that terms need; `per_row`: one advantage a row."""
    batch = rollout_batch(rows, prompt=2, longest=5, seed=seed)
    g = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(batch.tokens.shape, generator=g, dtype=torch.float64)

    old_BT = -draw().abs() - 0.1
    advantages_BT = draw()[:, :1].expand_as(old_BT) if per_row else draw()
    batch = replace(
        batch,
        old_logprobs=old_BT,
        ref_logprobs=old_BT + 0.3 * draw(),
        advantages=advantages_BT * batch.loss_mask,
        chosen_tokens=(draw() > 0.5) & batch.loss_mask,
        token_weights=token_weights(batch.loss_mask, Aggregation.SEQUENCE_MEAN).double(),
    )
    return (old_BT + 0.4 * draw()).clamp(max=-0.01), batch


def rows_of(new_BT: Tensor, at_BT: Tensor, batch: RolloutBatch) -> list[Row]:
    names = ("old_logprobs", "ref_logprobs", "advantages", "chosen_tokens")
    columns = [new_BT, at_BT, *(batch.require(name, made_by="example") for name in names)]
    rows = []
    for i, mask_T in enumerate(batch.loss_mask):
        new, at, old, ref, adv, chosen = (column[i][mask_T].tolist() for column in columns)
        rows.append(Row(new, at, old, ref, adv, chosen))
    return rows


def reduced(term: LossTerm, logprobs_BT: Tensor, batch: RolloutBatch) -> Tensor:
    """The loss of a step as the strategies reduce it."""
    weights_BT = batch.require("token_weights", made_by="test")
    result = SumLoss((term,))(PolicyTerms(logprobs_BT), batch)
    return weighted_sum(result.loss_BT, weights_BT)


def gradient(term: LossTerm, logprobs_BT: Tensor, batch: RolloutBatch) -> Tensor:
    leaf_BT = logprobs_BT.clone().requires_grad_()
    reduced(term, leaf_BT, batch).backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad


def test_every_registered_term_has_an_oracle_or_is_tested_elsewhere() -> None:
    tested = {type(term.config) for term, _ in ORACLES.values()}
    elsewhere = {EntropyConfig, DistillTermConfig, PreferenceTermConfig, SpinConfig}
    assert set(LOSSES) == tested | elsewhere


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_formula_of_the_paper(name: str, seed: int) -> None:
    term, oracle = ORACLES[name]
    new_BT, batch = example(seed)
    found_BT = term(PolicyTerms(new_BT), batch).loss_BT
    for i, row in enumerate(rows_of(new_BT, new_BT, batch)):
        found = found_BT[i][batch.loss_mask[i]].tolist()
        assert found == pytest.approx(oracle(row), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_formula_with_its_stopped_parts_held(
    name: str, seed: int
) -> None:
    term, oracle = ORACLES[name]
    new_BT, batch = example(seed, rows=3)
    weights_BT = batch.require("token_weights", made_by="test")

    def total(moved_BT: Tensor) -> float:
        losses = [oracle(row) for row in rows_of(moved_BT, new_BT, batch)]
        flat = torch.tensor([x for row in losses for x in row], dtype=torch.float64)
        return (flat * weights_BT[batch.loss_mask]).sum().item()

    expected_BT = torch.zeros_like(new_BT)
    for i, t in batch.loss_mask.nonzero().tolist():
        step_BT = torch.zeros_like(new_BT)
        step_BT[i, t] = 1e-6
        expected_BT[i, t] = (total(new_BT + step_BT) - total(new_BT - step_BT)) / 2e-6
    torch.testing.assert_close(gradient(term, new_BT, batch), expected_BT, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(set(ORACLES) - STOPPED))
def test_gradcheck_passes_where_no_gradient_is_stopped(name: str) -> None:
    new_BT, batch = example()
    leaf_BT = new_BT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reduced(ORACLES[name][0], x, batch), (leaf_BT,))


@pytest.mark.parametrize("old_known", [True, False])
@pytest.mark.parametrize("name", DEFAULTS)
def test_at_ratio_one_loss_and_gradient_are_minus_the_advantage(name: str, old_known: bool) -> None:
    term = loss_term(name)
    _, batch = example(2, per_row=True)
    start_BT = batch.require("old_logprobs", made_by="test")
    batch = replace(batch, ref_logprobs=start_BT)
    if not old_known:
        batch = replace(batch, old_logprobs=None)
    advantages_BT = batch.require("advantages", made_by="test")
    weights_BT = batch.require("token_weights", made_by="test")
    result = SumLoss((term,))(PolicyTerms(start_BT), batch)
    mask_BT = batch.loss_mask
    factor_BT = torch.ones_like(start_BT)
    if name == "sapo":
        factor_BT = torch.where(advantages_BT > 0, 2 / 1.0, 2 / 1.05).double()
    torch.testing.assert_close(
        result.loss_BT[mask_BT], (-factor_BT * advantages_BT)[mask_BT], rtol=1e-6, atol=0
    )
    torch.testing.assert_close(gradient(term, start_BT, batch), -advantages_BT * weights_BT)
    assert (result.metrics_BT["ratio/mean"][mask_BT] == 1).all()
    assert (result.metrics_BT["approx_kl"][mask_BT] == 0).all()
    if "clip_fraction" in result.metrics_BT:
        assert (result.metrics_BT["clip_fraction"][mask_BT] == 0).all()


@pytest.mark.parametrize("name", [*DEFAULTS, "clip_cov", "nll", "kl", "entropy"])
def test_nothing_outside_the_mask_reaches_loss_or_gradient(name: str) -> None:
    term = loss_term(name)
    new_BT, batch = example(3)
    entropy_BT = new_BT.detach().abs()
    dirty_BT = torch.where(batch.loss_mask, new_BT, torch.nan)

    def spoil(values_BT: Tensor | None) -> Tensor:
        assert values_BT is not None
        return values_BT.masked_fill(~batch.loss_mask, torch.inf)

    spoilt = replace(
        batch,
        old_logprobs=spoil(batch.old_logprobs),
        ref_logprobs=spoil(batch.ref_logprobs),
    )
    weights_BT = batch.require("token_weights", made_by="test")
    found = []
    for logprobs_BT, which in ((new_BT, batch), (dirty_BT, spoilt)):
        leaf_BT = logprobs_BT.clone().requires_grad_()
        loss = SumLoss((term,))
        total = weighted_sum(loss(PolicyTerms(leaf_BT, entropy_BT), which).loss_BT, weights_BT)
        if name != "entropy":
            total.backward()
        found.append((total.detach(), leaf_BT.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", [*DEFAULTS, "clip_cov", "nll"])
def test_a_row_without_trained_tokens_gives_zero(name: str) -> None:
    new_BT, batch = example(4)
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    batch = replace(batch, token_weights=torch.zeros_like(new_BT))
    assert reduced(loss_term(name), new_BT, batch).item() == 0
    assert (gradient(loss_term(name), new_BT, batch) == 0).all()
    # A mean over no tokens is 0, not NaN, which only the weights would hide.
    assert loss_term(name)(PolicyTerms(new_BT), batch).loss_BT.isfinite().all()


def test_a_sample_without_advantage_is_not_imitated() -> None:
    """Such as all samples of a prompt that none of them solves."""
    new_BT, batch = example(4)
    batch = replace(batch, advantages=torch.zeros_like(new_BT))
    found = loss_term("nll")(PolicyTerms(new_BT), batch)
    assert (found.loss_BT == 0).all()
    assert (found.metrics_BT["nll/positive_fraction"] == 0).all()


@pytest.mark.parametrize("name", ORACLES)
def test_metrics_keep_no_graph_of_the_forward_pass(name: str) -> None:
    new_BT, batch = example(4)
    found = ORACLES[name][0](PolicyTerms(new_BT.requires_grad_()), batch)
    assert found.loss_BT.requires_grad
    assert not any(values_BT.requires_grad for values_BT in found.metrics_BT.values())


@pytest.mark.parametrize("name", ORACLES)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 5)))
@settings(max_examples=8)
def test_order_padding_and_split_change_nothing(name: str, seed: int, cuts: set[int]) -> None:
    """In float32, with weights of all rows, as a step is trained."""
    term = ORACLES[name][0]
    new64_BT, batch = example(seed, rows=6)
    new_BT = new64_BT.float()
    in_float32: dict[str, Any] = {
        spec.name: value.float()
        for spec in fields(batch)
        if isinstance(value := getattr(batch, spec.name), Tensor) and value.is_floating_point()
    }
    batch = replace(batch, **in_float32)
    whole = reduced(term, new_BT, batch)
    whole_BT = gradient(term, new_BT, batch)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [0, *sorted(cuts), 6]
    total, grads_BT = torch.zeros(()), torch.zeros_like(whole_BT)
    for begin, end in pairwise(bounds):
        rows = order[begin:end]
        part = batch.select(rows)
        longest = int(part.lengths.max())
        part = RolloutBatch.concat([part.trim(longest), padding(7)])
        wide_BT = torch.zeros(part.tokens.shape)
        wide_BT[: len(rows), :longest] = new_BT[rows][:, :longest]
        total = total + reduced(term, wide_BT, part)
        grads_BT[rows, :longest] = gradient(term, wide_BT, part)[: len(rows), :longest]
    # Relative to the size of the summands, which may cancel.
    scale = whole_BT.abs().max().item()
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(grads_BT, whole_BT, rtol=1e-6, atol=1e-6 * scale)


def padding(width: int) -> RolloutBatch:
    """A row that is all padding, as fillers and longer neighbours make it."""
    zeros_BT = torch.zeros(1, width)
    return replace(
        rollout_batch(1, prompt=1, longest=width - 1),
        loss_mask=zeros_BT.bool(),
        old_logprobs=zeros_BT,
        ref_logprobs=zeros_BT,
        advantages=zeros_BT,
        chosen_tokens=zeros_BT.bool(),
        token_weights=zeros_BT,
    )


def test_enormous_ratios_stay_finite() -> None:
    new_BT, batch = example(5)
    for name in DEFAULTS:
        for shift in (500.0, -500.0):
            grad_BT = gradient(loss_term(name), new_BT + shift, batch)
            assert grad_BT.isfinite().all(), name


def test_importance_weights_multiply_the_policy_terms_alone() -> None:
    new_BT, batch = example(6)
    weights_BT = torch.rand(new_BT.shape, dtype=torch.float64)
    corrected = replace(batch, importance_weights=weights_BT)
    loss = SumLoss(
        tuple(loss_term(name, coef=2.0) for name in ("ppo_clip", "kl", "entropy", "nll"))
    )
    terms = PolicyTerms(new_BT, new_BT.abs())
    plain, found = loss(terms, batch), loss(terms, corrected)
    torch.testing.assert_close(found.parts_BT["policy"], plain.parts_BT["policy"] * weights_BT)
    for part in ("kl", "entropy", "nll"):
        assert torch.equal(found.parts_BT[part], plain.parts_BT[part])


def test_clip_metrics_count_what_the_clip_cuts() -> None:
    new_BT, batch = example(7)
    advantages_BT = batch.require("advantages", made_by="test")
    mask_BT = batch.loss_mask
    ratio_BT = (new_BT - batch.require("old_logprobs", made_by="test")).exp()
    cispo_BT = loss_term("cispo", clip_low=0.2, clip_high=0.3)(PolicyTerms(new_BT), batch)
    outside_BT = (ratio_BT < 0.8) | (ratio_BT > 1.3)
    assert torch.equal(cispo_BT.metrics_BT["clip_fraction"][mask_BT] == 1, outside_BT[mask_BT])
    gmpo_BT = loss_term("gmpo")(PolicyTerms(new_BT), batch).metrics_BT["clip_fraction"] == 1
    cut_BT = torch.where(advantages_BT >= 0, ratio_BT > math.exp(0.4), ratio_BT < math.exp(-0.4))
    assert torch.equal(gmpo_BT[mask_BT], cut_BT[mask_BT])


@pytest.mark.parametrize("seed", range(5))
def test_topr_counts_tokens_of_bad_responses_that_have_become_likelier(seed: int) -> None:
    new_BT, batch = example(seed)
    found_BT = loss_term("topr")(PolicyTerms(new_BT), batch).metrics_BT["clip_fraction"]
    for i, row in enumerate(rows_of(new_BT, new_BT, batch)):
        truncated = [math.prod(row.ratios) > 1 and advantage < 0 for advantage in row.adv]
        assert (found_BT[i][batch.loss_mask[i]] == 1).tolist() == truncated


RATIOS: dict[str, Callable[[Row], float]] = {
    "gspo": lambda row: math.prod(row.ratios) ** (1 / len(row.new)),
    "gspo_token": lambda row: math.prod(row.ratios) ** (1 / len(row.new)),
    "gmpo": lambda row: -gmpo(row)[0] / row.adv[0],
    "topr": lambda row: min(math.prod(row.ratios), 1.0),
}
"""Ratio of the terms that have one for each row; that of all others is the token's."""


@pytest.mark.parametrize("name", sorted(set(ORACLES) - {"nll", "kl_k1", "kl_k3"}))
def test_every_term_reports_its_ratio_and_the_divergence_from_the_old_policy(name: str) -> None:
    new_BT, batch = example(7)
    found = ORACLES[name][0](PolicyTerms(new_BT), batch).metrics_BT
    for i, row in enumerate(rows_of(new_BT, new_BT, batch)):
        mine = batch.loss_mask[i]
        ratios = [RATIOS[name](row)] * len(row.new) if name in RATIOS else row.ratios
        assert found["ratio/mean"][i][mine].tolist() == pytest.approx(ratios)
        divergences = [ratio - 1 - math.log(ratio) for ratio in row.ratios]
        assert found["approx_kl"][i][mine].tolist() == pytest.approx(divergences)


def test_the_gate_of_sapo_has_slope_one_at_ratio_one_and_flattens() -> None:
    term = loss_term("sapo")
    _, batch = example(8)
    old_BT = batch.require("old_logprobs", made_by="test")
    slopes = [
        term(PolicyTerms(old_BT + gap), batch).metrics_BT["sapo/gate"].max().item()
        for gap in (0.0, 0.7, 2.0)
    ]
    assert slopes[0] == 1
    assert slopes[0] > slopes[1] > slopes[2]
