"""A resumed run says which of its settings are new."""

from __future__ import annotations

from pathlib import Path

import yaml

from roll.config import load_config
from roll.output_dir.config_diff import _may_differ, changed_keys

RUN = Path(__file__).parents[3] / "examples" / "dpo_sort" / "run.yaml"


def test_every_changed_value_is_named_and_nothing_else(tmp_path: Path) -> None:
    before = load_config(RUN).config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before.model_dump(mode="json")))
    assert changed_keys(tmp_path, before) == []
    longer = load_config(RUN, ["max_steps=99", "checkpoint.every=7"]).config
    assert changed_keys(tmp_path, longer) == []
    other = load_config(
        RUN, ["loss.beta=0.3", "reference_logprobs=once", "actor_train.optimizer.lr=1e-5"]
    ).config
    assert changed_keys(tmp_path, other) == [
        "actor_train.optimizer.lr: 0.0001 -> 1e-05",
        "loss.beta: 0.1 -> 0.3",
        "reference_logprobs: per_step -> once",
    ]


def test_variables_of_a_role_may_differ_and_what_else_is_called_env_may_not() -> None:
    free = (
        "actor_train.env.NCCL_DEBUG",
        "teachers.math.env.A",
        "rewards.env.env.A",
        "judges.b.env.A",
    )
    assert all(_may_differ(key) for key in free)
    bound = (
        "rewards.env.weight",
        "rewards.x.kwargs.env",
        "rewards.x.kwargs.env.A",
        "validation.sets.env.path",
        "judges.env.model.path",
        "teachers.env.model.path",
        "environments.game.env",
        "environments.env.kwargs.size",
        "actor_infer.strategy.engine_args.env",
    )
    assert not any(_may_differ(key) for key in bound)


def test_a_checkpoint_without_its_settings_is_compared_with_nothing(tmp_path: Path) -> None:
    assert changed_keys(tmp_path, load_config(RUN).config) == []
