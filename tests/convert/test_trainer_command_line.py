"""The trainer as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from mcore_adapter.errors import ConfigError
from mcore_adapter.train.processes import StopRequest
from mcore_adapter.train.settings import read_settings
from tests.convert.trainer_runs import (
    chat_rows,
    hf_model,
    likelihood_by_hand,
    steps_of,
    text_rows,
    trainable,
    write_rows,
)

SOURCE = Path(__file__).parents[2] / "mcore_adapter" / "src"


def config(folder: Path, model: Path, rows: Path, method: str) -> Path:
    """A file of as little as needed."""
    path = folder / "run.yaml"
    made = {
        "method": method,
        "model": str(model),
        "output": str(folder / "out"),
        "data": {"train": str(rows), "max_length": 64},
        "batch": {"examples": 6, "tokens": 128},
        "dtype": "fp32",
        "log_every": 1,
    }
    path.write_text(yaml.safe_dump(made))
    return path


def start(*arguments: str | Path, ranks: int = 1) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        sys.executable,
        *(torchrun if ranks > 1 else []),
        "-m",
        "mcore_adapter",
        "train",
        *map(str, arguments),
    ]
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_a_model_that_knows_more(tmp_path: Path) -> None:
    rows = chat_rows(24)
    model = trainable(tmp_path, "qwen3")
    path = config(tmp_path, model, write_rows(tmp_path / "rows.jsonl", rows), "sft")
    code, said = finished(start(path, "layout.tp=2", "optimizer.lr=3e-3", "epochs=2", ranks=2))
    assert code == 0, said
    # Rank 0 speaks alone.
    assert said.count("step 8/8") == 1, said
    assert "24 rows, 24 examples" in said
    with torch.no_grad():
        before, after = (
            likelihood_by_hand(hf_model(folder), rows)
            for folder in (model, tmp_path / "out" / "model")
        )
    assert after < before - 0.1


def test_a_request_to_stop_keeps_the_number_of_its_first_signal() -> None:
    with StopRequest().heard() as stop:
        assert not stop.made
        for number in (signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_the_next_run_goes_on_from(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = trainable(tmp_path, "qwen3")
    path = config(tmp_path, model, write_rows(tmp_path / "x.jsonl", text_rows(20)), "pretrain")
    process = start(path, "steps=100000")
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    code, said = finished(process)
    assert code == 128 + number, said
    made = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert f"stopped after step {made}" in said
    assert "say resume=auto to go on" in said
    code, said = finished(start(path, f"steps={made + 1}", "resume=auto"))
    assert code == 0, said
    assert [line["step"] for line in steps_of(read_settings(path))] == list(range(1, made + 2))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr?"),
        ("lora.rnak=1", "unknown key lora.rnak; did you mean lora.rank?"),
        ("layuot.tp=2", "unknown key layuot; did you mean layout?"),
        ("optimizer.zzz=1", "unknown key optimizer.zzz (known: optimizer.lr, optimizer.schedule"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast': Input should be a valid number"),
        ("optimizer.lr=0", "optimizer.lr is 0: Input should be greater than 0"),
        ("model=null", "model is None"),
        ("steps", "expected key.sub=value"),
        ("data.max_length=1", "max_length is 1: Input should be greater than or equal to 2"),
        ("data.too_long=split", "which sft cannot do"),
        ("dpo.beta=1", "dpo.* is given, but method is sft"),
        ("batch.tokens=63", "one example can have 64 tokens"),
        ("epochs=1", "epochs and steps are both given"),
        ("validate_every=2", "validate_every is 2, but there is no data.validation; name a file"),
        ("layout.sequence_parallel=true", "layout.sequence_parallel is true, but layout.tp is 1"),
        ("optimizer.min_lr=1", "optimizer.min_lr is 1.0, above optimizer.lr, 1e-05"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas is (0.9, 1.0), expected two numbers less"),
        ("optimizer={min_lr: 1e-6, schedule: constant}", "which does not decay; remove it, or set"),
        ("optimizer.warmup_steps=3", "set it to at most 2, raise the number of steps, or set opt"),
        ("optimizer.warmup_steps=5", "optimizer.warmup_steps is 5, and the run has 3 steps, which"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing is 0.5, expected less than 0.5"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(override: str, message: str, tmp_path: Path) -> None:
    path = config(tmp_path, tmp_path, tmp_path, "sft")
    assert read_settings(path, ["optimizer.lr=1e-4", "steps=3"]).optimizer.lr == 1e-4
    with pytest.raises(ConfigError) as caught:
        read_settings(path, ["steps=3", override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.warmup_steps=2",  # the last step has the peak
        "optimizer={warmup_steps: 3, schedule: constant}",  # goes on later with more steps
        "optimizer={min_lr: 0.0, schedule: constant}",
        "optimizer={lr: 1e-5, min_lr: 1e-5}",
        "layout.sequence_parallel=false",
    ],
)
def test_settings_that_do_what_they_say_are_taken(override: str, tmp_path: Path) -> None:
    assert read_settings(config(tmp_path, tmp_path, tmp_path, "sft"), ["steps=3", override])


def test_a_warm_up_that_is_too_long_for_the_epochs_is_refused_when_the_rows_are_known(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", text_rows(13))
    path = config(tmp_path, trainable(tmp_path, "qwen3"), rows, "pretrain")
    code, said = finished(start(path, "optimizer.warmup_steps=3"))  # 13 rows are 3 steps of 6
    assert code == 1, said
    assert "optimizer.warmup_steps is 3, and the run has 3 steps" in said


def test_a_typo_is_told_without_loading_torch(tmp_path: Path) -> None:
    path = config(tmp_path, tmp_path, tmp_path, "sft")
    code = (
        "import sys; from mcore_adapter.cli import app\n"
        f"try: app(['train', {str(path)!r}, 'optimizer.lrr=1'])\n"
        "except SystemExit as e: code = e.code\n"
        "heavy = {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"error: {path}: unknown key optimizer.lrr; did you mean optimizer.lr?\n"
