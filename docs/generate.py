"""Generator of docs/algorithms.md: makes the file from the config classes and the presets.

    python docs/generate.py

A test fails if the file differs from what this script would write.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roll.config.algorithm import Aggregation, AlgorithmConfig
from roll.config.algorithm.advantages import AdvantageConfig
from roll.config.algorithm.correction import CorrectionConfig, RejectConfig, WeightConfig
from roll.config.algorithm.divergences import DivergenceConfig
from roll.config.algorithm.losses import LossTermConfig, ValueLossConfig
from roll.config.algorithm.needs import Choice, Need
from roll.config.algorithm.preferences import PairFormulaConfig
from roll.config.algorithm.shaping import (
    AdvantageShapingConfig,
    KlInRewardConfig,
    MaskConfig,
    RewardShapingConfig,
    SampleWeightConfig,
)
from roll.config.loading.compose import PRESETS
from roll.config.sections.rollout import FilterConfig

TARGET = Path(__file__).parent / "algorithms.md"

INTRO = """\
# Algorithms

An algorithm is a choice from each of the lists below. `algorithm: {preset: grpo}` takes all the
choices of a paper at once, and what the same file sets beside it wins over it. A preset that is
named later, on the command line or in a file over `defaults`, replaces what was said of its parts
before; where roles live stays. `roll show` prints what all of it comes to. In the formulas A is the
advantage, and ratio the new probability over the old one. Losses are per token and unreduced;
`aggregation` turns them into one number with weights that are computed once from the whole update,
so no split over micro-batches, ranks or packing changes loss or gradient.

```yaml
algorithm:
  preset: grpo                                    # all choices of a paper, and then your own
  advantage: {kind: grpo, std: none}
  loss:
    - {kind: ppo_clip, clip_high: 0.28}
    - {kind: kl, coef: 0.001}
  aggregation: token_mean
  reward_shaping:
    - {kind: overlong_penalty, buffer_tokens: 512}
```

Where to begin: `grpo` or `dapo` with answers that can be verified, `dr_grpo` where responses grow
without getting better, `gspo` with mixtures of experts, `rloo` or `reinforce_pp` with a reward
model, `ppo` or `vapo` with long responses and the memory for a critic, `prime` with long responses
that are right or wrong and the memory for a second model.

[Twelve steps on the quickstart's task](algorithms_learn.md), three seeds each
(`benchmarks/algorithms_learn.py`); presets that the table lacks have not been tried on it:

![held-out accuracy of the presets](algorithms_learn.png)
"""

SECTIONS: tuple[tuple[str, str, Any], ...] = (
    (
        "`algorithm.advantage`",
        "Estimator that turns rewards into one advantage per token; choose exactly one.",
        AdvantageConfig,
    ),
    (
        "`algorithm.loss`",
        "List of loss terms; each is multiplied by its `coef`, and all are added up.",
        LossTermConfig,
    ),
    (
        "`divergence`",
        "Divergence between teacher and student, for a `distill` loss term and for `pipeline: "
        "distill`, in nats per token (`uld`: without a unit). With `top_k`, the teacher's "
        "likeliest tokens are compared one by one, and all other tokens together count as one.",
        DivergenceConfig,
    ),
    (
        "`formula`",
        "Formula of the loss of a pair, for a `preference` loss term; `pipeline: dpo` has the same "
        "ones, and `kto`. p is the log-prob of a response (the sum over its tokens, or their "
        "mean); r is p minus the reference's p; d is r of the better response minus r of the other "
        "one; s is the logistic function.",
        PairFormulaConfig,
    ),
    (
        "`algorithm.aggregation`",
        "Rule that combines the losses of all tokens into one number.",
        Aggregation,
    ),
    (
        "`algorithm.reward_shaping`",
        "List of changes to the rewards, applied in order.",
        RewardShapingConfig,
    ),
    ("`algorithm.kl_in_reward`", "At most one.", KlInRewardConfig),
    ("`algorithm.masks`", "List of masks; a sample must pass all of them.", MaskConfig),
    (
        "`algorithm.sample_weights`",
        "List of weights of a sample; several are multiplied.",
        SampleWeightConfig,
    ),
    (
        "`algorithm.advantage_shaping`",
        "List of changes to the advantages, applied in order.",
        AdvantageShapingConfig,
    ),
    ("`algorithm.correction`", "At most one.", CorrectionConfig),
    ("`algorithm.correction.weight`", "At most one.", WeightConfig),
    (
        "`algorithm.correction.reject`",
        "List of rules that take tokens, turns or samples out of the loss.",
        RejectConfig,
    ),
    (
        "`rollout.filters`",
        "List of filters, applied in order; the first that objects rejects the group.",
        FilterConfig,
    ),
    ("`critic.loss`", "Loss of the `critic` role, which `gae` needs.", ValueLossConfig),
)

NEEDS = {
    Need.SIBLINGS: "at least two samples per prompt",
    Need.CRITIC: "a `critic` role",
    Need.PROCESS_REWARD: "a `process_reward` role",
    Need.REFERENCE: "a `reference` role",
    Need.OLD_LOGPROBS: "the policy's log-probs before the update (a forward pass of their own)",
    Need.SQUARED_PROBS: "sums of the policy's squared probabilities, which come with its log-probs "
    "before the update (a forward pass of their own)",
    Need.GREEDY_BASELINE: "a greedy response to every prompt, which the rollout adds by itself",
    Need.TURNS: "samples that are episodes (`pipeline: agentic`)",
    Need.TEACHER: "at least one of `teachers`",
    Need.RATIO: "several updates per step, or `old_logprobs: rollout`, to differ from `pg`",
}


def text() -> str:
    """Return the whole document, in Markdown."""
    parts = [INTRO, *_presets()]
    for title, remark, choice in SECTIONS:
        parts.append(f"## {title}\n")
        if remark:
            parts.append(f"{remark}\n")
        if isinstance(choice, type) and issubclass(choice, StrEnum):
            parts.extend(_values(choice))
            continue
        for model in _members(choice):
            parts.extend(_model(model))
    parts.append("## Other keys of `algorithm`\n")
    parts.extend(_fields(AlgorithmConfig, only=("old_logprobs", "aggregation_tokens")))
    return "\n".join(parts).rstrip() + "\n"


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield "| `algorithm.preset` | |\n|---|---|"
    for path in sorted(PRESETS.glob("*.yaml")):
        comment = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        yield f"| `{path.stem}` | {' '.join(comment)} |"
    yield ""


def _members(union: Any) -> tuple[type[BaseModel], ...]:
    if isinstance(union, type):
        return (union,)
    inner = typing.get_args(union)[0] if typing.get_origin(union) is typing.Annotated else union
    return typing.get_args(inner)


def _values(enum: type[StrEnum]) -> Iterator[str]:
    source = inspect.getsource(enum)
    for value in enum:
        after = source.split(f"{value.name} = ", 1)[1]
        doc = after.split('"""')[1]
        yield f"- `{value.value}`: {_one_line(doc)}"
    yield ""


def _model(model: type[BaseModel]) -> Iterator[str]:
    kind = model.model_fields.get("kind")
    if kind is not None:
        yield f"### `{kind.default}`\n"
    for paragraph in (inspect.getdoc(model) or "").split("\n\n"):
        yield f"{_one_line(paragraph)}\n"
    if issubclass(model, Choice) and model.needs:
        yield f"Needs {'; '.join(NEEDS[need] for need in sorted(model.needs))}.\n"
    yield from _fields(model)


def _fields(model: type[BaseModel], only: tuple[str, ...] | None = None) -> Iterator[str]:
    rows = [
        f"| `{name}` | {_default(field)} | {_one_line(field.description or '')} |"
        for name, field in model.model_fields.items()
        if name != "kind" and (only is None or name in only)
    ]
    if rows:
        yield "| key | default | |\n|---|---|---|"
        yield from rows
        yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if isinstance(default, BaseModel):
        kind = getattr(default, "kind", None)
        return f"`{kind}`, see below" if kind else "see below"
    if default is None:
        return "null"
    if default == ():
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _one_line(text: str) -> str:
    # A bar would end the table cell, so `||` (as in KL(p || q)) becomes "to", and `|` is escaped.
    return " ".join(text.split()).replace("||", "to").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
