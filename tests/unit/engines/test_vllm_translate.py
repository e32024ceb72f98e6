"""Outputs of vLLM as completions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roll.core.completion import FinishReason
from roll.core.errors import EngineError
from roll.strategy.vllm.translate import finished


def output(reason: str | None) -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=[3, 4],
        logprobs=SimpleNamespace(logprobs=[-0.5, -0.25]),
        weight_versions=[SimpleNamespace(version="7", start=0)],
        finish_reason=reason,
    )


@pytest.mark.parametrize(("reason", "wanted"), [("stop", "stop"), (None, "abort")])
def test_an_output_keeps_its_end(reason: str | None, wanted: str) -> None:
    completion = finished(output(reason), 1)
    assert completion.finish is FinishReason(wanted)
    assert list(completion.tokens) == [4]


@pytest.mark.parametrize("reason", ["error", "repetition"])
def test_a_request_that_vllm_gave_up_is_an_error_that_says_what_may_be_wrong(reason: str) -> None:
    with pytest.raises(EngineError, match=f"ended a request with '{reason}' after 2 tokens.*log"):
        finished(output(reason))
