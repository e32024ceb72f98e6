"""The checks of `roll.testing` accept right parts, and each rule is broken by a wrong one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr

from roll.core.completion import Completion
from roll.core.metrics import Metrics
from roll.extend import (
    Advantage,
    AdvantageShaping,
    ChatTemplate,
    Curriculum,
    Estimate,
    Filter,
    Group,
    LossTerm,
    PolicyLoss,
    PolicyTerms,
    Prompt,
    Rewards,
    RewardShaping,
    RolloutBatch,
    RolloutLoop,
    SampleAdvantage,
    SampleMask,
    Samples,
    SampleWeight,
    Seen,
    Tensor,
    TokenLoss,
    TrackedRun,
    Writing,
    log_ratio,
    total_rewards,
)
from roll.testing import (
    check_advantage,
    check_advantage_shaping,
    check_chat_template,
    check_curriculum,
    check_filter,
    check_loss_term,
    check_reward_shaping,
    check_rollout_loop,
    check_sample_mask,
    check_sample_weight,
    check_tracker,
)
from tests import own_parts

RIGHT: list[tuple[Callable[[Any], object], Any]] = [
    (check_advantage, own_parts.GroupRelative()),
    (check_advantage, own_parts.GroupRelative(std="none")),
    (check_advantage, own_parts.EveryToken()),
    (check_loss_term, own_parts.Clipped()),
    (check_loss_term, own_parts.Nearness(coef=0.1)),
    (check_reward_shaping, own_parts.Halved()),
    (check_sample_mask, own_parts.Lucky()),
    (check_advantage_shaping, own_parts.Doubled()),
    (check_curriculum, own_parts.Band()),
    (check_filter, own_parts.Equal()),
    (check_chat_template, own_parts.Markers()),
    (check_rollout_loop, own_parts.Plain()),
    (check_rollout_loop, own_parts.SecondThoughts()),
]


@pytest.mark.parametrize(("check", "part"), RIGHT, ids=lambda x: getattr(x, "kind", ""))
def test_a_right_part_passes(check: Callable[[Any], object], part: Any) -> None:
    check(part)


def test_a_tracker_passes_that_takes_odd_records() -> None:
    class Quiet:
        def __init__(self, run: TrackedRun, digits: int) -> None: ...
        def log(self, step: int, record: Mapping[str, float]) -> None: ...
        def close(self) -> None: ...

    check_tracker(Quiet, kwargs={"digits": 3})
    with pytest.raises(AssertionError, match="a record without a reward: Traceback"):
        check_tracker(own_parts.Table)


class Noisy(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) + torch.rand(len(samples))


class Cumulative(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples).cumsum(0)


class ByNumber(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) + samples.group_ids


class Writes(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        assert samples.rewards is not None
        samples.rewards.sub_(samples.rewards.mean())
        return samples.rewards


class Undivided(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        rewards_B = total_rewards(samples)
        return (rewards_B - rewards_B.mean()) / rewards_B.std()


class ReadsTokens(SampleAdvantage):
    def per_sample(self, samples: Samples) -> Tensor:
        return samples.loss_mask.sum(1).double()  # type: ignore[union-attr]


class WholeRow(Advantage):
    """Reads values of tokens that are not trained."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        values_BT = batch.require("values", made_by="add_values")
        return Estimate(values_BT - values_BT.mean(1, keepdim=True))


class WholeWidth(Advantage):
    """Divides by the width of the batch, padding included."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        width = batch.tokens.shape[1]
        return Estimate(total_rewards(batch)[:, None] / width * batch.loss_mask)


class Reduced(LossTerm):
    """Divides by the number of tokens of the micro-batch."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT.square() / batch.loss_mask.sum())


class Detached(LossTerm):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT.detach().square())


class Surrogate(LossTerm):
    """Has another gradient than its value says."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT.detach() * terms.logprobs_BT)


class Overflowing(PolicyLoss):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="the driver")
        return TokenLoss(-(20 * log_ratio(terms, batch)).exp() * advantages_BT)


class Backwards(PolicyLoss):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="the driver")
        return TokenLoss(log_ratio(terms, batch).clamp(-20, 20).exp() * advantages_BT)


class NeedsOld(LossTerm):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss((terms.logprobs_BT - batch.old_logprobs).square())  # type: ignore[operator]


class Peeking(LossTerm):
    """Reads log-probs of the prompt."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        old_BT = batch.require("old_logprobs", made_by="the driver")
        return TokenLoss(terms.logprobs_BT.square() * old_BT.sum(1, keepdim=True))


class Unread(LossTerm):
    """Reads entropies, and says that it does not."""

    reads_entropy = False

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT * terms.entropy_BT)  # type: ignore[operator]


class Attached(LossTerm):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        loss_BT = terms.logprobs_BT.square()
        return TokenLoss(loss_BT, metrics_BT={"size": loss_BT})


class Ordered(RewardShaping):
    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        return Rewards(rewards.total_B.cumsum(0), rewards.baseline_B), Metrics()


class NoMetrics(RewardShaping):
    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        return rewards  # type: ignore[return-value]


class Forgetful(RewardShaping):
    """Says nothing of what it has kept."""

    _steps: float = PrivateAttr(0.0)

    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        self._steps += 1
        return rewards.map(lambda values_B: values_B / self._steps), Metrics()

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        self._steps = 0.0


class FirstHalf(SampleMask):
    def __call__(self, samples: Samples) -> Tensor:
        return torch.arange(len(samples)) < len(samples) / 2


class Negative(SampleWeight):
    def __call__(self, samples: Samples) -> Tensor:
        return total_rewards(samples) - 0.5


class OverAll(AdvantageShaping):
    """Takes the mean over padding, too."""

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        return advantages_BT - advantages_BT.mean(), Metrics()


class Flips(Curriculum):
    def chance(self, prompt: Prompt, seen: Seen) -> float:
        return random.choice((0.0, 1.0))


class Percent(Curriculum):
    def chance(self, prompt: Prompt, seen: Seen) -> float:
        return 100 * (seen.pass_rate or 0.0)


class WeighsNothing(Curriculum):
    def chance(self, prompt: Prompt, seen: Seen) -> float:
        return 1.0

    def source_factor(self, name: str, pass_rate: float | None) -> float:
        return pass_rate or 0.0


class Mean(Filter):
    def __call__(self, group: Group) -> str | None:
        return "low" if sum(group.rewards) / len(group.rewards) < 0 else None


class Wordy(Filter):
    def __call__(self, group: Group) -> str | None:
        return len(group.rewards)  # type: ignore[return-value]


class _Rendering(ChatTemplate):
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asks: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        return self.of([dict(turn) for turn in messages], asks)

    def of(self, messages: list[dict[str, Any]], asks: bool) -> str:
        return ""


class Shouting(_Rendering):
    def of(self, messages: list[dict[str, Any]], asks: bool) -> str:
        return "".join(turn["content"].upper() for turn in messages)


class Counting(_Rendering):
    """Begins with a number that every message changes."""

    def of(self, messages: list[dict[str, Any]], asks: bool) -> str:
        return f"{len(messages)} " + " ".join(turn["content"] for turn in messages)


class Long(RolloutLoop):
    async def responses(self, writing: Writing) -> list[Completion]:
        first = await writing.generate(n=writing.wanted)
        return [one + (await writing.generate(one))[0] for one in first]


class Dictated(RolloutLoop):
    async def responses(self, writing: Writing) -> list[Completion]:
        return [writing.given("42")] * writing.wanted


class Penalized(RolloutLoop):
    async def responses(self, writing: Writing) -> list[Completion]:
        sampling = replace(writing.sampling, presence_penalty=0.5)
        return await writing.generate(n=writing.wanted, sampling=sampling)


class Drawn(RolloutLoop):
    async def responses(self, writing: Writing) -> list[Completion]:
        limit = random.randint(1, 32)
        return await writing.generate(
            n=writing.wanted, sampling=replace(writing.sampling, max_new_tokens=limit)
        )


WRONG: list[tuple[Callable[[Any], object], Any, str]] = [
    (check_advantage, Noisy(), "two calls on the same samples give different advantages"),
    (check_advantage, Cumulative(), "advantages depend on the order of the samples: at "),
    (check_advantage, ByNumber(), "advantages depend on the numbers of the group ids"),
    (check_advantage, Writes(), "Writes wrote into `rewards`, which others read"),
    (check_advantage, Undivided(), "rewards that are all 0: algorithm.advantage: "),
    (check_advantage, ReadsTokens(), "'SampleTable' object has no attribute 'loss_mask'"),
    (check_advantage, own_parts.Wide(), "returned a float64 tensor of shape [12, 1]"),
    (check_advantage, WholeRow(), "advantages depend on"),
    (check_advantage, WholeWidth(), "advantages depend on padding"),
    (check_loss_term, Reduced(), "the sum over micro-batches in another order is not that"),
    (check_loss_term, Detached(), "Detached has no gradient: is its loss made of `terms`"),
    (check_loss_term, Surrogate(), "and the loss changes by"),
    (check_loss_term, Overflowing(), "has a loss that is not finite"),
    (check_loss_term, Backwards(), "is a sign wrong?"),
    (check_loss_term, NeedsOld(), "one update per step (no old_logprobs): algorithm.loss: "),
    (check_loss_term, Peeking(), "numbers outside the loss mask change the loss inside"),
    (check_loss_term, Unread(), "unsupported operand type(s) for *: 'Tensor' and 'NoneType'"),
    (check_loss_term, Attached(), "the metric size has a gradient; detach it"),
    (check_loss_term, own_parts.Scalar(), "expected a float tensor of shape [12, "),
    (check_reward_shaping, Ordered(), "rewards depend on the order of the samples"),
    (check_reward_shaping, NoMetrics(), "expected a pair of Rewards and Metrics"),
    (check_reward_shaping, Forgetful(), "after `load` the part does not go on as that which"),
    (check_sample_mask, FirstHalf(), "the result depends on the order of the samples"),
    (check_sample_mask, own_parts.Counted(), "expected a bool tensor of shape [12]"),
    (check_sample_weight, Negative(), "expected weights above zero"),
    (check_advantage_shaping, OverAll(), "advantages depend on"),
    (check_curriculum, Flips(), "two calls for a prompt with pass rate"),
    (
        check_curriculum,
        Percent(),
        "returned 25.0 for prompt check:0; expected a chance from 0 to 1",
    ),
    (check_curriculum, WeighsNothing(), "expected a factor above zero"),
    (check_filter, Mean(), "a group with rewards []: rollout.filters.0: "),
    (check_filter, Wordy(), "returned 4 (int) for the group of prompt check:0"),
    (check_chat_template, Shouting(), "is not in the text"),
    (check_chat_template, Counting(), "which must begin with the two"),
    (check_rollout_loop, own_parts.Few(), "4 responses are wanted, and the loop returned"),
    (check_rollout_loop, Penalized(), "rollout.loop: presence_penalty changes the distribution"),
    (check_rollout_loop, Long(), "tokens, and sampling.max_new_tokens is 32"),
    (check_rollout_loop, Dictated(), "a response has no token of the policy"),
    (check_rollout_loop, Drawn(), "the same seed gives other responses"),
]


@pytest.mark.parametrize(
    ("check", "part", "told"), WRONG, ids=[type(part).__name__ for _, part, _ in WRONG]
)
def test_a_wrong_part_is_told_what_it_broke(
    check: Callable[[Any], object], part: Any, told: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        check(part)
    assert told in str(caught.value)


def test_a_term_that_stops_gradients_on_purpose_can_say_so() -> None:
    check_loss_term(Surrogate(), stops_gradients=True)
