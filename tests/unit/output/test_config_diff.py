"""A resumed run says which of its settings are new."""

from __future__ import annotations

from pathlib import Path

import yaml

from roll.config import load_config
from roll.output_dir.config_diff import changed_keys

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


def test_a_checkpoint_without_its_settings_is_compared_with_nothing(tmp_path: Path) -> None:
    assert changed_keys(tmp_path, load_config(RUN).config) == []
