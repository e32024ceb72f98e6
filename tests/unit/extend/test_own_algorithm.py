"""Advantages and loss terms that users bring: how they are found, refused, built and called."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import roll.extend
from roll.algorithms.build import build_advantage, build_loss
from roll.algorithms.loss_interface import PolicyTerms
from roll.commands.trials.parts import try_parts
from roll.commands.trials.result import Trial
from roll.config import load_config
from roll.config.algorithm import AlgorithmConfig, GrpoConfig, Need
from roll.config.rlvr import RlvrConfig
from roll.core.errors import ConfigError, RollError
from tests.own_parts import Clipped, EveryToken, GroupRelative, Nearness
from tests.tiny import rollout_batch

OWN = """
from roll.extend import SampleAdvantage, Samples, Tensor, total_rewards


class Scaled(SampleAdvantage):
    factor: float = 2.0

    def per_sample(self, samples: Samples) -> Tensor:
        return self.factor * total_rewards(samples)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of the user's."""
    (tmp_path / "my_advantage.py").write_text(OWN)
    yield tmp_path
    for name in ("my_advantage", "my_broken"):
        sys.modules.pop(name, None)


def run_file(folder: Path, **parts: Any) -> Path:
    path = folder / "run.yaml"
    settings = {
        "output_dir": "out",
        "max_steps": 1,
        "model": {"path": "org/name"},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all"},
        "actor_infer": {"pool": "all", "strategy": {"kind": "hf"}},
        "data": {"sources": [{"path": "a.jsonl"}], "prompts_per_step": 1},
        "sampling": {"max_new_tokens": 4},
        "rewards": {"math": {"fn": "math"}},
        "algorithm": parts,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def algorithm(**parts: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**parts)


def loaded(path: Path) -> RlvrConfig:
    config = load_config(path).config
    assert isinstance(config, RlvrConfig)
    return config


def test_a_class_beside_the_run_file_is_found_with_its_options(folder: Path) -> None:
    path = run_file(folder, advantage={"kind": "my_advantage:Scaled", "factor": 3})
    config = loaded(path)
    found = build_advantage(config.algorithm)(rollout_batch())
    batch = rollout_batch()
    assert batch.rewards is not None
    assert torch.equal(found.advantages_BT, 3 * batch.rewards[:, None] * batch.loss_mask)
    assert str(folder) not in sys.path


def test_the_written_config_names_the_class_and_its_options_and_can_be_run(folder: Path) -> None:
    config = loaded(run_file(folder, advantage={"kind": "my_advantage:Scaled", "factor": 3}))
    dumped = json.loads(config.model_dump_json())
    assert dumped["algorithm"]["advantage"] == {"kind": "my_advantage:Scaled", "factor": 3.0}
    again = folder / "again.yaml"
    again.write_text(yaml.safe_dump(dumped))
    assert loaded(again) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_run_file_that_is_only_read_imports_nothing(folder: Path) -> None:
    path = run_file(folder, advantage={"kind": "my_advantage:Scaled", "factor": 3, "other": [1]})
    read = load_config(path, import_code=False).config
    assert "my_advantage" not in sys.modules
    dumped = json.loads(read.model_dump_json())
    assert dumped["algorithm"]["advantage"]["other"] == [1]


@pytest.mark.parametrize(
    ("parts", "line", "told"),
    [
        (
            {"advantage": {"kind": "my_advantage:Scaled", "fctor": 3}},
            "fctor",
            "algorithm.advantage.fctor = 3: unknown key of my_advantage:Scaled; did you mean "
            "'factor'?",
        ),
        (
            {"advantage": {"kind": "my_advantage:Scaled", "factor": "big"}},
            "factor",
            "algorithm.advantage.factor = 'big': input should be a valid number",
        ),
        (
            {"advantage": {"kind": "my_advantage:Scale"}},
            "kind",
            "kind: 'my_advantage:Scale': my_advantage has no 'Scale'; did you mean 'Scaled'?",
        ),
        (
            {"advantage": {"kind": "my_advantages:Scaled"}},
            "kind",
            "kind: 'my_advantages:Scaled': no module named 'my_advantages'",
        ),
        (
            {"loss": [{"kind": "ppo_clip"}, {"kind": "my_advantage:Scaled"}]},
            "kind: my_advantage",
            "kind: my_advantage:Scaled is no class that derives from roll.extend.LossTerm",
        ),
        (
            {"advantage": {"kind": "tests.own_parts:NO_CLASS"}},
            "kind",
            "kind: tests.own_parts:NO_CLASS is no class that derives from roll.extend.Advantage",
        ),
        (
            {"advantage": {"kind": "tests.own_parts:Unfinished"}},
            "kind",
            "kind: tests.own_parts:Unfinished has no method per_sample",
        ),
        (
            {"advantage": {"kind": "grpoo"}},
            "kind",
            "algorithm.advantage.kind = 'grpoo': unknown; did you mean 'grpo'?",
        ),
        (
            {"loss": [{"kind": "tests.own_parts:Clipped"}, {"kind": "ppo_clip"}]},
            "loss",
            "tests.own_parts:Clipped and ppo_clip each estimate the policy gradient",
        ),
    ],
)
def test_a_mistake_is_refused_at_its_line(
    folder: Path, parts: dict[str, Any], line: str, told: str
) -> None:
    path = run_file(folder, **parts)
    lines = path.read_text().splitlines()
    number = max(i for i, text in enumerate(lines, 1) if line in text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert told in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{number}: algorithm")


def test_an_error_of_the_module_is_told_with_its_line(folder: Path) -> None:
    (folder / "my_broken.py").write_text("import roll.extend\nx = 1\ny = x / 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(folder, advantage={"kind": "my_broken:Scaled"}))
    assert "kind: importing my_broken failed" in str(caught.value)
    assert 'my_broken.py", line 3' in str(caught.value)
    assert str(caught.value).endswith("ZeroDivisionError: division by zero")


def test_needs_of_a_class_are_those_of_the_run(folder: Path) -> None:
    path = run_file(folder, advantage={"kind": "tests.own_parts:GroupRelative"})
    assert Need.SIBLINGS in loaded(path).needs
    with pytest.raises(ConfigError, match=r"tests\.own_parts:GroupRelative compares the samples"):
        load_config(path, ["data.samples_per_prompt=1"])


def test_an_advantage_equals_the_built_in_one_to_the_bit() -> None:
    batch = rollout_batch(rows=12)
    own, built_in = (
        build_advantage(algorithm(advantage=choice))(batch).advantages_BT
        for choice in (GroupRelative(), GrpoConfig())
    )
    assert torch.equal(own, built_in)
    assert own.abs().sum() > 0


def test_an_advantage_of_tokens_is_zero_outside_the_mask() -> None:
    batch = rollout_batch()
    found_BT = build_advantage(algorithm(advantage=EveryToken()))(batch).advantages_BT
    assert (found_BT[~batch.loss_mask] == 0).all()
    assert (found_BT[batch.loss_mask] != 0).all()


def test_a_term_is_a_part_of_the_loss_under_the_name_of_its_class() -> None:
    config = algorithm(loss=(Clipped(), Nearness(coef=0.5)))
    batch = rollout_batch()
    zeros = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    batch = replace(batch, advantages=zeros + 1, ref_logprobs=zeros)
    found = build_loss(config)(PolicyTerms(zeros - 2), batch)
    assert set(found.parts_BT) == {"policy", "Nearness"}
    assert torch.equal(found.parts_BT["Nearness"], 0.5 * 0.5 * 4.0 * batch.loss_mask)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Dividing", "raised an error on samples of step 0\n"),
        ("Wide", "returned a float64 tensor of shape [8, 1]; expected a float tensor of shape [8]"),
        ("Endless", "returned 8 numbers that are not finite; expected finite numbers"),
    ],
)
def test_an_error_of_an_advantage_names_its_key(folder: Path, name: str, told: str) -> None:
    config = loaded(run_file(folder, advantage={"kind": f"tests.own_parts:{name}"}))
    with pytest.raises(RollError) as caught:
        build_advantage(config.algorithm)(rollout_batch())
    assert str(caught.value).startswith(f"algorithm.advantage: tests.own_parts:{name} {told}")
    if name == "Dividing":
        assert "in per_sample" in str(caught.value)
        assert "own_parts.py" in str(caught.value).splitlines()[2], "the user's own line is first"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Raising", "raised an error on samples of step 0\n"),
        ("Scalar", "returned a float32 tensor of shape []; expected a float tensor of shape [8, "),
    ],
)
def test_an_error_of_a_loss_term_names_its_key(folder: Path, name: str, told: str) -> None:
    kinds = [{"kind": "entropy", "coef": 0.1}, {"kind": f"tests.own_parts:{name}"}]
    config = loaded(run_file(folder, loss=kinds))
    batch = rollout_batch()
    zeros = torch.zeros_like(batch.loss_mask, dtype=torch.float32)
    with pytest.raises(RollError) as caught:
        build_loss(config.algorithm)(PolicyTerms(zeros, zeros), batch)
    assert str(caught.value).startswith(f"algorithm.loss.1: tests.own_parts:{name} {told}")


def test_every_public_name_can_be_imported() -> None:
    for name in roll.extend.__all__:
        assert getattr(roll.extend, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = roll.extend.Nothing


def test_roll_check_tries_own_parts_and_says_what_is_wrong(folder: Path) -> None:
    path = run_file(
        folder,
        advantage={"kind": "tests.own_parts:Wide"},
        loss=[{"kind": "tests.own_parts:Clipped"}, {"kind": "tests.own_parts:Raising"}],
        masks=[{"kind": "tests.own_parts:Counted"}],
    )
    trial = Trial()
    try_parts(load_config(path, ["reference.pool=all"]).config, trial)
    advantage, loss = map(str, trial.wrong)
    assert advantage.startswith("algorithm.advantage: tests.own_parts:Wide fails when it is tried:")
    assert loss.startswith("algorithm.loss.1: tests.own_parts:Raising fails when it is tried:")
    assert "batch.bonus" in loss
    [remark] = trial.remarks
    assert remark.startswith("algorithm.masks.0: tests.own_parts:Counted breaks a rule")
    assert trial.told == ["algorithm.loss.0: tests.own_parts:Clipped keeps the rules of its kind"]
