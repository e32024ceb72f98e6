"""Which losses and corrections a config accepts, and how config and maths belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.algorithms import SumLoss, build_loss
from roll.algorithms.registries import KL_ESTIMATORS
from roll.config import RlvrConfig, load_config
from roll.config.algorithm import AlgorithmConfig, KlConfig, LossTermConfig, Need
from roll.config.algorithm.loss_choice import LossChoice
from roll.config.errors import ConfigError

CHOICES: tuple[type[LossChoice], ...] = get_args(get_args(LossTermConfig)[0])


def kind(choice: type[LossChoice]) -> str:
    return str(choice.model_fields["kind"].default)


def algorithm(**options: Any) -> AlgorithmConfig:
    return TypeAdapter(AlgorithmConfig).validate_python(options, strict=False)


@pytest.mark.parametrize("choice", CHOICES, ids=kind)
def test_every_choice_says_what_it_is(choice: type[LossChoice]) -> None:
    assert choice.__doc__
    undocumented = [
        name
        for name, spec in choice.model_fields.items()
        if name != "kind" and spec.description is None
    ]
    assert not undocumented


def test_every_estimator_can_be_configured() -> None:
    assert sorted(get_args(KlConfig.model_fields["estimator"].annotation)) == list(KL_ESTIMATORS)


def test_terms_add_up_in_the_order_of_the_config() -> None:
    config = algorithm(loss=[{"kind": "gspo"}, {"kind": "kl", "coef": 0.1}, {"kind": "nll"}])
    loss = build_loss(config)
    assert isinstance(loss, SumLoss)
    assert [(term.config.coef, term.config.kind) for term in loss.terms] == [
        (1.0, "gspo"),
        (0.1, "kl"),
        (0.1, "nll"),
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": [{"kind": "ppo_clip"}, {"kind": "cispo"}]}, "ppo_clip and cispo each estimate"),
        ({"loss": [{"kind": "nll"}, {"kind": "nll"}]}, "listed twice: nll"),
        ({"loss": [{"kind": "clip_cov", "cov_low": 5}]}, "not below cov_high"),
        (
            {"loss": [{"kind": "topr", "positive_weight": 0, "negative_weight": 0}]},
            "nothing is trained",
        ),
        ({"loss": [{"kind": "gspo", "clip_low": 1.5}]}, "less than 1"),
        ({"loss": [{"kind": "sapo", "tau_pos": 0}]}, "greater than 0"),
        ({"loss": [{"kind": "ppo_clip", "coef": -1}]}, "greater than 0"),
        ({"correction": {}}, "neither weight nor reject"),
        ({"correction": {"reject": [{}]}}, "neither lower nor upper"),
        ({"correction": {"reject": [{"lower": 2, "upper": 0.5}]}}, "not below upper"),
        ({"correction": {"weight": {"lower": 1.5}}}, "lower = 1.5 is above 1"),
        ({"correction": {"reject": [{"upper": 0.9}]}}, "upper = 0.9 is below 1"),
        (
            {"correction": {"weight": {}}, "old_logprobs": "rollout"},
            "every ratio would be 1",
        ),
        (
            {"correction": {"weight": {"level": "token"}}, "loss": [{"kind": "gspo"}]},
            "gspo gives a sample one ratio",
        ),
        (
            {"correction": {"weight": {"level": "turn"}}, "loss": [{"kind": "gmpo"}]},
            "use sequence or geometric",
        ),
        (
            {"correction": {"weight": {"level": "token"}}, "loss": [{"kind": "kimi"}]},
            "kimi gives a sample one ratio",
        ),
        (
            {
                "correction": {"weight": {"upper": 2.0}},
                "loss": [{"kind": "distill"}, {"kind": "entropy", "coef": 0.01}],
            },
            "none of distill, entropy does; drop the weight",
        ),
    ],
)
def test_nonsense_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        algorithm(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"correction": {"weight": {"level": "token", "upper": 2.0}}},
        {"correction": {"weight": {"lower": 0.5, "upper": 5.0, "mode": "mask"}}},
        {"correction": {"weight": {"level": "sequence", "upper": 2.0, "mode": "mask"}}},
        {"correction": {"weight": {"level": "geometric"}}, "loss": [{"kind": "gspo"}]},
        {"correction": {"reject": [{"level": "turn", "lower": 0.5}]}, "loss": [{"kind": "gspo"}]},
        {"correction": {"reject": [{"lower": 0.5}]}, "loss": [{"kind": "distill"}]},
        {"old_logprobs": "rollout"},
    ],
)
def test_the_corrections_of_the_field_are_accepted(options: dict[str, Any]) -> None:
    config = algorithm(**options)
    needed = config.needs.get(Need.OLD_LOGPROBS, [])
    assert needed == (["correction"] if config.correction is not None else [])


RUN = """\
pipeline: rlvr
output_dir: out
max_steps: 10
model: {path: model}
pools: {all: "0"}
actor_train: {pool: all, optimizer: {lr: 1e-4}}
actor_infer: {pool: all, strategy: {kind: vllm, tp: 1}}
data:
  sources: [{path: a.jsonl, tag: sort}]
  prompts_per_step: 32
rewards:
  sort: {fn: exact, tags: [sort]}
"""


@pytest.mark.parametrize(
    ("overrides", "scored"),
    [
        ([], False),
        (["algorithm.old_logprobs=recompute"], True),
        (["actor_train.samples_per_update=64"], True),
        (["algorithm.correction={weight: {level: token}}"], True),
        (["algorithm.loss=[{kind: kl_cov}]"], True),
        (["algorithm.advantage={kind: otb}"], True),
        (["algorithm.loss=[{kind: clip_cov}]", "algorithm.old_logprobs=rollout"], False),
        (["actor_train.samples_per_update=64", "algorithm.old_logprobs=rollout"], False),
    ],
)
def test_old_log_probs_are_scored_where_something_needs_them(
    tmp_path: Path, overrides: list[str], scored: bool
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = load_config(path, overrides).config
    assert isinstance(config, RlvrConfig)
    assert config.scores_old_logprobs is scored


def test_whole_distributions_do_not_come_from_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    changes = ["algorithm.advantage={kind: otb}", "algorithm.old_logprobs=rollout"]
    with pytest.raises(ConfigError, match=r"old_logprobs: otb needs the policy's whole dist"):
        load_config(path, changes)


def test_a_correction_can_be_written_in_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    correction = "  correction: {weight: {level: turn}, reject: [{level: geometric, lower: 0.9}]}\n"
    path.write_text(RUN + "algorithm:\n" + correction)
    config = load_config(path).config
    assert isinstance(config, RlvrConfig)
    found = config.algorithm.correction
    assert found is not None
    assert found.weight is not None
    assert found.weight.level == "turn"
    assert found.reject[0].lower == 0.9
