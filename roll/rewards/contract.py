"""Check of the rules that every reward must follow, for users to call from their own tests.

from my_rewards import brief_and_right
from roll.rewards.contract import check_reward

def test_my_reward_keeps_the_contract():
    check_reward(brief_and_right, answer="42")
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll.core.completion import Completion, FinishReason
from roll.core.types import Prompt, Sample
from roll.rewards.api import RewardContext
from roll.rewards.loading import BoundReward, Work, bind_reward

RESPONSES: Mapping[str, str] = {
    "an empty response": "",
    "white space": " \n\t ",
    "a plain sentence": "The answer is 42.",
    "a boxed answer": "<think>6 * 7</think> So it is \\boxed{42}.",
    "thinking that never ends": "<think> wait, wait, wait",
    "a box that never ends": "\\boxed{" * 50,
    "a very long response": "so it goes on and on " * 20_000,
    "odd unicode": "\u202e\u0000\ufffd\U0001f9ee \u0661\u0662 \u00bd \u200b e\u0301",
    "a huge power": "\\boxed{9^{9^{9^{9^9}}}}",
    "deep nesting": "\\boxed{" + "(" * 5000 + ")" * 5000 + "}",
    "nested brackets": "\\boxed{" + "(" * 500 + "7" + ")" * 500 + "}",
    "code and quotes": '\'; import os; """ {} %s {0} \\',
}
"""Responses that the check tries, by a short description: some that a policy in training really
writes, and worse ones."""


def check_reward(
    fn: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    answer: str = "42",
    extra: Mapping[str, Any] | None = None,
    responses: Sequence[str] = (),
    deterministic: bool = True,
    per: Literal["sample", "group"] = "sample",
) -> None:
    """Raise AssertionError, which names the response, if a reward breaks one of the rules.

    The rules: a reward returns a finite score for every response, also if the ground truth is
    empty; two calls on the same sample return the same result; and the result can be pickled.

    Args:
        fn: reward function itself, the object that `fn` of the config names.
        kwargs: keyword arguments of the function, as in the config.
        answer: ground truth that the reward understands.
        extra: further data columns that the reward needs.
        responses: more responses to try.
        deterministic: False for a reward that uses random numbers, such as a judge model that
            samples.
        per: `group` for a reward that takes the list of all samples of a prompt, as in the config;
            it gets each response together with two others, and alone.

    Raises:
        AssertionError: the reward breaks a rule.
        ConfigError: `fn` is not a function that takes a sample and `kwargs`.
    """
    ctx = RewardContext(name="contract", seed=0)
    bound = bind_reward(fn, kwargs or {}, ctx, label="the reward")
    cases = [*RESPONSES.items(), *((f"your response {i}", r) for i, r in enumerate(responses))]
    for what, response in cases:
        for truth in dict.fromkeys((answer, "")):
            sample = sample_of(response, answer=truth, extra=extra)
            others = [sample_of(text, answer=truth, extra=extra) for text in ("", answer)]
            for work in [sample] if per == "sample" else [[sample], [sample, *others]]:
                _check_verdict(bound, work, f"{what}, answer {truth!r}", deterministic)


def _check_verdict(bound: BoundReward, work: Work, case: str, deterministic: bool) -> None:
    """Raise AssertionError if the verdict changes when pickled, or at a second call."""
    verdict = _verdict(bound, work, case)
    if pickle.loads(pickle.dumps(verdict)) != verdict:
        raise AssertionError(f"{case}: {verdict} changes when pickled")
    if deterministic and (again := _verdict(bound, work, case)) != verdict:
        raise AssertionError(f"{case}: first {verdict}, then {again}")


def sample_of(response: str, *, answer: str, extra: Mapping[str, Any] | None = None) -> Sample:
    """Return a finished sample with the given response, for tests of rewards."""
    prompt = Prompt(
        id="contract:0",
        tokens=(1,),
        text="What is 6 * 7?",
        answer=answer,
        tag="default",
        extra=extra or {},
    )
    num_tokens = len(response.split())
    completion = Completion.of(
        [1] * num_tokens, [-0.5] * num_tokens, [0] * num_tokens, FinishReason.STOP
    )
    return Sample("0/contract:0/0", "0/contract:0", prompt, completion, response)


def _verdict(bound: BoundReward, work: Work, case: str) -> Any:
    """Score a sample or group and return the normalised reward or rewards; any exception becomes an
    AssertionError that names `case`."""
    try:
        value = bound.call(work)
        if bound.is_async:
            value = asyncio.run(value)
        return bound.result(work, value)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
