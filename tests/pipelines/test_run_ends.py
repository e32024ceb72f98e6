"""How runs end and go on: refused, failed, killed late, taken back to an older checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import typer
import yaml
from fsspec.implementations.local import LocalFileSystem

from roll.cli import reported
from roll.commands.launch import launch
from roll.config import load_config
from roll.config.sections.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError, EngineError, RewardError, StoppedEarlyError
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.data.examples import Example
from roll.output_dir.checkpoints import load_state
from roll.pipeline.rlvr import RlvrPipeline
from roll.pipeline.sft import SftPipeline
from tests.pipelines.test_rows import TEXTS, split
from tests.runs import run_local, without_times, write_rows_task, write_task
from tests.tiny import save_tiny_model


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "out/summary.json").read_text())
    return content


def test_a_broken_reward_in_validation_is_itself_and_noted(tmp_path: Path) -> None:
    path = write_task(tmp_path, rewards={"broken": {"fn": "test_run_rewards:raising"}})
    with pytest.raises(RewardError, match="the grader is broken"):
        run_local(path)
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert summary["error"].startswith("RewardError: reward 'broken' failed")


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_task(tmp_path, max_steps=2)
    run_local(path)
    out = tmp_path / "out"
    before = {name: (out / name).read_bytes() for name in ("config.yaml", "summary.json")}
    save_tiny_model(tmp_path / "other", tied=False)
    overrides = ["max_steps=3", f"model.path={tmp_path / 'other'}"]
    with pytest.raises(typer.Exit) as ended, reported(debug=False):
        run_local(path, overrides)
    assert ended.value.exit_code == 2
    assert "CheckpointError: " in (shown := capsys.readouterr().err)
    assert "another model" in shown
    assert before == {name: (out / name).read_bytes() for name in before}


def test_a_run_that_is_asked_to_end_saves_its_step_before_the_validation(tmp_path: Path) -> None:
    """A validation takes longer than batch systems wait; the next session begins with it."""
    validated: list[int] = []

    class Asked(RlvrPipeline):
        def step(self, step: int) -> Metrics:
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(step)

        def validate(self, step: int) -> dict[str, float]:
            validated.append(step)
            return super().validate(step)

    paths = [write_task(tmp_path / name, max_steps=3) for name in ("straight", "stopped")]
    for path in paths:
        settings = yaml.safe_load(path.read_text())
        settings["validation"]["every"] = 1
        path.write_text(yaml.safe_dump(settings))
    straight = run_local(paths[0])
    with pytest.raises(StoppedEarlyError, match=r"2 of 3 steps are done and saved \(SIGTERM"):
        run_local(paths[1], pipeline=Asked)
    assert validated == [0, 1]
    assert list(map(without_times, run_local(paths[1]))) == list(map(without_times, straight))


HELD_REWARD = """
import asyncio
from pathlib import Path

async def held(sample):
    for _ in range(400):
        if not Path({held!r}).exists():
            break
        await asyncio.sleep(0.05)
    return float(len(sample.response_text) % 3)
"""


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_run_that_is_asked_to_end_in_a_validation_saves_its_step(
    tmp_path: Path, max_steps: int
) -> None:
    held = tmp_path / "held"

    class Asked(RlvrPipeline):
        def validate(self, step: int) -> dict[str, float]:
            if step != 2:
                return super().validate(step)
            held.touch()
            asking = threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
            asking.start()
            try:
                return super().validate(step)
            finally:
                asking.join()
                held.unlink()

    paths = [tmp_path / name / "run.yaml" for name in ("straight", "stopped")]
    for path in paths:
        rewards = {"held": {"fn": f"held_rewards_{max_steps}:held"}}
        write_task(path.parent, max_steps=max_steps, rewards=rewards, checkpoint={})
        module = path.parent / f"held_rewards_{max_steps}.py"
        module.write_text(HELD_REWARD.format(held=str(held)))
    straight = run_local(paths[0])
    with pytest.raises(StoppedEarlyError, match=r"2 of . steps are done and saved \(SIGTERM"):
        run_local(paths[1], pipeline=Asked)
    assert load_state(tmp_path / "stopped/out/checkpoints/step_000002").carried is None
    assert list(map(without_times, run_local(paths[1]))) == list(map(without_times, straight))
    assert summary_of(tmp_path / "stopped")["status"] == "finished"


def test_rows_are_validated_no_further_once_the_run_is_asked_to_end(tmp_path: Path) -> None:
    class Asked(SftPipeline):
        last = None

        def step(self, step: int) -> Metrics:
            self.last = step
            return super().step(step)

        def evaluate(self, examples: Sequence[Example]) -> Metrics:
            if self.last == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(examples)

    parts = split(TEXTS)
    paths = [write_rows_task(tmp_path / name, "sft", parts, max_steps=3) for name in ("a", "b")]
    straight = run_local(paths[0])
    with pytest.raises(StoppedEarlyError, match=r"2 of 3 steps are done and saved \(SIGTERM"):
        run_local(paths[1], pipeline=Asked)
    assert load_state(tmp_path / "b/out/checkpoints/step_000002").carried is None
    assert list(map(without_times, run_local(paths[1]))) == list(map(without_times, straight))


def test_what_a_late_kill_left_out_is_made_up_for(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=2)
    whole = run_local(path)
    out = tmp_path / "out"
    weights = (out / "hf/model.safetensors").read_bytes()
    # Killed after the last checkpoint: no last record, no export, no summary.
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-1]))
    shutil.rmtree(out / "hf")
    (out / "summary.json").unlink()
    assert run_local(path) == whole
    assert (out / "hf/model.safetensors").read_bytes() == weights
    assert summary_of(tmp_path)["status"] == "finished"


@pytest.mark.alone
def test_wall_time_adds_up_and_a_finished_run_starts_nothing(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=1, validation={}, checkpoint={"export_hf": False})
    run_local(path)
    first = summary_of(tmp_path)
    assert first["wall_s"] > 0
    begun = time.monotonic()
    assert launch(load_config(path)) == first
    assert time.monotonic() - begun < 4  # neither Ray nor workers, whose start takes longer
    assert summary_of(tmp_path) == first
    saved = json.loads((tmp_path / "out/checkpoints/step_000001/state.json").read_text())
    begun = time.monotonic()
    run_local(path, ["max_steps=2"])
    took_s = time.monotonic() - begun
    assert saved["wall_s"] < summary_of(tmp_path)["wall_s"] < saved["wall_s"] + took_s + 0.01


def test_going_back_to_an_older_checkpoint_keeps_the_newer_ones(tmp_path: Path) -> None:
    path = write_task(
        tmp_path, max_steps=4, validation={}, checkpoint={"every": 2, "export_hf": False}
    )
    run_local(path)
    folder = tmp_path / "out/checkpoints"
    run_local(path, [f"resume={folder}/step_000002", "checkpoint.keep_last=1", "max_steps=3"])
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"step_000003", "abandoned_step_000004"}
    with pytest.raises(CheckpointError, match="step_000002 is no complete checkpoint"):
        run_local(path, [f"resume={folder}/step_000002"])


def test_a_run_that_was_ended_before_its_first_checkpoint_says_that_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_task(tmp_path, max_steps=1, validation={}, checkpoint={"export_hf": False})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 0, "time/step_s": 1.0}\n')
    with caplog.at_level("INFO"):
        run_local(path)
    assert "has no checkpoint yet: the run begins anew" in caplog.text


def test_engines_may_drop_their_weights_in_a_step_and_not_for_a_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None]] = []

    class Watched(RlvrPipeline):
        """Notes whose weights the step is about to replace."""

        def train(self, batch: RolloutBatch | SampleTable, step: int) -> Metrics:
            seen.append(("train", self.runtime.colocation.renewed))
            return super().train(batch, step)

        def sync_weights(self, version: int, *, verify: bool) -> None:
            seen.append(("push", self.runtime.colocation.renewed))
            super().sync_weights(version, verify=verify)

        def save(self, folder: Path) -> None:
            seen.append(("save", self.runtime.colocation.renewed))
            super().save(folder)

    run_local(write_task(tmp_path, max_steps=1, validation={}), pipeline=Watched)
    assert seen == [("push", None), ("train", Role.ACTOR_INFER), ("push", None), ("save", None)]


class Unvalidated(RlvrPipeline):
    """Trains as usual; its validations behind the first step fail while the file `broken` lies in
    the folder of the run."""

    def validate(self, step: int) -> dict[str, float]:
        due = self.config.validation.due(step, last=self.config.max_steps)
        if step and due and (self.output_dir / "broken").exists():
            raise EngineError("no inference replica is left")
        return super().validate(step)


def test_steps_outlive_a_validation_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # That of the first step may still be written when the validation fails.
    path = write_task(tmp_path, max_steps=2, checkpoint={"every": 1, "asynchronous": True})
    out = tmp_path / "out"
    out.mkdir()
    (out / "broken").touch()
    with pytest.raises(EngineError, match="no inference replica is left"):
        run_local(path, pipeline=Unvalidated)
    assert "2 of 2 steps are saved; the same command validates them" in caplog.text
    assert (out / "hf/model.safetensors").exists()
    (out / "broken").unlink()
    records = run_local(path, pipeline=Unvalidated)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert "val/held_out/mean@1" in records[-1]
    assert load_state(out / "checkpoints/step_000002").carried
    assert summary_of(tmp_path)["status"] == "finished"


class Slow(LocalFileSystem):
    """Local files that take their time to come."""

    protocol = "slow"

    def put_file(self, local: str, path: str, **options: Any) -> None:
        time.sleep(0.5)
        super().put_file(local, path, **options)


fsspec.register_implementation("slow", Slow, clobber=True)


def test_a_session_without_steps_left_ends_with_a_complete_copy(tmp_path: Path) -> None:
    upload = f"slow://{tmp_path}/there"
    checkpoint = {"every": 1, "upload": upload, "export_hf": False}
    path = write_task(tmp_path, max_steps=1, checkpoint=checkpoint)
    out, mark = tmp_path / "out", Path("step_000001/state.json")
    out.mkdir()
    (out / "broken").touch()
    with pytest.raises(EngineError):
        run_local(path, pipeline=Unvalidated)
    (out / "broken").unlink()
    run_local(path, pipeline=Unvalidated)  # it validates the step, and writes its checkpoint again
    made = (out / "checkpoints" / mark).read_bytes()
    assert (tmp_path / "there" / mark).read_bytes() == made
    (tmp_path / "there" / mark).unlink()  # as if killed during the last copy
    run_local(path, pipeline=Unvalidated)
    assert (tmp_path / "there" / mark).read_bytes() == made


def test_a_validation_that_failed_is_made_up_for_before_the_next_step(tmp_path: Path) -> None:
    stop = {"metric": "val/held_out/mean@1", "patience": 1, "min_change": 9.0}
    sets = {"held_out": {"path": str(tmp_path / "held_out.jsonl")}}
    validation = {"every": 1, "sets": sets, "stop": stop}
    path = write_task(tmp_path, max_steps=3, validation=validation, checkpoint={})
    out = tmp_path / "out"
    out.mkdir()
    (out / "broken").touch()
    with pytest.raises(EngineError):
        run_local(path, pipeline=Unvalidated)
    assert not (out / "hf").exists()  # it is not the last step
    (out / "broken").unlink()
    records = run_local(path, pipeline=Unvalidated)
    assert [record["step"] for record in records] == [0, 1]
    assert "validation.stop" in summary_of(tmp_path)["ended_early"]
