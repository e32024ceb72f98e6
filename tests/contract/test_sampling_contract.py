"""What settings of sampling do is the same in every engine, and defined by a few lines here."""

from __future__ import annotations

import torch

from roll.core.completion import Completion, FinishReason
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
