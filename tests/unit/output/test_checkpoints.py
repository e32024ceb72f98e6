"""Checkpoints survive kills between any two renames, strange files, and a run that goes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import CheckpointError
from roll.output_dir.checkpoints import (
    Checkpoints,
    RunState,
    load_state,
    require_written,
    write_folder,
)
from roll.output_dir.resume import (
    find_start,
    finished_summary,
    same_command,
    steps_left,
    where_it_goes_on,
)
from tests.rlvr_file import RUN, loaded
from tests.unit.runtime.written_checkpoints import writing


def write(checkpoints: Checkpoints, step: int, **carried: float) -> None:
    with writing(checkpoints, RunState(step=step, sampler={}, carried=carried)) as folder:
        (folder / "weights").write_text(str(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_foreign_dot_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / ".nfs0001").mkdir()
    write(Checkpoints(tmp_path, CheckpointConfig()), 1)
    assert names(tmp_path) == {".DS_Store", ".nfs0001", "step_000001"}


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    write(checkpoints, 4)
    # As `writing` leaves it when it dies after the first rename of a replacement.
    (tmp_path / "step_000004").rename(tmp_path / ".old_step_000004")
    (tmp_path / ".writing_step_000004").mkdir()
    assert checkpoints.find("auto") == tmp_path / "step_000004"
    assert names(tmp_path) == {"step_000004"}
    # And after the second: the old one has a twin.
    (tmp_path / ".old_step_000004").mkdir()
    checkpoints.tidy()
    assert names(tmp_path) == {"step_000004"}


def test_a_run_that_goes_back_sets_newer_checkpoints_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (10, 20):
        write(checkpoints, step)
    checkpoints.abandon_newer(10)
    write(checkpoints, 20)
    checkpoints.abandon_newer(10)
    assert names(tmp_path) == {
        "step_000010",
        "abandoned_step_000020",
        "abandoned_step_000020.2",
    }
    write(checkpoints, 11)
    assert [step for step, _ in checkpoints.complete()] == [10, 11]


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    write(checkpoints, 30)
    write(checkpoints, 10)
    assert names(tmp_path) == {"step_000010", "step_000030"}


def test_the_best_are_kept_besides_the_newest(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="val/t/mean@1")
    checkpoints = Checkpoints(tmp_path, config)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2], start=1):
        write(checkpoints, step, **{"val/t/mean@1": score})
    assert [step for step, _ in checkpoints.complete()] == [2, 4]
    assert load_state(tmp_path / "step_000002").carried == {"val/t/mean@1": 0.9}


def test_a_file_that_only_another_node_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"meta\.json, but it is not here; .* all nodes share"
    ):
        require_written(tmp_path / "actor_train" / "meta.json")


def test_an_end_by_a_signal_tells_which_steps_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = loaded(path, "max_steps=9", f"output_dir={tmp_path}/out")
    assert where_it_goes_on(config) == "the same command begins anew (there is no checkpoint yet)"
    with writing(
        Checkpoints(tmp_path / "out/checkpoints", config.checkpoint), RunState(step=4, sampler={})
    ):
        pass
    goes_on = "the same command goes on with step 4 of 9, from its last checkpoint"
    assert where_it_goes_on(config) == goes_on
    records = [{"step": step, "time/step_s": 1.0} for step in range(6)]
    file = tmp_path / "out/metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records[:5]))
    assert where_it_goes_on(config) == f"{goes_on}; step 4 is done again"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert where_it_goes_on(config) == f"{goes_on}; steps 4 to 5 are done again"


def test_an_end_tells_what_the_same_command_must_say_otherwise_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    earlier = f"resume={tmp_path}/other/step_000002"
    run = (path, "max_steps=9", f"output_dir={tmp_path}/out")
    begins = "the same command begins anew ("
    assert where_it_goes_on(loaded(*run, "resume=never")) == f"{begins}resume: never)"
    assert where_it_goes_on(loaded(*run, earlier)).startswith(
        f"{begins}there is no checkpoint here"
    )
    config = loaded(*run)
    with writing(
        Checkpoints(tmp_path / "out/checkpoints", config.checkpoint), RunState(step=4, sampler={})
    ):
        pass
    rest = "goes on with step 4 of 9, from its last checkpoint"
    for resume in ("resume=never", earlier):
        with_auto = f"the same command with resume=auto {rest}"
        assert where_it_goes_on(loaded(*run, resume)) == with_auto
    assert same_command(loaded(*run, "stop_at=2200-01-31 18:00")) == "the same command"
    passed = "stop_at=2020-01-31 18:00"
    assert same_command(loaded(*run, passed)) == "the same command with a later stop_at"
    both = "the same command with resume=auto and a later stop_at"
    assert same_command(loaded(*run, passed, "resume=never")) == both


def test_a_run_gives_an_export_its_name_back_that_a_kill_has_left_without_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    (tmp_path / "out/.old_hf").mkdir(parents=True)
    (tmp_path / "out/.old_hf/weights").write_text("old")
    find_start(loaded(path, f"output_dir={tmp_path}/out"))
    assert (tmp_path / "out/hf/weights").read_text() == "old"
    assert not (tmp_path / "out/.old_hf").exists()


def test_a_checkpoint_below_the_home_folder_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    checkpoints = Checkpoints(tmp_path / "other", CheckpointConfig())
    write(checkpoints, 4)
    named = f"~/{os.path.relpath(tmp_path, Path.home())}/other/step_000004"
    assert checkpoints.find(named) is not None
    config = loaded(path, "max_steps=9", f"output_dir={tmp_path}/out", f"resume={named}")
    assert steps_left(config) == range(4, 9)


def test_a_checkpoint_without_its_validation_is_neither_complete_nor_ranked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = loaded(path, "max_steps=2", f"output_dir={tmp_path}/out", "checkpoint.export_hf=false")
    best = CheckpointConfig(keep_last=1, keep_best=1, best_metric="val/t/mean@1")
    folder = Checkpoints(tmp_path / "out/checkpoints", best)
    for step, carried in ((1, {"val/t/mean@1": 0.5}), (2, None)):
        with writing(folder, RunState(step=step, sampler={}, carried=carried)):
            pass
    assert [step for step, _ in folder.complete()] == [1, 2]
    assert not find_start(config).recorded
    assert finished_summary(config) is None
    with writing(folder, RunState(step=2, sampler={})):
        pass
    assert finished_summary(config) is not None


KILLED = """
import os, signal, sys
from pathlib import Path
from roll.output_dir.checkpoints import restore_folder, write_folder

lines = 0

def killing(wanted):
    def trace(frame, event, arg):
        global lines
        if frame.f_code.co_name != "write_folder":
            return None
        if event == "line":
            lines += 1
            if lines == wanted:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

for wanted in range(1, 100):
    final = Path(sys.argv[1]) / str(wanted) / "hf"
    final.mkdir(parents=True)
    (final / "weights").write_text("old")
    child = os.fork()
    if not child:
        sys.settrace(killing(wanted))
        write_folder(final, lambda path: (path / "weights").write_text("new"))
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    restore_folder(final)
    print((final / "weights").read_text())
    if ended == 0:
        break
"""


def test_a_kill_at_any_line_leaves_a_folder_that_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = ended.stdout.split()
    assert len(found) > 10
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}
    assert not list(tmp_path.glob("*/.old_hf"))


def write_weights(said: str, path: Path) -> None:
    (path / "weights").write_text(said)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_a_link_is_written_where_the_link_leads_to(
    tmp_path: Path, there: bool
) -> None:
    disk, link = tmp_path / "disk" / "weights", tmp_path / "run" / "hf"
    disk.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to(disk)
    if there:
        disk.mkdir()
    for said in ("first", "second"):
        write_folder(link, partial(write_weights, said))
        assert (disk / "weights").read_text() == said
    assert link.is_symlink()
    assert [each.name for each in tmp_path.rglob("*")].count("weights") == 2
    assert {each.name for each in tmp_path.rglob("*")} == {"disk", "run", "hf", "weights"}
