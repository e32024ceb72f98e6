"""Kinds of optimizers in run files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.optimizers.kinds import AdamWConfig, MuonConfig, OptimizerConfig
from tests.rlvr_file import loaded as loaded_run

RUN = """\
pipeline: rlvr
output_dir: out
max_steps: 10
model: {path: model}
pools: {all: "0"}
actor_train: {pool: all, optimizer: {lr: 1e-4, warmup_steps: 3}}
actor_infer: {pool: all}
reference: {pool: all}
data:
  sources: [{path: a.jsonl, tag: sort}]
  prompts_per_step: 32
rewards:
  sort: {fn: exact, tags: [sort]}
"""


def loaded(path: Path, *overrides: str) -> OptimizerConfig:
    return loaded_run(path, *overrides).actor_train.optimizer


def over(path: Path, optimizer: str) -> Path:
    """Write a file that inherits from `path` and has an optimizer."""
    above = path.parent / "above.yaml"
    above.write_text(f"defaults: [{path.name}]\nactor_train: {{optimizer: {optimizer}}}\n")
    return above


def test_without_a_kind_it_is_adamw(run_file: Path) -> None:
    assert loaded(run_file) == AdamWConfig(lr=1e-4, warmup_steps=3)
    assert loaded(run_file, "actor_train={pool: all, optimizer: {}}").lr == 1e-4
    assert loaded(run_file, "actor_train.optimizer.kind=adamw").lr == 1e-4
    assert loaded(over(run_file, "{kind: adamw, eps: 1e-4}")).lr == 1e-4


def test_another_kind_drops_the_settings_of_the_layers_before(run_file: Path) -> None:
    assert loaded(over(run_file, "{kind: muon}")) == MuonConfig()
    assert loaded(run_file, "actor_train.optimizer.kind=muon") == MuonConfig()
    assert loaded(run_file, "actor_train.optimizer={kind: muon, lr: 3e-4}") == MuonConfig(lr=3e-4)
    muon = over(run_file, "{kind: muon, ns_steps: 6}")
    assert loaded(muon, "actor_train.optimizer.lr=2e-4") == MuonConfig(lr=2e-4, ns_steps=6)
    assert loaded(muon, "actor_train.optimizer.kind=adamw") == AdamWConfig()


def test_a_resolved_config_reloads_to_an_equal_one(run_file: Path, tmp_path: Path) -> None:
    overrides = ["actor_train.optimizer={kind: adafactor, lr: 1e-2}"]
    config = load_config(run_file, overrides).config
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("{kind: mouon}", ["optimizer.kind = 'mouon': unknown; did you mean 'muon'?", "adafactor"]),
        ("{kind: muon, betas: [0.9, 0.95]}", ["optimizer.betas", "unknown key", "ns_steps"]),
        ("{momentum: 0.9}", ["optimizer.momentum = 0.9: unknown key (known here: betas"]),
        (
            "{kind: muon, others: {momentum: 0.9}}",
            ["optimizer.others.momentum", "exists at actor_train.optimizer.momentum"],
        ),
        ("{kind: muon, ns_steps: 100}", ["optimizer.ns_steps = 100", "less than 100"]),
        ("{kind: muon, scale: original}", ["others.lr: must be set with scale: original"]),
        ("{kind: adafactor}", ["optimizer.lr: missing"]),
        ("{kind: sgd}", ["optimizer.lr: missing"]),
        ("{kind: adafactor, lr: 1e-2, clip_threshold: 0.5}", ["clip_threshold = 0.5"]),
        ("3", ["actor_train.optimizer = 3: must be a mapping with the keys lr"]),
    ],
)
def test_mistakes_are_told_with_what_is_known(
    run_file: Path, optimizer: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(run_file, f"actor_train.optimizer={optimizer}")
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
@pytest.mark.parametrize("kind", ["adafactor", "adamw_8bit", "muon", "sgd"])
def test_only_fsdp2_trains_with_other_kinds(run_file: Path, backend: str, kind: str) -> None:
    optimizer = f"actor_train.optimizer={{kind: {kind}, lr: 1e-3}}"
    assert loaded(run_file, optimizer).kind == kind
    with pytest.raises(ConfigError) as caught:
        loaded(run_file, optimizer, f"actor_train.strategy.kind={backend}")
    message = f"actor_train.optimizer.kind: {backend} does not train with {kind}"
    assert message in str(caught.value)
    loaded(run_file, f"actor_train.strategy.kind={backend}")
