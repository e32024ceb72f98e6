"""Parts as users bring them: equal to built-in ones, and broken ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PrivateAttr

from roll.extend import (
    Advantage,
    AdvantageShaping,
    ChatTemplate,
    Completion,
    Curriculum,
    Estimate,
    Filter,
    Group,
    Last,
    LossTerm,
    Metrics,
    Need,
    PolicyLoss,
    PolicyTerms,
    Prompt,
    Record,
    Rewards,
    RewardShaping,
    RlvrConfig,
    RlvrPipeline,
    RolloutBatch,
    RolloutLoop,
    SampleAdvantage,
    SampleMask,
    Samples,
    SampleTable,
    SampleWeight,
    Seen,
    Siblings,
    Sum,
    Tensor,
    TokenLoss,
    TrackedRun,
    Writing,
    log_ratio,
    total_rewards,
)


class GroupRelative(SampleAdvantage):
    """The advantage `grpo`, written anew."""

    needs = frozenset({Need.SIBLINGS})
    std: Literal["group", "none"] = "group"
    eps: float = Field(default=1e-6, gt=0)

    def per_sample(self, samples: Samples) -> Tensor:
        rewards_B, siblings = total_rewards(samples), Siblings.of(samples.group_ids)
        centred_B = rewards_B - siblings.mean(rewards_B)
        return (
            centred_B / (siblings.std(rewards_B) + self.eps) if self.std == "group" else centred_B
        )


class EveryToken(Advantage):
    """The reward of the sample at each of its tokens."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        rewards_B = batch.require("rewards", made_by="assemble")
        return Estimate(rewards_B[:, None] * torch.ones_like(batch.loss_mask))


class Clipped(PolicyLoss):
    """The loss `ppo_clip`, written anew."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        ratio_BT = log_ratio(terms, batch).clamp(-20, 20).exp()
        bounded_BT = ratio_BT.clamp(1 - self.low, 1 + self.high)
        return TokenLoss(torch.maximum(-ratio_BT * advantages_BT, -bounded_BT * advantages_BT))


class Nearness(LossTerm):
    """The loss term `kl` with the estimator k2, written anew."""

    needs = frozenset({Need.REFERENCE})
    reads_advantages = False
    reads_entropy = False

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
        return TokenLoss(0.5 * (terms.logprobs_BT - ref_BT).square())


class Dividing(SampleAdvantage):
    """Raises an error."""

    by: float = 0.0

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) / (1 / self.by)


class Wide(SampleAdvantage):
    """Returns a shape that nobody expects."""

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples)[:, None]


class Endless(SampleAdvantage):
    """Returns numbers that are not finite."""

    def per_sample(self, samples: Samples) -> Tensor:
        return total_rewards(samples) / 0


class Unfinished(SampleAdvantage):
    """Has not the method that its base asks for."""


class Scalar(LossTerm):
    """Reduces the loss itself."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT.mean())


class Raising(LossTerm):
    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(terms.logprobs_BT * batch.bonus)  # type: ignore[attr-defined]


class Halved(RewardShaping):
    """The shaping `scale`, written anew."""

    factor: float = 0.5

    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        return rewards.map(lambda values_B: self.factor * values_B), Metrics()


class Centred(RewardShaping):
    """Reward minus the mean of all rewards so far, which checkpoints keep."""

    _total: float = PrivateAttr(0.0)
    _count: int = PrivateAttr(0)

    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        self._total += rewards.total_B.sum().item()
        self._count += len(samples)
        mean = self._total / self._count
        return rewards.map(lambda values_B: values_B - mean), Metrics({"mean": Last(mean)})

    def state(self) -> dict[str, float]:
        return {"total": self._total, "count": self._count}

    def load(self, state: Mapping[str, float]) -> None:
        self._total, self._count = state["total"], int(state["count"])


class Lucky(SampleMask):
    """Leaves out samples without any reward."""

    def __call__(self, samples: Samples) -> Tensor:
        return samples.require("rewards", made_by="assemble") > 0


class Counted(SampleMask):
    """Returns numbers where a bool is expected."""

    def __call__(self, samples: Samples) -> Tensor:
        return samples.group_ids


class Weightless(SampleWeight):
    """Returns weights of zero."""

    def __call__(self, samples: Samples) -> Tensor:
        return torch.zeros(len(samples))


class Doubled(AdvantageShaping):
    """Twice the advantages, also outside the mask."""

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        return 2 * advantages_BT + 1.0, Metrics({"added": Last(1.0)})


class Equal(Filter):
    """The filter `equal_rewards`, written anew."""

    def __call__(self, group: Group) -> str | None:
        if not group.rewards:
            return "no sample has a reward: the rewards failed"
        same = len(set(group.rewards)) < 2
        return f"all rewards equal to {group.rewards[0]:g}" if same else None


class Band(Curriculum):
    """The curriculum `pass_rate`, written anew."""

    low: float = 0.1
    high: float = 0.9
    outside: float = 0.1

    def chance(self, prompt: Prompt, seen: Seen) -> float:
        return self._chance(seen.pass_rate)

    def source_factor(self, name: str, pass_rate: float | None) -> float:
        return self._chance(pass_rate)

    def _chance(self, rate: float | None) -> float:
        if rate is None or self.low <= rate <= self.high:
            return 1.0
        inside = rate / self.low if rate < self.low else (1 - rate) / (1 - self.high)
        return self.outside + (1 - self.outside) * inside


class Sure(Curriculum):
    """Says more than certainty."""

    def chance(self, prompt: Prompt, seen: Seen) -> float:
        return 1.0 + len(prompt.tokens)


class Plain(RolloutLoop):
    """What a run does without a loop."""

    async def responses(self, writing: Writing) -> list[Completion]:
        return await writing.generate(n=writing.wanted)


class SecondThoughts(RolloutLoop):
    """Half of each response, words that nobody trains on, and then the other half."""

    words: str = " wait "

    async def responses(self, writing: Writing) -> list[Completion]:
        given = writing.given(self.words)
        half = (writing.sampling.max_new_tokens - len(given)) // 2
        short = replace(writing.sampling, max_new_tokens=half)
        whole = []
        for first in await writing.generate(n=writing.wanted, sampling=short):
            before = first + given
            [second] = await writing.generate(before, sampling=short)
            whole.append(before + second)
        return whole


class Few(RolloutLoop):
    """Returns fewer responses than are wanted."""

    async def responses(self, writing: Writing) -> list[Completion]:
        return await writing.generate(n=1)


class Stumbling(RolloutLoop):
    async def responses(self, writing: Writing) -> list[Completion]:
        found = await writing.generate(n=writing.wanted)
        return [found[i] for i in (writing.wanted, 0)]


class Markers(ChatTemplate):
    """The chat template of the tiny tokenizer, written anew."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asks: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        text = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)
        return text + "<assistant>" * asks


class Mute(ChatTemplate):
    """Reads a key that no message has."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asks: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        return str(messages[0]["words"])


class Table:
    """A tracker that writes the reward of every step into a file."""

    def __init__(self, run: TrackedRun, digits: int = 2) -> None:
        self.digits, self.file = digits, run.folder / "table.csv"

    def log(self, step: int, record: Record) -> None:
        with self.file.open("a") as file:
            file.write(f"{step},{record['reward/mean']:.{self.digits}f}\n")

    def close(self) -> None:
        """Nothing is open."""


class BestConfig(RlvrConfig):
    pipeline: str = "tests.own_parts:BestFirst"
    kept: int = Field(default=2, ge=1)
    """Number of samples of a prompt that are trained on, those with the highest rewards."""


class BestFirst(RlvrPipeline):
    """Trains on the best samples of each prompt alone."""

    config_class = BestConfig

    def learn(self, table: SampleTable, step: int) -> Metrics:
        assert isinstance(self.config, BestConfig)
        rewards_B = total_rewards(table)
        place_B = torch.zeros(len(table))
        for group in table.group_ids.unique():
            rows = (table.group_ids == group).nonzero()[:, 0]
            place_B[rows[rewards_B[rows].argsort(descending=True)]] = torch.arange(
                len(rows), dtype=torch.float32
            )
        kept = table.keep(place_B < self.config.kept)
        return super().learn(kept, step) | Metrics({"kept": Sum(int(kept.trained.sum()))})


class Renamed(RlvrPipeline):
    """The pipeline `rlvr` under another name."""


NO_CLASS = 3
