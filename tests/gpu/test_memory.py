"""Memory of one GPU while a model is loaded and trained, beside docs/memory.md."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.loading import Job, counted, load, write_model
from benchmarks.memory_estimate import CASES, WIDTH, estimate, make_model, train
from roll.commands.memory.needs import INPUTS_AT_ONCE
from roll.commands.memory.plan import MAY_BE_OFF
from tests.contract.ranks import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]

LIMIT_S = 500
BFLOAT16 = 2


@pytest.mark.parametrize("case", ["fsdp2", "zero3", "megatron"])
def test_loading_needs_the_weights_and_the_largest_tensor(case: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", 1e6)
    write_model(tmp_path / "model", 3e8)
    job = partial(load, job=Job(case, 1, False, tmp_path / "model"), tiny=tmp_path / "tiny")
    (found,) = run_ranks(1, job, tmp_path / "ranks", timeout_s=LIMIT_S, platform="cuda")
    elements, largest = counted(tmp_path / "model")
    assert found["peak"] <= 1.1 * BFLOAT16 * (elements + largest)
    assert found["kept"] >= BFLOAT16 * elements  # else the meter reads nothing


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mistral"])
def test_training_needs_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    make_model(case, tmp_path / "model")
    needs = estimate(case, tmp_path / "model", 1)
    job = partial(train, case=case, model=tmp_path / "model")
    (found,) = run_ranks(1, job, tmp_path / "ranks", timeout_s=LIMIT_S, platform="cuda")
    assert abs(needs.total / found["peak"] - 1) <= MAY_BE_OFF


def test_inputs_of_layers_in_host_memory_leave_the_gpu(tmp_path: Path) -> None:
    few = CASES["mistral"]
    deep = few.sizes | {"num_hidden_layers": 48, "vocab_size": 2048}
    stays = replace(few, sizes=deep, rows=64, rows_at_once=64)
    moves = replace(stays, offload=True)
    make_model(stays, tmp_path / "model")
    peaks = []
    for number, case in enumerate((stays, moves)):
        job = partial(train, case=case, model=tmp_path / "model")
        folder = tmp_path / str(number)
        (found,) = run_ranks(1, job, folder, timeout_s=LIMIT_S, platform="cuda")
        peaks.append(found["peak"])
    # 16384 tokens of 512 float32, of all layers but a few: 1.5 GB.
    inputs = 4 * 64 * WIDTH * deep["hidden_size"] * (48 - INPUTS_AT_ONCE)
    assert peaks[0] - peaks[1] > 0.9 * inputs
    assert estimate(moves, tmp_path / "model", 1).total > (1 - MAY_BE_OFF) * peaks[1]
