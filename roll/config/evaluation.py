"""Settings of `roll eval`: a set of questions, and how a model is served that answers them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.errors import nearest
from roll.config.sections.data import RenderConfig, SourceConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import ClusterConfig, DeviceList
from roll.config.sections.reward import RewardConfig
from roll.config.sections.rollout import HealthConfig
from roll.config.sections.sampling import SamplingConfig, engine_sampling_problems
from roll.config.sections.services.judge import UrlJudgeConfig
from roll.config.sections.training import InferRole


class ChoicesConfig(Config):
    """Columns of a question whose right option stands apart from the wrong ones. The options get an
    order that depends on the row alone, so that it is the same for every model. The row then has
    the column `choices`, the list of options, and `choice`, the letter of the right one."""

    right: str
    """Column with the right option."""
    wrong: tuple[str, ...] = Field(min_length=1, max_length=25)
    """Columns with the wrong options."""


class QuestionData(RenderConfig):
    """Rows of a set of questions, and the way from a row to a prompt."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    max_prompt_tokens: int = Field(default=4096, ge=1)
    """Longest prompt, in tokens. Longer prompts are left out, and their number is reported."""
    template: str | None = None
    """Jinja template of the question, in which the columns of the row have their names, in place of
    a column `columns.prompt`. null: that column is the question."""
    choices: ChoicesConfig | None = None
    """Options in columns of their own, to be put in order. null: there are none."""

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        """Refuse a column of questions beside a template of them."""
        changed = [source.columns.changed("prompt", "messages") for source in self.sources]
        if self.template is not None and any(changed):
            raise ValueError(
                "`template` makes the question; drop `columns.prompt` and `columns.messages` (the "
                "template can use every column by its name)"
            )
        return self


class QuestionSet(Config):
    """Set of questions: data, rewards that judge the responses, and sampling. The keys are those of
    a run file."""

    data: QuestionData
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Rewards by name. Their weighted sum is the reward of a response; the score of each is
    reported, too, if there are several. With `weight: 0` a reward is only reported."""
    judges: dict[str, UrlJudgeConfig] = {}
    """Models behind servers that decide rewards, by name; a reward names one in `judge.by`."""
    sampling: SamplingConfig = SamplingConfig()
    samples_per_prompt: int = Field(default=1, ge=1)
    """Number of responses to each question: the n of mean@n, maj@n and pass@k. A greedy evaluation
    has one, since all would be equal."""
    pass_score: float = 1.0
    """Reward from which on a response passes."""

    @model_validator(mode="after")
    def _rewards_work_alone(self) -> Self:
        """Require rewards that need no devices and no trainer, and judges that exist and are
        asked."""
        asked = set()
        for name, reward in self.rewards.items():
            if reward.model is not None or reward.process or reward.pool is not None:
                raise ValueError(
                    f"rewards.{name}: `model`, `process` and `pool` concern training; use `fn`, "
                    "`worker`, `judge` or `remote` in a set of questions"
                )
            if reward.judge is not None:
                asked.add(reward.judge.by)
                if reward.judge.by not in self.judges:
                    hint = nearest(reward.judge.by, self.judges)
                    raise ValueError(f"rewards.{name}.judge.by: no judge {reward.judge.by!r}{hint}")
        for name in self.judges:
            if name not in asked:
                raise ValueError(f"judges.{name}: no reward asks it (`judge.by`); drop it")
        return self

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of a prompt and its response together."""
        return self.data.max_prompt_tokens + self.sampling.max_new_tokens

    def sharers(self, judge: str) -> int:
        """Return the number of reward workers that ask the judge of this name."""
        asking = (one for one in self.rewards.values() if one.judge and one.judge.by == judge)
        return sum(one.workers for one in asking)


class ServedConfig(Config):
    """Settings of the engines that serve a model without a trainer. The keys are those of a run
    file; `request_timeout_s` is there in `rollout`."""

    seed: int = 0
    """Seed of the samples."""
    cluster: ClusterConfig = ClusterConfig()
    pools: dict[str, DeviceList] = Field(min_length=1)
    """Device pools: name -> device numbers, for example "0-3"."""
    model: ModelConfig
    actor_infer: InferRole
    request_timeout_s: float = Field(default=600, gt=0)
    """Time without any progress of an engine after which a request fails, in seconds."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Require a pool that exists and a model without an adapter."""
        pool = self.actor_infer.pool
        if pool not in self.pools:
            known = ", ".join(self.pools)
            raise ValueError(f"actor_infer.pool: no pool {pool!r} (pools: {known})")
        if self.model.lora is not None:
            raise ValueError("model.lora: nothing is trained here; drop it")
        return self


class EvalConfig(ServedConfig):
    """Settings of the engines that serve a model for an evaluation, without a trainer. The keys are
    those of a run file; `health`, `request_timeout_s` and `max_in_flight_groups` are there in
    `rollout`."""

    health: HealthConfig = HealthConfig()
    max_in_flight_groups: int = Field(default=1024, ge=1)
    """Largest number of questions in flight at once, over all engines."""


class ChatConfig(ServedConfig):
    """Settings of `roll chat`: how a model is served, how turns become a prompt, and sampling."""

    data: RenderConfig = RenderConfig()
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=512)
    context: int = Field(default=4096, ge=2)
    """Largest number of tokens of a conversation; that of the model if it is smaller."""

    @model_validator(mode="after")
    def _follows(self) -> Self:
        """Require a sampling that the engine can follow."""
        infer = self.actor_infer
        problems = engine_sampling_problems(
            "sampling", self.sampling, "actor_infer", infer.strategy
        )
        if found := "\n".join(problems):
            raise ValueError(found)
        return self
