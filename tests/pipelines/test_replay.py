"""Training on kept samples gives what the run gave that made them, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from roll.commands.preflight import inspect
from roll.commands.replay import Line, do_again, find_again
from roll.commands.rollout import rollout_config
from roll.config import load_config
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError, ConfigError, DataError, RollError
from roll.core.metrics import Metrics
from roll.core.threads.loop_thread import LoopThread
from roll.distributed.local import LocalLauncher
from roll.output_dir.checkpoints import STATE
from roll.output_dir.sample_files import sample_file, sample_files
from roll.output_dir.trackers import read_records
from roll.pipeline.rlvr import RlvrPipeline
from roll.pipeline.rollout import RolloutPipeline
from tests.pipelines.test_agentic import task as agentic_task
from tests.runs import run_config, run_local, without_times, write_task
from tests.tiny import ALPHABET, char_tokenizer

KEEP = {"tensorboard": False, "samples": "all", "rollouts_every": 2}
OF_ENGINES = ("val/", "rollout/")
OF_REWARDS = ("/error_rate", "/timeout_rate")
KINDS: dict[str, dict[str, Any]] = {
    # single tokens on the driver, with a critic and a reward that fails now and then
    "tokens": {
        "critic": {"pool": "all", "optimizer": {"lr": 1e-3}},
        "algorithm": {"advantage": {"kind": "gae"}, "loss": [{"kind": "ppo_clip"}]},
    },
    "greedy": {"algorithm": {"preset": "remax"}},
}


def trained(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not measure time, engines or calls of rewards, of each step."""
    kept = [
        {
            name: value
            for name, value in without_times(one).items()
            if not name.startswith(OF_ENGINES) and not name.endswith(OF_REWARDS)
        }
        for one in records
    ]
    return [one for one in kept if "loss/total" in one]


def assert_equal_weights(one: Path, other: Path) -> None:
    then, now = (load_file(each / "hf/model.safetensors") for each in (one, other))
    assert then.keys() == now.keys()
    assert all(torch.equal(then[name], now[name]) for name in then)


def replay_of(folder: Path, output_dir: Path, *more: str) -> list[str]:
    dropped = "validation.sets=null"
    return [f"rollout.replay={folder}", f"output_dir={output_dir}", dropped, *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has kept all of its samples."""
    folder = tmp_path_factory.mktemp("made")
    run_local(write_task(folder, track=KEEP, checkpoint={"every": 1, "keep_last": 9}))
    return folder


def test_a_replay_gives_the_same_without_an_engine_also_when_it_is_resumed(
    made: Path, tmp_path: Path
) -> None:
    roles: list[str] = []

    class Watched(RlvrPipeline):
        def open(self) -> None:
            super().open()
            roles.extend(cluster.role for cluster in self.profiler._clusters)

        def step(self, step: int) -> Metrics:
            if step == 2 and len(roles) == 2:
                raise RollError("the session breaks")
            return super().step(step)

    overrides = replay_of(made / "out", tmp_path / "again", "track.samples=none")
    with pytest.raises(RollError, match="the session breaks"):
        run_local(made / "run.yaml", overrides, pipeline=Watched)
    again = run_local(made / "run.yaml", overrides, pipeline=Watched)
    assert roles == [Role.ACTOR_TRAIN, Role.REFERENCE] * 2
    first = read_records(made / "out/metrics.jsonl")
    assert len(trained(first)) == 4
    assert trained(again) == trained(first)
    assert_equal_weights(made / "out", tmp_path / "again")
    dumped = "rollouts/step_000002.jsonl"
    assert (made / "out" / dumped).read_text() == (tmp_path / "again" / dumped).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_other_algorithms(tmp_path: Path, kind: str) -> None:
    path = write_task(tmp_path, track=KEEP, max_steps=3, validation={}, **KINDS[kind])
    first = run_local(path)
    again = run_local(path, [f"rollout.replay={tmp_path}/out", f"output_dir={tmp_path}/again"])
    assert len(trained(first)) == 3
    assert trained(again) == trained(first)
    assert_equal_weights(tmp_path / "out", tmp_path / "again")


def test_so_do_episodes_of_agents_in_several_rows(tmp_path: Path) -> None:
    agent = {"env": None, "agent": "test_run_agent:run", "cut_turn": "go_on"}
    path = agentic_task(tmp_path, environment=agent, track=KEEP, max_steps=2, validation={})
    first = run_local(path)
    again = run_local(path, [f"rollout.replay={tmp_path}/out", f"output_dir={tmp_path}/again"])
    assert len(trained(first)) == 2
    assert trained(again) == trained(first)
    assert_equal_weights(tmp_path / "out", tmp_path / "again")


def test_samples_are_made_without_training_go_on_after_a_break_and_can_be_trained_on(
    made: Path, tmp_path: Path
) -> None:
    breaks = [True]

    class Watched(RolloutPipeline):
        def step(self, step: int) -> Metrics:
            assert {one.role for one in self.profiler._clusters} == {
                Role.ACTOR_INFER,
                Role.REWARD,
                Role.SAMPLES,
            }
            if step == 1 and breaks:
                raise RollError("the session breaks")
            return super().step(step)

    loaded = load_config(made / "run.yaml").config
    assert rollout_config(loaded, None, None).output_dir == str(made / "out-rollout")
    config = rollout_config(loaded, tmp_path / "dump", 3)
    with pytest.raises(RollError, match="the session breaks"):
        run_config(config, made, pipeline=Watched)
    breaks.clear()
    records = run_config(config, made, pipeline=Watched)
    assert [record["step"] for record in records] == [0, 1, 2]

    # Before the first update, the policy of the run is the model as it was.
    files = [sample_file(one, "train", 0) for one in (made / "out", tmp_path / "dump")]
    assert pq.read_table(files[0]).equals(pq.read_table(files[1]))
    whole = rollout_config(loaded, tmp_path / "whole", 3)
    run_config(whole, made, pipeline=RolloutPipeline)
    for step in range(3):
        files = [sample_file(tmp_path / one, "train", step) for one in ("dump", "whole")]
        assert pq.read_table(files[0]).equals(pq.read_table(files[1]))

    overrides = replay_of(tmp_path / "dump", tmp_path / "run", "max_steps=3")
    on_policy, *later = trained(run_local(made / "run.yaml", overrides))
    assert on_policy == trained(read_records(made / "out/metrics.jsonl"))[0]
    assert [one["staleness/max"] for one in later] == [1, 2]
    with pytest.raises(CheckpointError, match="of a run that trains"):
        run_config(rollout_config(loaded, made / "out", 5), made, pipeline=RolloutPipeline)
    with pytest.raises(CheckpointError, match="no state of actor_train"):
        run_local(made / "run.yaml", [f"output_dir={tmp_path}/dump", "max_steps=4"])
    with pytest.raises(CheckpointError, match="no position in the data"):
        run_local(made / "run.yaml", [f"output_dir={tmp_path}/run", "max_steps=4"])


def lines_of(folder: Path, step: int, *overrides: str) -> tuple[range, dict[str, Line]]:
    again = find_again(folder, step, overrides)
    with LocalLauncher() as launcher, LoopThread("rollout") as loop:
        return again.steps, {one.name: one for one in do_again(again, launcher, loop, "cpu")}


def test_one_step_again_gives_what_was_recorded_or_names_what_differs(
    made: Path, tmp_path: Path
) -> None:
    steps, lines = lines_of(made / "out", 2)
    assert steps == range(2, 3)
    wanted = trained(read_records(made / "out/metrics.jsonl"))[2].keys() - {"step"}
    assert lines.keys() == wanted
    assert not any(line.differs for line in lines.values())

    folder = tmp_path / "out"
    shutil.copytree(made / "out", folder)
    shutil.rmtree(folder / "checkpoints/step_000002")
    shutil.rmtree(folder / "checkpoints/step_000003")
    steps, lines = lines_of(folder, 3)
    assert steps == range(1, 4)
    assert not any(line.differs for line in lines.values())

    state = json.loads((folder / "checkpoints/step_000001" / STATE).read_text())
    (folder / "checkpoints/step_000001" / STATE).write_text(
        json.dumps(state | {"optimizer": False})
    )
    assert find_again(folder, 3).steps == range(4)  # from the start: its moments would be zero

    _, lines = lines_of(made / "out", 2, "algorithm.loss.1.coef=0.5")
    assert lines["loss/total"].differs
    assert not lines["reward/mean"].differs
    shutil.rmtree(folder / "checkpoints/step_000001")
    steps, lines = lines_of(folder, 1)
    assert steps == range(2)
    assert not any(line.differs for line in lines.values())


def test_a_run_is_done_again_whatever_it_validated_on(made: Path, tmp_path: Path) -> None:
    """A set with a dot in its name, a tag that only this set has, and an end by its score."""
    folder = tmp_path / "out"
    shutil.copytree(made / "out", folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (held_out,) = settings["validation"]["sets"].values()
    held_out["tag"] = "only_there"
    settings["validation"]["sets"] = {"held.out": held_out}
    settings["validation"]["stop"] = {"metric": "val/held.out/mean@1", "patience": 3}
    (reward,) = settings["rewards"].values()
    settings["rewards"]["there"] = {**reward, "tags": ["only_there"]}
    for file in folder.rglob("config.yaml"):  # that of each checkpoint, too
        file.write_text(yaml.safe_dump(settings))
    load_config(folder / "config.yaml")  # the run itself is in order
    again = find_again(folder, 2)
    assert not again.config.validation.sets
    assert again.config.rewards.keys() == settings["rewards"].keys()


def test_what_a_replay_of_a_step_lacks_is_named(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made / "out", folder)
    with pytest.raises(DataError, match=r"no record of it .*steps 0 to 3"):
        find_again(folder, 7)
    shutil.rmtree(folder / "checkpoints")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("resume: auto", "resume: elsewhere"))
    with pytest.raises(DataError, match=r"no checkpoint .* at or before it"):
        find_again(folder, 3)
    (folder / "config.yaml").write_text(text)
    sample_file(folder, "train", 1).unlink()
    with pytest.raises(DataError, match="step 1 is missing"):
        find_again(folder, 3)
    shutil.rmtree(folder / "samples")
    with pytest.raises(DataError, match="has kept no samples"):
        find_again(folder, 3)


def refused(made: Path, folder: Path, *more: str) -> str:
    """Why a run does not train on the samples of a folder."""
    with pytest.raises((ConfigError, DataError)) as error:
        run_local(made / "run.yaml", replay_of(folder, made / "again", *more))
    return str(error.value)


def test_what_does_not_fit_is_refused_before_anything_starts(made: Path, tmp_path: Path) -> None:
    out, folder = made / "out", tmp_path / "out"
    assert "is no folder" in refused(made, tmp_path / "nowhere")
    lost = load_config(made / "run.yaml", replay_of(tmp_path / "nowhere", folder))
    assert ["is no folder" in str(finding.error) for finding in inspect(lost)] == [True]
    assert inspect(load_config(made / "run.yaml", replay_of(out, tmp_path / "other"))) == []
    assert "no samples of steps" in refused(made, made / "model")
    assert "no samples of steps" in refused(made, out / "samples")
    assert "data.samples_per_prompt: 4 there, 2 here" in refused(
        made, out, "data.samples_per_prompt=2"
    )
    assert "rollout.max_staleness: 0 there, 1 here" in refused(made, out, "rollout.max_staleness=1")
    assert "rewards.digits.weight: 1.0 there, 2.0 here" in refused(
        made, out, "rewards.digits.weight=2.0"
    )
    told = refused(made, out, "max_steps=9")
    assert "samples of 4 steps (0 to 3)" in told
    assert "step 4 and 4 more are missing; set max_steps=4" in told
    assert "in one another" in refused(made, out, f"output_dir={out}")
    assert len(sample_files(out, "train")) == 4, "the samples are still there"
    with pytest.raises(ConfigError, match=r"validation\.sets=null"):
        load_config(made / "run.yaml", [f"rollout.replay={out}"])

    shutil.copytree(out, folder)
    file = sample_file(folder, "train", 2)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "step_000002.parquet cannot be read" in refused(made, folder)
    pq.write_table(pq.read_table(sample_file(out, "train", 2)).drop(["logprobs"]), file)
    assert "lacks columns that training needs: logprobs" in refused(made, folder)
    pq.write_table(pq.read_table(sample_file(out, "train", 2)).slice(1), file)
    assert "has 15 samples, and a step of this run trains on 16" in refused(made, folder)
    (folder / "config.yaml").unlink()
    assert "no config.yaml" in refused(made, folder)


def test_samples_of_another_model_are_refused(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(made / "model", other)
    char_tokenizer(ALPHABET[::-1]).save_pretrained(other)
    told = refused(made, made / "out", f"model.path={other}")
    assert "made with another tokenizer" in told
    shutil.rmtree(other)
    shutil.copytree(made / "model", other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "qwen2"}
    (other / "config.json").write_text(json.dumps(config))
    told = refused(made, made / "out", f"model.path={other}")
    assert "of a model of the kind qwen3, and model.path is a qwen2" in told


def test_another_learning_rate_is_what_a_replay_is_for(made: Path, tmp_path: Path) -> None:
    overrides = replay_of(made / "out", tmp_path / "again", "actor_train.optimizer.lr=5e-3")
    first, *later = trained(run_local(made / "run.yaml", overrides))
    then = trained(read_records(made / "out/metrics.jsonl"))
    assert first["loss/total"] == then[0]["loss/total"]
    assert [one["reward/mean"] for one in later] == [one["reward/mean"] for one in then[1:]]
    assert later[-1]["loss/total"] != then[-1]["loss/total"]
