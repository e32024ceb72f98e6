"""The measurements of a GPU: what is told without one, and that their commands can be read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.all import PARTS, Part, measure
from benchmarks.gpu.kernel_times import attention_table, geometric_batch, head_table, update_row
from benchmarks.gpu.models import SIZES, config_of, write_model
from benchmarks.overhead import in_process
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.models.load import load_causal_lm

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def test_a_machine_without_a_gpu_is_told_what_would_be_measured() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/all.py"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for name, part in PARTS.items():
        assert f"{name}: {part.measures} (at most {part.minutes:g} minutes)" in done.stdout
        assert f"python {part.command}\n" in done.stdout


def test_all_parts_together_end_in_forty_minutes() -> None:
    assert sum(part.minutes for part in PARTS.values()) <= 40


@pytest.mark.parametrize("name", PARTS)
def test_each_command_names_a_script_and_options_that_it_has(name: str) -> None:
    script, *arguments = PARTS[name].command.split()
    text = (ROOT / script).read_text()
    for option in arguments[::2]:
        assert f'add_argument("{option}"' in text


@pytest.mark.parametrize(
    ("code", "minutes", "ended"),
    [
        ("print(2+3)", 1, "exit code 0"),
        ("exit(3)", 1, "exit code 3"),
        ("import time\ntime.sleep(60)", 0.01, "no end after 0.01"),
    ],
)
def test_a_part_that_fails_or_never_ends_is_told(
    code: str, minutes: float, ended: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "part.py"
    script.write_text(code)
    found = measure(Part("nothing", str(script), minutes), tmp_path / "out.txt")
    assert str(found["ended"]).startswith(ended)
    assert (tmp_path / "out.txt").read_text() == capfd.readouterr().out


def test_the_models_are_whole_and_of_the_sizes_that_they_are_named_after(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "0.1M")
    model = load_causal_lm(ModelConfig(path=str(path), dtype="bfloat16"))
    assert model.num_parameters() == pytest.approx(0.1e6, rel=0.2)
    for size in [size for size in SIZES if size.endswith("B")]:
        with torch.device("meta"):
            big = type(model)(config_of(size))
        assert big.num_parameters() == pytest.approx(1e9 * float(size[:-1]), rel=0.06)


def test_tables_of_kernels_have_a_line_for_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "model", "0.1M")
    head_table(path, CPU, tokens=64, repeats=1)
    attention_table(path, CPU, tokens=64, repeats=1)
    lines = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    for name in ("whole", "chunks of 256", "chunks of 4096", "sdpa, 1 rows of 64"):
        assert f"| {name}" in lines


def test_an_update_is_measured_and_then_its_model_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU the model of the next line would not fit beside it."""
    config = ModelConfig(path=str(write_model(tmp_path / "model", "0.1M")))
    role = TrainRole(pool="p", strategy=Fsdp2Config(), max_tokens_per_microbatch=64)
    gc.collect()
    before = models()
    gc.disable()
    try:
        update_row("padded", role, config, geometric_batch(32), CPU, 1)
        after = models()
    finally:
        gc.enable()
    assert after == before
    assert capsys.readouterr().out.startswith("| padded |")


def models() -> int:
    """Number of models in this process."""
    return sum(isinstance(each, PreTrainedModel) for each in gc.get_objects())


def test_geometric_rows_have_about_the_tokens_that_are_asked_for() -> None:
    batch = geometric_batch(2000)
    assert 2000 <= int(batch.lengths.sum()) < 2600
    assert batch.token_weights is not None
    assert float(batch.token_weights.sum()) == pytest.approx(1.0)


def test_a_part_that_ends_without_an_answer_is_not_waited_for() -> None:
    with pytest.raises(RuntimeError, match="exit: ended with exit code 1"):
        in_process(sys.exit)  # whose argument, the queue, is no exit code
    assert in_process(put, 2.5) == [2.5]


def put(value: float, queue: Any) -> None:
    """Answer as a part of the benchmark does."""
    queue.put([value])
