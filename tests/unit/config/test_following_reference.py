"""A reference that follows the policy, in run files."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.errors import ConfigError
from roll.config.sections.training import FollowConfig, ScoreRole
from tests.rlvr_file import loaded

RUN = """\
output_dir: out
max_steps: 10
model: {path: model}
pools: {all: "0"}
actor_train: {pool: all}
actor_infer: {pool: all}
reference: {follow: {every: 4}}
data:
  sources: [{path: a.jsonl, tag: sort}]
  prompts_per_step: 32
rewards:
  sort: {fn: exact, tags: [sort]}
algorithm: {preset: grpo}
"""


def test_it_is_no_role_of_its_own(run_file: Path) -> None:
    config = loaded(run_file)
    assert config.follow == FollowConfig(every=4)
    assert config.reference_role is None
    assert "reference" not in config.roles
    assert loaded(run_file, "reference={follow: {decay: 0.9}}").follow == FollowConfig(
        every=4, decay=0.9
    )
    assert loaded(run_file, "algorithm.preset=grpo").follow == FollowConfig(every=4)
    frozen = loaded(run_file, "reference={pool: all}")
    assert (frozen.follow, frozen.reference) == (None, ScoreRole(pool="all"))


def test_a_reference_with_a_pool_is_frozen_as_before(run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "frozen.yaml"
    path.write_text(RUN.replace("{follow: {every: 4}}", "{pool: all}"))
    config = loaded(path)
    assert isinstance(config.reference, ScoreRole)
    assert (config.follow, "reference" in config.roles) == (None, True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reference={follow: {every: 1}}", "every: with 1, and decay 0"),
        ("reference={follow: {every: 10}}", "reference.follow.every: 10 steps are not over"),
        ("reference={follow: {decay: 1.0}}", "reference.follow.decay = 1.0: input should be less"),
        ("reference={follow: {evry: 4}}", "reference.follow.evry = 4: unknown key; did you mean"),
        ("actor_train.strategy.kind=deepspeed", "reference.follow: deepspeed keeps no second copy"),
        ("algorithm.loss=[{kind: ppo_clip}]", "reference.follow: nothing compares"),
    ],
)
def test_mistakes_are_told(run_file: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(run_file, override)
    assert said in str(caught.value)
