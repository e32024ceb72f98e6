"""Samples that a run keeps: all that was trained on, once, over failures and resumes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from roll.config.sections.roles import Role
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.distributed.cluster import Cluster, Placement
from roll.output_dir.sample_files import Origin, sample_files
from roll.output_dir.trackers import read_records
from roll.pipeline.agentic import AgenticPipeline
from roll.pipeline.rlvr import RlvrPipeline
from roll.rollout.dense import dense
from roll.rollout.rows import with_rows_of_branches
from roll.runtime.sample_keeper import SampleKeeper
from roll.workers.sample_writer.worker import SampleJob, SampleWriter
from tests.pipelines.test_agentic import task as agentic_task
from tests.runs import run_local, write_task
from tests.tiny import char_tokenizer

Row = tuple[list[int], list[float], list[int]]
ORIGIN = Origin("hash", "qwen3", pictures=False)
ALL = {"tensorboard": False, "samples": "all"}


def trained_rows(table: SampleTable) -> dict[str, list[Row]]:
    """Id of a sample -> of each of its rows all tokens, then log-probs and numbers of the tokens
    that count in the loss."""
    rows: dict[str, list[Row]] = {}
    batch = dense(with_rows_of_branches(table, 1))
    assert batch.rollout_logprobs is not None
    for number, name in enumerate(batch.sample_ids):
        tokens = batch.tokens[number, : batch.lengths[number]].tolist()
        places = batch.loss_mask[number].nonzero()[:, 0]
        logprobs = batch.rollout_logprobs[number, places].tolist()
        rows.setdefault(name, []).append((tokens, logprobs, places.tolist()))
    return rows


def kept_row(row: Any) -> Row:
    """The same of a row of a file."""
    tokens = [*row["prompt_ids"], *row["response_ids"]]
    written = np.repeat(
        [run["version"] for run in row["versions"]], [run["tokens"] for run in row["versions"]]
    )
    places = np.flatnonzero(written >= 0)
    return (
        [int(token) for token in tokens],
        [float(value) for value in np.asarray(row["logprobs"])[places]],
        (places + len(row["prompt_ids"])).tolist(),
    )


def kept_rows(row: Any) -> list[Row]:
    branches = row["branches"]
    return [kept_row(each) for each in (row, *(() if branches is None else branches))]


def kept(folder: Path, split: str) -> pd.DataFrame:
    return pd.read_parquet(folder / "samples" / split)


class Broken(Exception):
    """What ends a session in the middle."""


def test_the_kept_tokens_and_log_probs_are_those_trained_on_over_a_broken_session(
    tmp_path: Path,
) -> None:
    trained: dict[int, dict[str, list[Row]]] = {}
    breaks = [True]

    class Watched(RlvrPipeline):
        def learn(self, table: SampleTable, step: int) -> Metrics:
            trained[step] = trained_rows(table)
            if step == 3 and breaks:
                raise Broken
            return super().learn(table, step)

    path, out = write_task(tmp_path, track=ALL, max_steps=5), tmp_path / "out"
    with pytest.raises(Broken):
        run_local(path, pipeline=Watched)
    assert set(kept(out, "train")["step"]) == {0, 1, 2, 3}
    breaks.clear()
    run_local(path, ["max_steps=3"], pipeline=Watched)
    assert set(kept(out, "train")["step"]) == {0, 1, 2}, "step 3 was not done"
    records = run_local(path, pipeline=Watched)

    frame = kept(out, "train")
    assert len(frame) == 5 * 16
    assert frame["id"].is_unique
    for _, row in frame.iterrows():
        assert kept_rows(row) == trained[row["step"]][row["id"]]
        assert row["newest_version"] == row["step"]
        assert row["response"] == char_tokenizer().decode(
            row["response_ids"], skip_special_tokens=True
        )
        assert row["prompt"] == char_tokenizer().decode(row["prompt_ids"])
        assert dict(row["rewards"])["digits"] == row["reward"]
        assert dict(row["parts"])["digits/length"] == len(row["response"])
    for record in records[:-1]:
        mean = frame[frame["step"] == record["step"]]["reward"].mean()
        assert mean == pytest.approx(record["reward/mean"])

    held_out = kept(out, "validation")
    scores = {r["step"]: r["val/held_out/mean@1"] for r in records if "val/held_out/mean@1" in r}
    assert held_out.groupby("step")["reward"].mean().to_dict() == pytest.approx(scores)
    assert set(held_out["set"]) == {"held_out"}
    assert (held_out.groupby("step").size() == 8).all()


def test_episodes_are_kept_with_all_their_rows_and_turn_by_turn(tmp_path: Path) -> None:
    trained: dict[str, list[Row]] = {}

    class Watched(AgenticPipeline):
        def learn(self, table: SampleTable, step: int) -> Metrics:
            trained.update(trained_rows(table))
            return super().learn(table, step)

    agent = {"env": None, "agent": "test_run_agent:run", "cut_turn": "go_on"}
    path = agentic_task(tmp_path, environment=agent, track=ALL, max_steps=2)
    run_local(path, pipeline=Watched)
    frame = kept(tmp_path / "out", "train")
    assert any(row["branches"] is not None for _, row in frame.iterrows())
    assert set(frame["id"]) == set(trained)
    for _, row in frame.iterrows():
        assert kept_rows(row) == trained[row["id"]]
        if row["branches"] is None:  # each turn goes on from the one before
            said = row["prompt"] + "".join(turn["text"] for turn in row["turns"])
            whole = char_tokenizer().decode([*row["prompt_ids"], *row["response_ids"]])
            assert whole == said


class Slow(SampleWriter):
    """Takes longer than a step."""

    def write_file(self, job: SampleJob) -> str | None:
        time.sleep(1)
        return super().write_file(job)


def test_a_checkpoint_is_complete_only_when_the_samples_before_it_are_kept(tmp_path: Path) -> None:
    found: list[list[int]] = []

    class Watched(RlvrPipeline):
        def open(self) -> None:
            super().open()
            place = Placement(Role.SAMPLES, pool=None, workers=1, replaceable=True)
            arguments = place, self.output_dir, self.config.train_model, ORIGIN
            cluster: Cluster[Any] = self.launcher.start(Slow, *arguments)
            keeper = SampleKeeper(cluster, training=True, write_timeout_s=60)
            self.runtime = replace(self.runtime, keeper=keeper)

        def save(self, folder: Path) -> None:
            super().save(folder)
            found.append(list(sample_files(self.output_dir, "train")))

    path = write_task(tmp_path, track=ALL, max_steps=3, validation={})
    run_local(path, pipeline=Watched)
    assert found == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize(("samples", "folders"), [("validation", ["validation"]), ("none", [])])
def test_a_run_keeps_what_it_is_told_to(tmp_path: Path, samples: str, folders: list[str]) -> None:
    run_local(write_task(tmp_path, track={"tensorboard": False, "samples": samples}, max_steps=1))
    assert [path.name for path in (tmp_path / "out").glob("samples/*")] == folders


def test_a_folder_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_task(tmp_path, track=ALL, max_steps=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/samples").write_text("in the way")
    run_local(path)
    told = [one.message for one in caplog.records if "not kept" in one.message]
    assert len(told) == 1
    records = read_records(tmp_path / "out/metrics.jsonl")
    assert sum(record.get("samples/not_kept", 0) for record in records) > 0
