"""Composition, validation and error messages of run files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.placement import parse_devices
from roll.config.plan import BatchPlan

RUN = """\
pipeline: rlvr
output_dir: out
max_steps: 10
model: {path: model}
pools: {all: "0"}
actor_train: {pool: all, optimizer: {lr: 1e-4}}
actor_infer: {pool: all, strategy: {kind: vllm, tp: 1}}
reference: {pool: all}
data:
  sources: [{path: a.jsonl, tag: sort}]
  prompts_per_step: 32
rewards:
  sort: {fn: exact, tags: [sort]}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_resolved_config_reloads_to_an_equal_one(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file, ["seed=7", "actor_infer.strategy.kind=hf"]).config
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


def test_numbers_written_with_an_exponent_are_numbers(run_file: Path) -> None:
    assert load_config(run_file).config.actor_train.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor_infer.strategy.tpp=2", ["actor_infer.strategy.tpp = 2", "did you mean 'tp'?"]),
        ("max_stepss=3", ["max_stepss = 3", "unknown key", "did you mean 'max_steps'?"]),
        ("lr=3", ["lr = 3", "exists at actor_train.optimizer.lr"]),
        ("actor_train.optimizer.lr=-1", ["actor_train.optimizer.lr = -1", "greater than 0"]),
        ("seed=abc", ["seed = 'abc'", "integer"]),
        ("max_steps=true", ["max_steps = True", "integer"]),
        ("pools.all=3-1", ["pools.all", "runs backwards"]),
        ("actor_train.pool=al", ["no pool 'al'", "did you mean 'all'?"]),
        ("actor_infer.strategy.kind=vlm", ["'vlm'", "did you mean 'vllm'?"]),
        ("data.sources.0.columns.promt=x", ["data.sources.0.columns.promt", "'prompt'"]),
        ("data.sources.0.tag=srt", ["no reward takes the tag 'srt'", "'sort'"]),
        ("rewards.sort.tags=[sorted]", ["no reward takes the tag 'sort'"]),
        ("data.samples_per_prompt=1", ["grpo", "at least 2"]),
        ("sampling.temperature=0", ["sampling.temperature", "equal"]),
        ("algorithm.loss=[{kind: kl}, {kind: kl}]", ["listed twice: kl"]),
        ("rewards.sort.fn=null", ["exactly one of `fn`"]),
        ("output_dir=${nope}", ["output_dir", "nope"]),
        ("cluster.devices_per_node=1|pools.all=0-3", ["names device 3", "has 1 devices"]),
        ("checkpoint.best_metric=val/x/mean@1", ["no validation makes"]),
        ("reference=null|algorithm.loss=[{kind: kl}]", ["needs a `reference`"]),
    ],
)
def test_a_mistake_is_named_with_key_value_and_advice(
    run_file: Path, override: str, parts: list[str]
) -> None:
    message = error(run_file, *override.split("|"))
    assert all(part in message for part in parts), message


def test_a_mistake_in_a_file_is_named_with_its_line(run_file: Path) -> None:
    run_file.write_text(RUN.replace("max_steps: 10", "max_step: 10"))
    message = error(run_file)
    assert f"{run_file}:3: max_step = 10: unknown key; did you mean 'max_steps'?" in message
    assert "max_steps: missing" in message


def test_a_batch_that_does_not_divide_names_the_nearest_that_do(run_file: Path) -> None:
    message = error(run_file, "actor_train.samples_per_update=100")
    assert "100 does not divide the 256 samples" in message
    assert "64 and 128" in message


def test_ranks_that_do_not_divide_an_update_are_refused(run_file: Path) -> None:
    message = error(run_file, "pools.all=0-2")
    assert "256 samples per optimizer step do not divide over the 3 devices" in message
    assert "255 and 258" in message


def test_defaults_merge_left_to_right_and_the_file_wins(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_steps: 1\nsampling: {top_p: 0.5}\n")
    (tmp_path / "more.yaml").write_text("seed: 2\nsampling: {temperature: 0.7}\n")
    run_file.write_text("defaults: [base.yaml, more.yaml]\n" + RUN)
    config = load_config(run_file).config
    assert (config.seed, config.max_steps) == (2, 10)
    assert (config.sampling.top_p, config.sampling.temperature) == (0.5, 0.7)


def test_a_cycle_of_defaults_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n")
    message = error(tmp_path / "a.yaml")
    assert "cycle" in message
    assert "a.yaml -> " in message


def test_a_changed_kind_inherits_nothing(tmp_path: Path, run_file: Path) -> None:
    config = load_config(run_file, ["actor_infer.strategy.kind=hf"]).config
    assert config.actor_infer.strategy.kind == "hf"
    over = tmp_path / "over.yaml"
    over.write_text("defaults: [run.yaml]\nactor_infer: {strategy: {kind: hf}}\n")
    assert load_config(over).config.actor_infer.strategy.kind == "hf"


def test_broken_yaml_and_missing_files_are_one_line(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    assert "bad.yaml:2: not valid YAML" in error(tmp_path / "bad.yaml")
    assert "did you mean 'run.yaml'?" in error(tmp_path / "rn.yaml")
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    assert "set twice" in error(tmp_path / "twice.yaml")


def test_a_config_never_changes(run_file: Path) -> None:
    config = load_config(run_file).config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
def test_device_lists_are_read_as_written(devices: list[int]) -> None:
    assert parse_devices(",".join(map(str, devices))) == tuple(devices)


def test_the_batch_plan_is_the_arithmetic_of_the_config(run_file: Path) -> None:
    config = load_config(
        run_file,
        ["pools.all=0-1", "actor_train.samples_per_update=64", "actor_train.epochs=2"],
    ).config
    plan = BatchPlan.of(config)
    assert (plan.samples, plan.updates, plan.samples_per_update_and_rank) == (256, 8, 32)
    assert plan.replicas == 2


