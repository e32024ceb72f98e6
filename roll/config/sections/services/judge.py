"""Settings of judges: models that decide rewards, and what they are asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from roll.config.base import Config
from roll.config.sections.engines import VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.rollout import HealthConfig
from roll.config.sections.services.service import ServiceConfig
from roll.config.sections.training import InferRole

USAGE_PARTS = (
    "cached",
    "cost",
    "input_tokens",
    "latency_s",
    "no_answer",
    "output_tokens",
    "tries",
    "unread",
)
"""Names of the parts that every judge logs."""


class _Scale(Config):
    low: float = 0.0
    """Number that scores 0."""
    high: float = 10.0
    """Number that scores 1. Numbers outside of the range cannot be read."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        """Require low < high."""
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} must lie below high = {self.high:g}")
        return self


class JsonVerdictConfig(_Scale):
    """Verdict as a JSON object and nothing else, `{"reason": "...", "score": 7}`. Its grammar is
    sent with the request, so that a server can enforce it."""

    kind: Literal["json"] = "json"
    integer: bool = True
    """Allow whole numbers only."""
    reason: bool = True
    """Ask for a reason before the score."""
    criteria: tuple[str, ...] = ()
    """Names of further numbers in the same range, asked for before the score and logged as
    parts."""
    classes: dict[str, float] | None = None
    """Score of each name that the judge may choose, in place of a number. The key is then
    `verdict`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Require that the names of `criteria` differ and are not taken, that `classes` are two or
        more, and that `low` and `high` are whole if `integer`."""
        taken = {"reason", "score", "verdict", "mean", "error_rate", "timeout_rate", *USAGE_PARTS}
        wrong = sorted(taken.intersection(self.criteria))
        if wrong or len(set(self.criteria)) < len(self.criteria):
            what = f"{wrong[0]!r} is taken" if wrong else "a name stands there twice"
            raise ValueError(f"criteria: {what}; choose another name")
        if self.classes is not None and len(self.classes) < 2:
            raise ValueError("classes: needs two names or more")
        unread = self.changed("low", "high", "integer")
        if self.classes is not None and not self.criteria and unread:
            raise ValueError(
                f"{unread[0]}: `classes` have scores of their own, and without `criteria` there "
                "are no numbers; drop it"
            )
        if self.integer and (self.low % 1 or self.high % 1):
            raise ValueError("integer: low and high must be whole numbers, or integer false")
        return self


class NumberVerdictConfig(_Scale):
    """Verdict as the last line of the answer: `Score: 7`, `7/10` or the number alone."""

    kind: Literal["number"] = "number"


class ClassVerdictConfig(Config):
    """Verdict as a word that a regular expression finds. All places that it finds must name the
    same class. The template must ask for the word."""

    kind: Literal["class"] = "class"
    pattern: str
    """Regular expression with one group, which is the name of the class."""
    scores: dict[str, float] = Field(min_length=1)
    """Score of each class; upper and lower case are the same."""


class PreferenceVerdictConfig(Config):
    """Comparison of two samples of a prompt: which is better, or neither (`per: group`). The score
    of a sample is the share of its comparisons that it wins; a tie is half a win."""

    kind: Literal["preference"] = "preference"
    opponents: int | None = Field(default=None, ge=1)
    """Number of siblings that each sample is compared with, as the first of the pair. If left out:
    every pair is compared."""
    both_orders: bool = True
    """Ask a second time with the two in the other order, since judges prefer a place. If the
    answers differ, it is a tie."""


class RankingVerdictConfig(Config):
    """Ranking of all samples of a prompt, best first (`per: group`). The score of a sample falls
    from 1 for the best to 0 for the worst in equal steps. Each vote sees them in another order."""

    kind: Literal["ranking"] = "ranking"


VerdictConfig = Annotated[
    JsonVerdictConfig
    | NumberVerdictConfig
    | ClassVerdictConfig
    | PreferenceVerdictConfig
    | RankingVerdictConfig,
    Field(discriminator="kind"),
]
GROUP_VERDICTS = ("preference", "ranking")


class JudgedConfig(Config):
    """Question to a judge about a sample or a group, and the form of its answer."""

    by: str
    """Name of the judge in `judges`."""
    template: str
    """Jinja template of the question. It can use `response`, `prompt`, `answer`, `thoughts` and
    `row.<column>`; with `per: group`, `responses` in place of `response`. Each is put between marks
    that the text inside cannot know; `response.text` is the bare text."""
    verdict: VerdictConfig = JsonVerdictConfig()
    """Form of the answer, and the way from it to a score."""
    votes: int = Field(default=1, ge=1)
    """Number of answers to each question; the score is their mean. At least half of them must be
    readable."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest answer of the judge, in tokens. An answer that was cut off cannot be read."""
    longest_response: int | None = Field(default=None, ge=1)
    """Number of characters up to which a response is judged; a longer one scores 0. If left out:
    all are."""
    cache: str | None = None
    """Folder that keeps answers by model, question and settings, for later runs too. Several runs
    may share it. If left out: nothing is kept."""

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        """Refuse several votes at temperature 0, except in rankings, where each vote has another
        order."""
        if self.votes > 1 and self.temperature == 0 and self.verdict.kind != "ranking":
            raise ValueError(
                f"votes: {self.votes} votes at temperature 0 are all equal; raise `temperature`, "
                "or drop `votes`"
            )
        return self


class PricesConfig(Config):
    """Prices of a judge, in any currency."""

    input: float = Field(ge=0)
    """Price of a million tokens that it reads."""
    output: float = Field(ge=0)
    """Price of a million tokens that it writes."""


class UrlJudgeConfig(ServiceConfig):
    """Judge behind an OpenAI-compatible server: `<url>/chat/completions`."""

    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    grammar: Literal["json_schema", "json_object", "none"] = "json_schema"
    """Form in which JSON verdicts are demanded (`response_format`). `none` for servers that refuse
    this field."""
    prices: PricesConfig | None = None
    """Prices, for the part `cost`. If left out: it is not logged."""
    body: dict[str, Any] = {}
    """Further fields of the request, under the server's names. null leaves out a field that is sent
    otherwise, such as `seed`."""


class ClusterJudgeConfig(InferRole):
    """Judge on devices of the run: engines of its own, each of which is restarted if it dies."""

    model: ModelConfig
    """Model that judges, with its own tokenizer and chat template."""
    max_question_tokens: int = Field(default=8192, ge=1)
    """Largest number of tokens of a question. A longer one is a failure of the sample."""
    template_args: dict[str, Any] = {}
    """Further variables of the chat template, such as `enable_thinking: false`. A name that the
    template does not mention is refused."""
    grammar: bool = True
    """Let the engine write only what fits the grammar of JSON verdicts. `sglang` cannot do that
    here, and needs false."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Time without any progress of an engine after which a question fails, in seconds."""
    health: HealthConfig = HealthConfig()
    """Rules for replacing engines that are dead or slow. Their questions go to the others, or wait
    for the new one."""

    @property
    def engine(self) -> InferRole:
        """Role as the engines get it. On vLLM, JSON then has no white space between its parts, of
        which a weak model may write as much as it can."""
        if not isinstance(self.strategy, VllmConfig) or not self.grammar:
            return self
        compact = {"backend": "xgrammar", "disable_any_whitespace": True}
        engine_args = {"structured_outputs_config": compact} | self.strategy.engine_args
        strategy = self.strategy.model_copy(update={"engine_args": engine_args})
        return self.model_copy(update={"strategy": strategy})


def _kind_of_judge(value: Any) -> str:
    """Return the name of the class that the settings of a judge, a mapping or an object, mean: with
    a `url` UrlJudgeConfig, else ClusterJudgeConfig."""
    has_url = "url" in value if isinstance(value, dict) else isinstance(value, UrlJudgeConfig)
    return UrlJudgeConfig.__name__ if has_url else ClusterJudgeConfig.__name__


JudgeConfig = Annotated[
    Annotated[UrlJudgeConfig, Tag("UrlJudgeConfig")]
    | Annotated[ClusterJudgeConfig, Tag("ClusterJudgeConfig")],
    Discriminator(_kind_of_judge),
]
"""A judge: behind a server, if it has a `url`, else on devices of the run."""
