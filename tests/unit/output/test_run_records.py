"""What a run writes down about itself: records, summaries, states; also on a full disk."""

from __future__ import annotations

import json
import math
import random
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.errors import CheckpointError
from roll.core.pictures import Pictures
from roll.core.types import Prompt, Sample, Turn
from roll.data.pictures.forms import pictures_of
from roll.data.pictures.picture import EncodedPictures
from roll.output_dir.checkpoints import Checkpoints, RunState, load_sampler, load_state
from roll.output_dir.plain_json import ARRAY_FILE, encoded, write_plain
from roll.output_dir.summary import summarize
from roll.output_dir.trackers import JsonlTracker, read_records
from roll.pipeline.outputs.rollout_files import dump_rollouts
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, ScoredSample
from tests.fakes import from_disk
from tests.full_disk import files_up_to
from tests.pictures import coloured, file_of
from tests.unit.runtime.written_checkpoints import writing

NAN = math.nan
STOP = FinishReason.STOP
PROMPT = Prompt("p", (1, 2), "text", "answer", "tag")


def group(tokens: int) -> Group:
    numbers = tuple(range(tokens))
    completion = Completion.of(
        numbers, tuple(float(n) for n in numbers), (3,) * tokens, FinishReason.STOP
    )
    sample = Sample("s", "g", PROMPT, completion, "text")
    return Group(PROMPT, (ScoredSample(sample, 1.0, {"a": 1.0}, {"r": 1.0}),), 1)


def test_resume_on_a_full_disk_keeps_all_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "x": n / 7}) + "\n" for n in range(5000)))
    before = path.read_bytes()
    with files_up_to(10_000), pytest.raises(OSError):
        JsonlTracker(path, first_step=4000)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "nothing half written is left"
    with files_up_to(10_000):  # nothing to drop, nothing to write
        JsonlTracker(path, first_step=5000).close()
    assert path.read_bytes() == before


def test_records_of_work_that_is_redone_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": NaN}\n{"step": 1}\n{"step": 2}\n{"step": 3, "loss')
    tracker = JsonlTracker(path, first_step=2)
    tracker.log(2, {"x": 1.5})
    tracker.close()
    assert path.read_text() == '{"step": 0, "x": NaN}\n{"step": 1}\n{"step": 2, "x": 1.5}\n'
    assert len(read_records(path)) == 3


def test_a_full_disk_does_not_stop_a_run_from_going_on_without_its_dump(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rollouts" / "step_000000.jsonl"
    find = {"p": PROMPT}.__getitem__
    with files_up_to(100):
        dump_rollouts(path, [group(4)], limit=8, read=lambda tokens: "x" * 200, find=find)
    assert "step_000000.jsonl could not be written (File too large)" in caplog.text
    assert not path.exists()
    dump_rollouts(path, [group(4)], limit=8, read=lambda tokens: "x", find=find)
    assert json.loads(path.read_text())["response_tokens"] == 4


def test_a_text_that_is_no_valid_unicode_ends_no_run(tmp_path: Path) -> None:
    """As an answer of a data set with half of a surrogate pair, which JSON can express."""
    prompt = replace(PROMPT, answer=json.loads(r'"half \ud83d"'))
    scored = group(4).samples[0]
    scored = replace(scored, sample=replace(scored.sample, prompt=prompt))
    path = tmp_path / "rollouts" / "step_000000.jsonl"
    groups = [Group(prompt, (scored,), 0)]
    dump_rollouts(path, groups, limit=8, read=lambda tokens: "x", find={"p": prompt}.__getitem__)
    assert json.loads(path.read_bytes())["ground_truth"] == "half ?"


def test_what_the_model_saw_is_written_beside_what_it_said(tmp_path: Path) -> None:
    data = file_of(coloured(20, 30))
    gone = tmp_path / "gone.png"
    gone.write_bytes(data)
    pictures = pictures_of([data, str(gone)], "row", tmp_path)
    gone.unlink()
    known = Pictures((0, 1), ((1, 2, 2),) * 2, EncodedPictures(pictures))
    read = replace(PROMPT, text="two <|image_pad|>", pictures=known)
    seen = replace(read, tokens=(9,) * 1000)
    scored = replace(group(4).samples[0], sample=replace(group(4).samples[0].sample, prompt=seen))
    path = tmp_path / "rollouts" / "step_000000.jsonl"
    path.parent.mkdir()
    groups = [Group(seen, (scored, scored), 0)]
    dump_rollouts(path, groups, limit=8, read=lambda tokens: "", find={"p": read}.__getitem__)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["two <|image_pad|>"] * 2
    assert rows[0]["prompt_tokens"] == 1000
    [name] = rows[0]["pictures"]  # not the one whose file is gone
    written = np.asarray(Image.open(path.parent / name))
    assert np.array_equal(written, np.asarray(coloured(20, 30)))
    assert rows[1]["pictures"] == [name]


@pytest.mark.parametrize(
    ("metric", "values", "kept"),
    [
        ("val/t/mean@1", [0.1, NAN, 0.9, 0.2, 0.3], 3),
        ("val/t/loss", [NAN, 0.5, 0.1, 0.2, 0.3], 3),
        ("val/t/divergence", [0.1, math.inf, -math.inf, 0.2, 0.3], 1),
        ("val/t/mean@1", [0.9, 0.1, NAN, NAN, NAN], 1),
        ("val/t/mean@1", [NAN] * 5, None),
    ],
)
def test_the_best_checkpoint_is_the_best_number(
    tmp_path: Path, metric: str, values: list[float], kept: int | None
) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric=metric)
    checkpoints = Checkpoints(tmp_path, config)
    for step, value in enumerate(values, start=1):
        state = RunState(step=step, sampler={}, carried={metric: value})
        with writing(checkpoints, state):
            pass
    assert {step for step, _ in checkpoints.complete()} == {5, kept or 5}


@pytest.mark.parametrize(
    ("metric", "values", "best", "step"),
    [
        ("val/t/mean@1", [NAN, 0.2, 0.7, NAN, 0.5], 0.7, 2),
        ("val/t/loss", [0.4, NAN, 0.3, 0.6], 0.3, 2),
        ("val/t/divergence", [0.4, 0.1, NAN, 0.6], 0.1, 1),
        ("val/t/divergence", [NAN, NAN], None, None),
        ("val/t/accuracy", [math.inf, 0.5], 0.5, 1),
        ("val/t/left_out", [0.2, 0.1, 0.3], 0.1, 1),
        ("val/reward/r/error_rate", [0.2, 0.1, 0.3], 0.1, 1),
        ("val/reward/r/timeout_rate", [0.2, 0.1, 0.3], 0.1, 1),
    ],
)
def test_the_summary_s_best_is_the_best_number(
    metric: str, values: list[float], best: float | None, step: int | None
) -> None:
    records: list[dict[str, Any]] = [{"step": n, metric: v} for n, v in enumerate(values)]
    found = summarize(records, status="finished", wall_s=1.0)["validation"][metric]
    assert (found["best"], found["best_step"]) == (best, step)


def test_the_summary_s_worst_mismatch_is_nan_where_one_was() -> None:
    name = "mismatch/logprob_abs_max"
    records = [{"step": n, "time/step_s": 1.0, name: v} for n, v in enumerate([0.1, NAN, 0.3])]
    assert math.isnan(summarize(records, status="finished", wall_s=1.0)["max"][name])


def random_value(draw: random.Random, depth: int) -> Any:
    leaves: list[Any] = [None, True, 3, -0.5, 'text\n"', [], {}, (), [1, 2], [1.5, None], {"a": 1}]
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(leaves)
    parts = [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return parts if draw.random() < 0.5 else {f"k{i}": part for i, part in enumerate(parts)}


def test_what_is_written_plainly_is_what_the_standard_library_writes(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(300):
        value = random_value(draw, 5)
        write_plain(tmp_path / "x.json", value)
        assert json.loads((tmp_path / "x.json").read_text()) == json.loads(json.dumps(value))


@pytest.mark.parametrize("value", [{2: 3}, [1, {2: 3}], {"a": [[], {2: 3}]}])
def test_a_key_that_is_no_string_is_refused_wherever_it_is(value: Any) -> None:
    with pytest.raises(TypeError, match="keys of JSON are strings, not 2"):
        list(encoded(value, lambda items: {}))


def test_a_state_is_readable_and_its_tokens_are_beside_it(tmp_path: Path) -> None:
    waiting = [{"version": 1, "group": to_plain(group(1000))} for _ in range(20)]
    state = RunState(step=1, sampler={"scheduler": {"waiting": waiting}})
    with writing(Checkpoints(tmp_path, CheckpointConfig()), state) as folder:
        pass
    assert not folder.exists()
    path = tmp_path / "step_000001"
    found = load_state(path)
    assert load_sampler(path, found) == json_like(state.sampler)
    lines = (path / "state.json").read_text().splitlines()
    assert 20 * 10 < len(lines) < 20 * 40
    assert (path / "state.json").stat().st_size < 20 * 1000
    assert (path / ARRAY_FILE).stat().st_size == 20 * 1000 * 8


def json_like(value: Any) -> Any:
    """The value with lists in place of tuples, and results in place of functions."""
    if callable(value):
        value = value()
    if isinstance(value, dict):
        return {key: json_like(item) for key, item in value.items()}
    return [json_like(item) for item in value] if isinstance(value, list | tuple) else value


def test_a_state_does_not_copy_the_tokens_and_holds_nobody_up_for_long(tmp_path: Path) -> None:
    own = group(1000)
    row = to_plain(own)["samples"][0]["written"]()
    assert row["tokens"] is own.samples[0].sample.completion.tokens
    # One call of the encoder, for which all threads wait, is a list long and no longer.
    rows = {"waiting": [{"group": to_plain(group(1000))} for _ in range(5)]}
    assert max(map(len, encoded(rows, lambda items: {"length": len(items)}))) < 200


def test_what_is_elsewhere_is_fetched_only_when_it_is_written(tmp_path: Path) -> None:
    fetched: list[int] = []

    @dataclass
    class Far:
        number: int

        def get(self) -> Written:
            fetched.append(self.number)
            return Written(array("i", [self.number]), array("f", [0.5]), f"text {self.number}")

    def sample(number: int) -> ScoredSample:
        far = Completion(Far(number), VersionRuns(((3, 1),)), FinishReason.STOP)
        return ScoredSample(Sample(f"s/{number}", "s", PROMPT, far), 1.0)

    plain = to_plain(Group(PROMPT, tuple(map(sample, range(3))), 1))
    assert fetched == []
    found = from_plain(from_disk(plain, tmp_path), lambda _: PROMPT)
    assert fetched == [0, 1, 2]
    assert [one.sample.completion.tokens[0] for one in found.samples] == [0, 1, 2]
    assert [one.sample.response_text for one in found.samples] == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("length", [0, 1, 5])
def test_arrays_of_any_length_come_back_from_anywhere_in_a_value(
    tmp_path: Path, length: int
) -> None:
    value = {"a": [1, array("i", range(length))], "b": {"c": array("f", [0.1] * length)}, "d": None}
    assert from_disk(value, tmp_path) == value


def test_parts_of_a_reward_may_have_any_name(tmp_path: Path) -> None:
    value = {"parts": {"__array__": 1.0}, "more": {"array": 1.0, "at": 0.0, "length": 3.0}}
    assert from_disk(value, tmp_path) == value


def test_a_value_without_arrays_has_no_second_file(tmp_path: Path) -> None:
    write_plain(tmp_path / "x.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_an_array_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="arrays of type 'd'"):
        write_plain(tmp_path / "x.json", array("d", [1.0]))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (["i", 0, 4], "ends before"),
        (["i", 10**6, 1], "ends before"),
        (["i", 0, 10**18], "ends before"),
        (["i", 10**40, 10**40], "ends before"),
        (["u", 0, 1], "names no array"),
        (["i", -4, 1], "names no array"),
        (["i", 0, True], "names no array"),
        ([["i"], 0, 1], "names no array"),
        (["i", 0], "names no array"),
    ],
)
def test_a_damaged_place_of_an_array_is_refused(
    tmp_path: Path, place: list[Any], message: str
) -> None:
    (tmp_path / ARRAY_FILE).write_bytes(b"\0" * 12)
    state = RunState(step=1, sampler={"scheduler": [{"__array__": place}]})
    with pytest.raises(CheckpointError, match=message):
        load_sampler(tmp_path, state)


def test_a_state_whose_arrays_are_missing_is_refused(tmp_path: Path) -> None:
    state = RunState(step=1, sampler={"x": {"__array__": ["i", 0, 1]}})
    with pytest.raises(CheckpointError, match="ends before"):
        load_sampler(tmp_path, state)


@pytest.mark.parametrize("limit", [100, 10_000])
def test_a_full_disk_leaves_no_state_that_looks_complete(tmp_path: Path, limit: int) -> None:
    state = RunState(step=1, sampler={"waiting": [to_plain(group(5000))]})
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with files_up_to(limit), pytest.raises(OSError), writing(checkpoints, state):
        pass
    assert checkpoints.complete() == []
    assert list(tmp_path.iterdir()) == []


def test_an_episode_is_written_turn_by_turn_with_all_that_was_said(tmp_path: Path) -> None:
    """Its third turn has a row of its own, whose prompt goes on from the second."""
    prompt = replace(PROMPT, tokens=(1, 2))
    runs = VersionRuns(((3, 2), (-1, 1), (3, 1)))
    first = Completion(Written(array("i", [5, 6, 9, 7]), array("f", [-1, -2, 0, -3])), runs, STOP)
    sample = Sample("s", "g", prompt, first, "text")
    later = replace(prompt, tokens=(1, 2, 5, 6, 9, 7, 8))
    branch = Sample("s", "g", later, Completion.of([4], [-1.0], [3], STOP), "")
    turns = (Turn(0, 2, 0.5), Turn(3, 4), Turn(0, 1, 1.0, row=1))
    scored = ScoredSample(sample, 1.5, turns=turns, branches=(branch,))
    path = tmp_path / "step_000000.jsonl"
    dump_rollouts(
        path,
        [Group(prompt, (scored,), 0)],
        limit=8,
        read=lambda tokens: " ".join(map(str, tokens)),
        find={"p": prompt}.__getitem__,
    )
    row = json.loads(path.read_text())
    assert row["logprob_mean"] == -2.0
    assert row["turns"] == [
        {"by": "policy", "text": "5 6", "reward": 0.5},
        {"by": "environment", "text": "9"},
        {"by": "policy", "text": "7", "reward": 0.0},
        {"by": "environment", "text": "8"},
        {"by": "policy", "text": "4", "reward": 1.0},
    ]
