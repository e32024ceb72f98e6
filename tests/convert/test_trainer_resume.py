"""A run that goes on ends as one that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from mcore_adapter.errors import ConfigError, ConversionError
from mcore_adapter.train.folder import Folder
from mcore_adapter.train.processes import StopRequest
from mcore_adapter.train.settings import Settings
from tests.convert.spawned import run_ranks
from tests.convert.trainer_runs import (
    STEPS,
    chat_rows,
    hf_model,
    pair_rows,
    run_all,
    settings,
    steps_of,
    trainable,
    write_rows,
)
from tests.full_disk import files_up_to

SOURCE = Path(__file__).parents[2] / "mcore_adapter" / "src"


class StopAfter(StopRequest):
    """As if a signal came in the course of a step."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        super().__init__()

    @property
    def made(self) -> bool:
        """Asked once a step."""
        self._left -= 1
        return self._heard or self._left < 0

    @made.setter
    def made(self, heard: bool) -> None:
        """By a signal to the test itself."""
        self._heard = heard


def stop_in_third_step(run: Settings) -> bool:
    from mcore_adapter.train.processes import joined
    from mcore_adapter.train.setup import prepare

    with joined(run.layout.sizes, run.seed) as device:
        # One rank hears it, and all stop.
        return prepare(run, device).to_the_end(StopAfter(2 if dist.get_rank() == 1 else 99))


def three_runs(through: Settings, stopped: Settings, others: list[Settings]) -> tuple[bool, Any]:
    """Whether the stopped run came to its end; and what runs say that do not fit what it left."""
    from mcore_adapter.train.setup import train

    run_all([through])
    finished = stop_in_third_step(stopped)
    refusals = []
    for other in others:
        with pytest.raises(ConfigError) as caught:
            train(other)
        refusals.append(str(caught.value))
    run_all([stopped.model_copy(update={"resume": "auto"})])
    return finished, refusals


def same_in_both(run: Settings) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in step.items() if name not in ("time", "tokens_per_s")}
        for step in steps_of(run)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name", "layout", "dtype"),
    [
        ("dpo", "qwen3_tied", {"distributed_optimizer": True}, "bf16"),
        ("sft", "qwen3_moe", {"ep": 2}, "fp32"),
    ],
)
def test_a_run_that_goes_on_is_the_same_to_the_bit(
    method: str, name: str, layout: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    model = trainable(tmp_path, name)
    data = write_rows(tmp_path / "rows.jsonl", (pair_rows if method == "dpo" else chat_rows)(10))
    how: dict[str, Any] = {
        "layout": layout,
        "dtype": dtype,
        "data": {"shuffle": True},
        "optimizer": {"schedule": "cosine", "warmup_steps": 1},
        "steps": 6,
        "keep": 2,
        "save_every": 2,
    }
    through = settings(model, data, tmp_path / "through", method, **how)
    stopped = settings(model, data, tmp_path / "stopped", method, **how)
    others = [
        stopped,
        stopped.model_copy(update={"resume": "auto", "seed": 5}),
        settings(model, data, tmp_path / "stopped", method, **{**how, "steps": 2}, resume="auto"),
    ]
    for finished, (again, seed, shorter) in run_ranks(three_runs, 2, through, stopped, others):
        assert not finished
        assert "exists; say resume=auto" in again
        assert "seed was 0, is 5" in seed
        assert "has made 3 steps, and 2 are asked for" in shorter
    assert len(same_in_both(through)) == 6
    assert same_in_both(stopped) == same_in_both(through)
    for run in (through, stopped):
        kept = sorted(path.name for path in (run.output / "checkpoints").iterdir())
        assert kept == ["step-00000004", "step-00000006"]
    ends = [load_file(run.output / "model" / "model.safetensors") for run in (through, stopped)]
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


def extended(run: Settings) -> bool:
    """Do one epoch, then two more; return whether the float32 copies of weights that training
    begins with are as precise as the file."""
    from mcore_adapter.optimizer_state import states_of
    from mcore_adapter.train.policy import load_policy
    from mcore_adapter.train.processes import joined

    with joined(run.layout.sizes, run.seed) as device:
        policy = load_policy(run, device)
        mains = [state.main for state in states_of(policy.chunks, policy.optimizer).values()]
    run_all([run])
    run_all([run.model_copy(update={"resume": "auto", "epochs": 3})])
    return all(not main.bfloat16().float().equal(main) for main in mains if main.std() > 0)


def test_a_run_that_ended_goes_on_with_more_epochs_and_leaves_no_example_out(
    tmp_path: Path,
) -> None:
    """Ten rows in steps of six: the first epoch ends with a step of four."""
    model = trainable(tmp_path, "qwen3_tied")
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(10))
    how: dict[str, Any] = {"dtype": "bf16", "data": {"shuffle": True}, "epochs": 1, "steps": None}
    run = settings(model, data, tmp_path / "run", "sft", **how)
    assert run_ranks(extended, 1, run) == [True]
    tokens = [step["tokens"] for step in steps_of(run)]
    assert len(tokens) == 2 + 4  # 20 rows are left: three steps of six, and one of two
    assert sum(tokens) == 3 * sum(tokens[:2])


def extended_without_a_source(run: Settings, source: Path) -> str:
    """Do a step more than an earlier run, and lose the folder of the model before the export."""
    from mcore_adapter.train.processes import StopRequest, joined
    from mcore_adapter.train.setup import prepare

    run_all([run])
    more = run.model_copy(update={"resume": "auto", "steps": STEPS + 1})
    with joined(more.layout.sizes, more.seed) as device:
        made = prepare(more, device)
        (source / "config.json").rename(source / "lost.json")
        with pytest.raises(ConversionError) as caught:
            made.to_the_end(StopRequest())
        (source / "lost.json").rename(source / "config.json")
    return str(caught.value)


def test_an_export_that_fails_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    model = trainable(tmp_path, "qwen3_tied")
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(10))
    run = settings(model, data, tmp_path / "run", save_every=1)
    [said] = run_ranks(extended_without_a_source, 1, run, model)
    assert "config.json" in said
    before = load_file(run.output / "model" / "model.safetensors")
    run_ranks(run_all, 1, [run.model_copy(update={"resume": "auto", "steps": STEPS + 1})])
    after = load_file(run.output / "model" / "model.safetensors")
    assert any(not after[key].equal(before[key]) for key in before)
    left = ["checkpoints", "data", "metrics.jsonl", "model"]
    assert sorted(path.name for path in run.output.iterdir()) == left
    kept = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000004"]


def full(path: Path, says: str) -> Path:
    path.mkdir(parents=True)
    (path / "weights").write_text(says)
    return path


@pytest.mark.parametrize("killed_after", ["writing", "hiding the old", "giving the name"])
def test_what_a_kill_leaves_of_an_export_is_put_right_at_the_next_start(
    killed_after: str, tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    if killed_after == "writing":
        full(folder.model, "old")
    else:
        full(tmp_path / ".model.old-0123abcd", "old")
    full(folder.model if killed_after == "giving the name" else folder.aside(folder.model), "new")
    full(folder.checkpoints / ".step-00000001.old-89abcdef", "half")
    full(folder.checkpoint(2), "whole")
    folder.tidy()
    assert [path.name for path in tmp_path.iterdir() if path != folder.checkpoints] == ["model"]
    wanted = "old" if killed_after == "writing" else "new"
    assert (folder.model / "weights").read_text() == wanted
    assert list(folder.checkpoints.iterdir()) == [folder.checkpoint(2)]


DIES_WITH_THE_FIRST_FILE_THAT_IT_DELETES = """
import os, signal, sys
from pathlib import Path
from mcore_adapter.train.folder import Folder
def hook(event, arguments):
    if event == "os.remove":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
Folder(Path(sys.argv[1])).forget(1)
"""


def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_half_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 2):
        full(folder.checkpoint(step), "whole")
    command = [sys.executable, "-c", DIES_WITH_THE_FIRST_FILE_THAT_IT_DELETES, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not folder.checkpoint(1).exists()
    full(folder.checkpoint(3), "whole")
    folder.forget(1)
    assert list(folder.checkpoints.iterdir()) == [folder.checkpoint(3)]


def in_several_files(
    model: Path, target: Path, dtype: str = "fp32", room: int | None = None
) -> None:
    """Args:
    room: largest size of a file that the disk takes.
    """
    from mcore_adapter.load import load, read_config
    from mcore_adapter.modeling.model import build_model, init_parallel
    from mcore_adapter.models import table_of
    from mcore_adapter.parallel_sizes import ParallelSizes
    from mcore_adapter.platform import adapt_to_cpu
    from mcore_adapter.write import write_model

    adapt_to_cpu()
    config, sizes = read_config(model), ParallelSizes(tp=2)
    init_parallel(sizes)
    chunks = build_model(config, sizes)
    load(model, chunks, table_of(config), sizes)
    with nullcontext() if room is None else files_up_to(room):
        write_model(
            target, model, chunks, table_of(config), sizes, dtype=dtype, max_shard_bytes=20_000
        )


def refused_there(model: Path, target: Path, harm: str) -> str:
    with pytest.raises((ConversionError, KeyError)) as error:
        in_several_files(
            model,
            target,
            dtype="fp8" if harm == "no such dtype" else "fp32",
            room=20 if harm == "full disk" else None,
        )
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize(
    ("harm", "said", "said_by_rank_0"),
    [
        ("exists", "target exists; name a folder that does not, or remove it", None),
        ("full disk", "File too large", None),
        ("no such dtype", "KeyError: 'fp8'", "KeyError: 'fp8'"),
    ],
)
def test_a_model_that_rank_0_cannot_write_fails_on_all_ranks(
    harm: str, said: str, said_by_rank_0: str | None, tmp_path: Path
) -> None:
    model, target = trainable(tmp_path, "qwen3_tied"), tmp_path / "target"
    if harm == "exists":
        target.mkdir()
    first, second = run_ranks(refused_there, 2, model, target, harm, timeout_s=60)
    assert second.startswith(f"ConversionError: rank 0 cannot write {target}: ")
    assert said in second
    assert first == (said_by_rank_0 or second)
    assert target.exists() == (harm == "exists")
    assert list(tmp_path.glob(".*")) == []


class SpoilMetrics(StopRequest):
    """As if something took the place of the file in the course of the first step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__()

    @property
    def made(self) -> bool:
        """Asked once a step."""
        if dist.get_rank() == 0 and self._path.is_file():
            self._path.unlink()
            self._path.mkdir()
        return False

    @made.setter
    def made(self, heard: bool) -> None: ...


def without_metrics(run: Settings) -> tuple[str, int]:
    """Why a run ends, and after how many steps."""
    from mcore_adapter.train.processes import joined
    from mcore_adapter.train.setup import prepare

    with joined(run.layout.sizes, run.seed) as device:
        made = prepare(run, device)
        with pytest.raises(ConversionError) as error:
            made.to_the_end(SpoilMetrics(run.output / "metrics.jsonl"))
        return str(error.value), made.done


@pytest.mark.parametrize("steps", [0, 2])
def test_metrics_that_rank_0_cannot_write_end_the_run_on_all_ranks(
    steps: int, tmp_path: Path
) -> None:
    model, rows = trainable(tmp_path, "qwen3_tied"), write_rows(tmp_path / "rows", chat_rows(24))
    run = settings(model, rows, tmp_path / "out", resume="auto")
    metrics = run.output / "metrics.jsonl"
    if steps == 0:
        metrics.mkdir(parents=True)
    first, second = run_ranks(without_metrics, 2, run, timeout_s=60)
    assert first == second
    assert first[0].startswith(f"rank 0 cannot write {metrics}: ")
    assert first[1] == steps


def test_a_large_model_is_written_in_several_files(tmp_path: Path) -> None:
    model, target = trainable(tmp_path, "qwen3_tied"), tmp_path / "target"
    run_ranks(in_several_files, 2, model, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    weights = hf_model(target).state_dict()
    assert all(weights[key].equal(value) for key, value in hf_model(model).state_dict().items())
    assert (target / "chat_template.jinja").is_file()
