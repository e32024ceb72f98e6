"""Files of samples: complete or not there, and dropped where a run does its steps again."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.step_rewards import StepRewards
from roll.core.types import Prompt, Sample, Turn
from roll.output_dir.sample_files import (
    Origin,
    drop_samples,
    sample_file,
    sample_files,
    write_samples,
)
from roll.rollout.types import ScoredSample
from roll.workers.sample_writer.table import table_of
from tests.full_disk import files_up_to

STOP = FinishReason.STOP
ORIGIN = Origin("hash", "qwen3", pictures=False)


def scored(text: str = "text", tokens: int = 4, **scores: Any) -> ScoredSample:
    prompt = Prompt("data:7", (1, 2), "two", "answer", "tag")
    written = Written(array("i", range(tokens)), array("f", [-0.5] * tokens), text)
    completion = Completion(written, VersionRuns(((3, tokens),)), STOP)
    return ScoredSample(Sample("5/data:7/1", "5/data:7", prompt, completion), 1.5, **scores)


def placed(row: Any, begin: Any, end: Any, state: Any = "") -> dict[str, Any]:
    """Place of a turn."""
    return {"row": row, "begin": begin, "end": end, "state": state}


def table(*samples: ScoredSample, step: int = 5) -> Any:
    return table_of(
        samples,
        step=step,
        split="train",
        sets=[None] * len(samples),
        baselines=[None] * len(samples),
        read=lambda tokens: " ".join(map(str, tokens)),
    )


def test_all_that_is_known_of_a_sample_is_in_its_row() -> None:
    """An episode, whose second turn has a row of its own, with an answer of the environment in the
    first one."""
    prompt = Prompt("data:7", (1, 2), "one two", "answer", "tag", {"more": 1})
    runs = VersionRuns(((3, 2), (-1, 1), (4, 1)))
    first = Completion(
        Written(array("i", [5, 6, 9, 7]), array("f", [-1, -2, 0, -3]), "t"), runs, STOP
    )
    later = Completion.of([4], [-1.0], [4], FinishReason.LENGTH)
    sample = Sample("5/data:7/1", "5/data:7", prompt, first)
    branch = Sample("5/data:7/1", "5/data:7", prompt, later)
    episode = ScoredSample(
        sample,
        1.5,
        {"env/steps": 2.0},
        {"env": 3.0},
        turns=(Turn(0, 2, 0.5), Turn(0, 1, 1.0, row=1)),
        branches=(branch,),
        seat=1,
        steps=StepRewards.of([(2, 0.5)]),
    )
    [row, plain] = table(episode, scored(failed=("broken",))).to_pylist()
    assert row == {
        "step": 5,
        "split": "train",
        "set": None,
        "id": "5/data:7/1",
        "group": "5/data:7",
        "prompt_id": "data:7",
        "tag": "tag",
        "seat": 1,
        "prompt": "one two",
        "response": "t",
        "ground_truth": "answer",
        "reward": 1.5,
        "turn_reward": 0.0,
        "baseline_reward": None,
        "rewards": [("env", 3.0)],
        "parts": [("env/steps", 2.0)],
        "failed_rewards": [],
        "step_rewards": [{"end": 2, "reward": 0.5}],
        "finish_reason": "stop",
        "truncated": False,
        "prompt_tokens": 2,
        "response_tokens": 4,
        "logprob_mean": -2.0,
        "oldest_version": 3,
        "newest_version": 4,
        "turns": [
            {"by": "policy", "text": "5 6", "reward": 0.5, **placed(0, 0, 2)},
            {"by": "environment", "text": "1 2", "reward": None, **placed(None, None, None, None)},
            {"by": "policy", "text": "4", "reward": 1.0, **placed(1, 0, 1)},
        ],
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 9, 7],
        "logprobs": [-1.0, -2.0, 0.0, -3.0],
        "versions": [
            {"version": 3, "tokens": 2},
            {"version": -1, "tokens": 1},
            {"version": 4, "tokens": 1},
        ],
        "branches": [
            {
                "prompt_ids": [1, 2],
                "response_ids": [4],
                "logprobs": [-1.0],
                "versions": [{"version": 4, "tokens": 1}],
            }
        ],
    }
    assert plain["reward"] is None
    assert plain["failed_rewards"] == ["broken"]
    assert plain["turns"] is None
    assert plain["branches"] is None


def test_a_text_that_is_no_unicode_costs_no_row() -> None:
    rows = table(scored("fine"), scored("half \ud83d pair")).to_pylist()
    assert [row["response"] for row in rows] == ["fine", "half \\ud83d pair"]


def test_pandas_reads_a_folder_while_a_file_is_half_written(tmp_path: Path) -> None:
    write_samples(sample_file(tmp_path, "train", 5), [table(scored()), table(scored())], ORIGIN)
    write_samples(sample_file(tmp_path, "validation", 6), [table(scored(), step=6)], ORIGIN)

    def tables() -> Any:
        yield table(scored(), step=7)
        assert list(pd.read_parquet(tmp_path / "samples")["step"]) == [5, 5, 6]
        yield table(scored(), step=7)

    write_samples(sample_file(tmp_path, "train", 7), tables(), ORIGIN)
    assert list(pd.read_parquet(tmp_path / "samples")["step"]) == [5, 5, 7, 7, 6]


def test_a_full_disk_leaves_no_part_of_a_file_and_the_next_one_is_written(tmp_path: Path) -> None:
    path = sample_file(tmp_path, "train", 5)
    many = table(*(scored(str(i), 50) for i in range(500)))
    with files_up_to(5000), pytest.raises(OSError):
        write_samples(path, [many], ORIGIN)
    assert list(path.parent.iterdir()) == []
    write_samples(path, [many], ORIGIN)
    assert pq.read_metadata(path).num_rows == 500


@pytest.mark.parametrize(
    ("done", "train", "validation"),
    [(0, [], []), (2, [0, 1], [0, 2]), (3, [0, 1, 2], [0, 2]), (4, [0, 1, 2, 3], [0, 2, 4])],
)
def test_what_a_run_does_again_is_dropped(
    tmp_path: Path, done: int, train: list[int], validation: list[int]
) -> None:
    for step in range(4):
        write_samples(sample_file(tmp_path, "train", step), [], ORIGIN)
    for step in (0, 2, 4):
        write_samples(sample_file(tmp_path, "validation", step), [], ORIGIN)
    torn = tmp_path / "samples/train/.step_000009.parquet.tmp"
    torn.write_text("half")
    drop_samples(tmp_path, done=done)
    assert list(sample_files(tmp_path, "train")) == train
    assert list(sample_files(tmp_path, "validation")) == validation
    assert not torn.exists()


def test_samples_for_people_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    for step in (10, 20):
        (folder / f"step_{step:06d}").mkdir(parents=True)
        (folder / f"step_{step:06d}" / "picture.png").touch()
        (folder / f"step_{step:06d}.jsonl").touch()
    (folder / "step_by_step.txt").touch()
    drop_samples(tmp_path, done=20)
    kept = {"step_000010", "step_000010.jsonl", "step_by_step.txt"}
    assert {path.name for path in folder.iterdir()} == kept
    drop_samples(tmp_path, done=0)
    assert [path.name for path in folder.iterdir()] == ["step_by_step.txt"]


def test_the_lines_of_the_page_read_the_files(tmp_path: Path) -> None:
    write_samples(sample_file(tmp_path, "train", 5), [table(scored(), scored())], ORIGIN)
    page = (Path(__file__).parents[3] / "docs/samples.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"pandas": pd}
    exec(code.replace("OUTPUT_DIR", str(tmp_path)), names)
    assert names["mean"].to_dict() == {5: 1.5}
    documented = page.split("| column | holds |")[1].split("\n\n")[0]
    assert [c for c in names["frame"].columns if f"`{c}`" not in documented] == []
