"""What settings of sampling do is the same in every engine, and defined by a few lines here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError
from tests.contract.engine_rig import PROMPT, Rig, rescore
from tests.contract.test_engine_contract import rig  # noqa: F401 - a fixture


def assert_as_the_trainer(completion: Completion, rig: Rig) -> None:  # noqa: F811
    """Every log-prob, that of the last token too, is the one that a forward pass finds."""
    expected = rescore(rig.oracle, PROMPT, completion.tokens)
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-5


def test_a_stop_token_ends_a_response_and_is_its_last_token(rig: Rig) -> None:  # noqa: F811
    rig.push_oracle()
    whole = rig.generate(n=8, tokens=40, seed=21)
    stops = tuple(sorted(set(whole[0].tokens[5:7])))
    shorter = rig.generate(n=8, tokens=40, seed=21, stop_token_ids=stops)
    for before, ended in zip(whole, shorter, strict=True):
        places = (i for i, token in enumerate(before.tokens, 1) if token in stops)
        length = next(places, len(before))
        assert ended.tokens == before.tokens[:length]
        stopped = ended.tokens[-1] in stops
        assert ended.finish is (FinishReason.STOP if stopped else before.finish)
        assert_as_the_trainer(ended, rig)
    assert any(set(stops) & set(one.tokens) for one in whole[1:])


@torch.no_grad()
def distributions(
    rig: Rig,  # noqa: F811
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> Tensor:
    """Log-probs `[T, V]` before each token of a response, one logit after the other."""
    logits = rig.oracle(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    rows = []
    for place, row in enumerate(logits.double()):
        for token, bias in (logit_bias or {}).items():
            row[token] += bias
        counts = Counter(tokens[:place])
        for token in {*PROMPT, *counts}:
            row[token] *= repetition_penalty if row[token] < 0 else 1 / repetition_penalty
        for token, count in counts.items():
            row[token] -= frequency_penalty * count + presence_penalty
        if temperature > 0:
            row /= temperature
            shares = (row - row.max()).exp()
            row[shares < min_p] = -torch.inf
        rows.append(row.log_softmax(-1))
    return torch.stack(rows)


def assert_drawn(completion: Completion, log_probs: Tensor) -> None:
    chosen = log_probs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - chosen).abs().max() < 1e-5


BIAS = {4: 1.5, 7: -100.0, 9: 3.0, 30: -2.0}
REPETITION: dict[str, Any] = {"repetition_penalty": 1.4}
OCCURRENCE: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.2}
ALL = {**REPETITION, **OCCURRENCE, "logit_bias": BIAS}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
@pytest.mark.parametrize(
    "settings",
    [
        REPETITION,
        {"repetition_penalty": 0.7},
        OCCURRENCE,
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.5},
        {"logit_bias": BIAS},
        {"min_p": 0.95},
        {**ALL, "min_p": 0.6},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_what_changes_the_distribution_is_in_tokens_and_log_probs(
    rig: Rig,  # noqa: F811
    settings: dict[str, Any],
    temperature: float,
) -> None:
    if rig.kind == "sglang" and set(settings) != {"logit_bias"}:
        with pytest.raises(EngineError, match=f"has ({'|'.join(settings)}): with SGLang, "):
            rig.generate(temperature=temperature, **settings)
        return
    rig.push_oracle()
    changed = []
    siblings = 4 if temperature else 1  # vLLM writes a greedy response only once
    common: dict[str, Any] = {"tokens": 40, "temperature": temperature, "ignore_eos": True}
    for one in rig.generate(n=siblings, **common, **settings):
        log_probs = distributions(rig, one.tokens, temperature=temperature, **settings)
        assert_drawn(one, log_probs)
        if temperature == 0:
            assert one.tokens.tolist() == log_probs.argmax(-1).tolist()
        plain = distributions(rig, one.tokens, temperature=temperature)
        changed.append((plain - log_probs).nan_to_num().abs().max() > 1e-3)
    assert any(changed) or (temperature == 0 and set(settings) == {"min_p"})


def test_a_forbidden_token_does_not_occur(rig: Rig) -> None:  # noqa: F811
    rig.push_oracle()
    plain = rig.generate(n=16, tokens=30, ignore_eos=True)
    counts = Counter(token for one in plain for token in one.tokens)
    common = {token: -100.0 for token, _ in counts.most_common(20)}
    without = rig.generate(n=16, tokens=30, ignore_eos=True, logit_bias=common)
    assert not set(common) & {token for one in without for token in one.tokens}


def test_candidates_of_min_p_are_those_near_the_likeliest_and_all_of_them(rig: Rig) -> None:  # noqa: F811
    if rig.kind == "sglang":
        return
    rig.push_oracle()
    (first,) = distributions(rig, [0]).exp()
    shares, order = (first / first.max()).sort(descending=True)
    limit = float(shares[4:6].mean())
    drawn = rig.generate(n=200, tokens=1, ignore_eos=True, min_p=limit)
    assert {one.tokens[0] for one in drawn} == set(order[:5].tolist())
