"""Overrides of the command line: whatever their order, none is lost in silence."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from roll.config.algorithm.losses import PpoClipConfig
from roll.config.errors import ConfigError
from tests.rlvr_file import loaded

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
  sort: {fn: exact, tags: [sort], kwargs: {a: 1}}
"""


def outcome(path: Path, overrides: tuple[str, ...]) -> str:
    try:
        return loaded(path, *overrides).model_dump_json()
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.loss=[{kind: ppo_clip}]", "algorithm.loss.0.clip_high=0.3"),
        ("algorithm.advantage={kind: grpo}", "algorithm.advantage.std=batch"),
        ("algorithm.advantage={kind: rloo}", "algorithm.advantage.std=batch"),
        (
            "algorithm={advantage: {kind: grpo}}",
            "algorithm.advantage={std: batch}",
            "algorithm.advantage.kind=grpo",
            "algorithm.aggregation=sequence_mean",
        ),
        ("actor_infer.strategy.kind=hf", "actor_infer.strategy={kind: vllm}", "seed=4"),
        ("rewards.sort.fn=null", "rewards.sort.worker=a:b", "rewards.sort.tags=[sort]"),
        (
            "rewards.sort.model.path=x",
            "rewards.sort.model={path: y}",
            "rewards.sort.tags=[sort]",
            "rewards.sort.pool=all",
        ),
    ],
)
def test_the_order_of_overrides_of_different_keys_changes_nothing(
    run_file: Path, overrides: tuple[str, ...]
) -> None:
    assert len({outcome(run_file, order) for order in permutations(overrides)}) == 1


def test_a_list_from_the_command_line_keeps_what_is_said_of_its_items(run_file: Path) -> None:
    config = loaded(run_file, "algorithm.loss.0.clip_high=0.3", "algorithm.loss=[{kind: ppo_clip}]")
    (term,) = config.algorithm.loss
    assert isinstance(term, PpoClipConfig)
    assert term.clip_high == 0.3


@pytest.mark.parametrize("index", ["\u00b2", "\u0663", "1", "-1", "x"])
def test_an_item_that_a_list_does_not_have_is_refused(run_file: Path, index: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.{index}.*: algorithm.loss has items 0 to 0"):
        loaded(run_file, "algorithm.loss=[{kind: ppo_clip}]", f"algorithm.loss.{index}.clip_high=1")


def test_what_a_new_kind_does_not_know_is_refused_in_any_order(run_file: Path) -> None:
    given = "algorithm: {advantage: {kind: grpo}}\n"
    run_file.write_text(RUN + given)
    with pytest.raises(ConfigError, match=r"command line: algorithm\.advantage\.std"):
        loaded(run_file, "algorithm.advantage.std=batch", "algorithm.advantage={kind: rloo}")


def test_of_the_same_key_the_last_one_counts(run_file: Path) -> None:
    kinds = ["actor_infer.strategy.kind=hf", "actor_infer.strategy.kind=vllm"]
    assert loaded(run_file, *kinds).actor_infer.strategy.kind == "vllm"
    assert loaded(run_file, *reversed(kinds)).actor_infer.strategy.kind == "hf"


@pytest.mark.parametrize("override", ["rewards.sort.worker=a:b", "rewards.sort.model.path=x"])
def test_another_kind_of_reward_replaces_that_of_the_file(run_file: Path, override: str) -> None:
    pool = ["rewards.sort.pool=all"] if "model" in override else []
    reward = loaded(run_file, "rewards.sort.tags=[sort]", override, *pool).rewards["sort"]
    assert reward.fn is None
    assert reward.kwargs == {}
    assert reward.tags == ("sort",)


def test_another_function_keeps_the_rest_of_the_reward(run_file: Path) -> None:
    reward = loaded(run_file, "rewards.sort.fn=a:b").rewards["sort"]
    assert (reward.fn, reward.kwargs, reward.tags) == ("a:b", {"a": 1}, ("sort",))


def test_two_kinds_of_reward_on_the_command_line_are_refused_and_blamed_on_it(
    run_file: Path,
) -> None:
    for order in permutations(["rewards.sort.worker=a:b", "rewards.sort.model.path=x"]):
        with pytest.raises(ConfigError, match=r"command line: rewards\.sort.*exactly one"):
            loaded(run_file, "rewards.sort.tags=[sort]", *order)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("output_dir=[", "expected the node content"),
        ("output_dir=my #1 run", "'#1 run' would be a comment of YAML and left out; put"),
        ("output_dir=#1", "'#1' would be a comment"),
        ("pools={all: 0} # one", "'# one' would be a comment"),
        ("output_dir=@x", "output_dir='\"...\"'"),
        ("seed=!!int x", "'x' cannot be read as `int`"),
        ("model={path: !!binary aGk=}", "`!!binary` is no kind of value"),
        (f"seed={'9' * 5000}", "... cannot be read as `int`"),
        ("max_steps=010", "YAML reads 010 in base 8, as 8"),
        ("data={prompts_per_step: 1:04}", "YAML reads 1:04 in base 60, as 64"),
        ("rewards={on: {fn: exact}}", "YAML reads the key `on` as true or false"),
        ("model=&m {a: *m}", "an alias stands inside of its own anchor"),
    ],
)
def test_a_value_that_cannot_be_read_is_told_with_its_override(
    tmp_path: Path, override: str, told: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    found = outcome(path, (override,))
    assert found.startswith(f"refused: override {override[:40]!r}"[:-1])
    assert told in found
    assert len(found) < 400


@pytest.mark.parametrize("name", ["'my #1 run'", '"my #1 run"', "my#1run"])
def test_a_mark_of_comments_within_a_text_is_part_of_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    told = outcome(path, (f"output_dir={name}",))
    assert "comment" not in told
