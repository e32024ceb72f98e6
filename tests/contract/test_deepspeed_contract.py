"""DeepSpeed as a guest in our processes: quiet, without a compiler, and gone when it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig
from roll.core.types import WorkerSpec
from roll.platform.machine import free_port
from tests.contract.backends import ZERO_3, TrainBackend
from tests.contract.ranks import make_spec, run_ranks
from tests.contract.train_job import ADAM, EntropyBonusLoss, rows_of, train_batch
from tests.tiny import save_tiny_model

STAGES: tuple[dict[str, Any], ...] = ({"stage": 0}, {"stage": 2}, ZERO_3)


def train_once(spec: WorkerSpec, model: ModelConfig, settings: dict[str, Any]) -> float:
    backend, linear = (
        TrainBackend("", DeepspeedConfig, (), settings=settings),
        torch.nn.functional.linear,
    )
    strategy = backend.build(spec, model, optimizer=ADAM, total_steps=4)
    metrics = strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    strategy.close()
    assert not dist.is_initialized()
    assert torch.nn.functional.linear is linear
    return metrics.values_by_name()["grad_norm"]


def twice(spec: WorkerSpec, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Each strategy joins a process group of its own, after the one before has left its own."""
    model = ModelConfig(path=str(folder.parent / "model"))
    host = spec.rendezvous.rsplit(":", 1)[0]
    norms = []
    for port, settings in zip(ports, STAGES * 2, strict=True):
        another = replace(spec, rendezvous=f"{host}:{port}")
        norms.append(train_once(another, model, settings))
    return {"norms": norms}


@pytest.mark.slow
def test_a_process_may_leave_its_group_and_join_another(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    job = partial(twice, ports=[free_port() for _ in STAGES * 2])
    ranks = run_ranks(2, job, tmp_path / "ranks", timeout_s=600)
    for rank in ranks:
        assert rank["norms"] == pytest.approx([rank["norms"][0]] * 6, rel=1e-6)


def unlike(spec: WorkerSpec, folder: Path, *, checkpointing: bool) -> dict[str, Any]:
    """Updates in which one rank reads nearly all tokens of its rows and the other few, in turns.

    Several, because DeepSpeed gathers ahead from the second on, in the order of the first.
    """
    model = ModelConfig(path=str(folder.parent / "model"))
    backend = TrainBackend("", DeepspeedConfig, (), settings=ZERO_3)
    strategy = backend.build(
        spec, model, optimizer=ADAM, total_steps=4, activation_checkpointing=checkpointing
    )
    whole = train_batch()
    width = whole.tokens.shape[1]
    whole = replace(whole, lengths=torch.full_like(whole.lengths, width))  # no share is padding
    at = torch.arange(width)
    norms = []
    for step in range(4):
        many_B1 = (torch.arange(len(whole))[:, None] < len(whole) // 2) ^ bool(step % 2)
        mask = torch.where(many_B1, at >= 1, at >= width - 2)
        batch = replace(whole, loss_mask=mask, token_weights=mask.float() / mask.sum())
        rows = batch.split(spec.world_size)[spec.rank]
        metrics = strategy.train(rows, EntropyBonusLoss())
        norms.append(metrics.values_by_name()["grad_norm"])
    strategy.close()
    return {"norms": norms}


@pytest.mark.slow
def test_ranks_that_read_unlike_shares_of_their_tokens_gather_in_one_order(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    plain, checkpointed = (
        [rank["norms"] for rank in run_ranks(2, job, tmp_path / name, timeout_s=600)]
        for name, job in (
            ("plain", partial(unlike, checkpointing=False)),
            ("checkpointed", partial(unlike, checkpointing=True)),
        )
    )
    for ours, theirs in zip(checkpointed, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def main(model: str) -> None:
    """What the test below starts; writes what it changed in the environment."""
    before = dict(os.environ)
    torch.set_num_threads(1)
    for settings in STAGES:
        for dtype in ("float32", "bfloat16"):
            config = ModelConfig.model_validate({"path": model, "dtype": dtype})
            train_once(make_spec(0, 1, free_port()), config, settings)
    changed = {name for name in os.environ if os.environ[name] != before.get(name)}
    gone = before.keys() - os.environ.keys()
    sys.stdout.write(f"changed: {sorted(changed | gone)}\n")


@pytest.mark.slow
def test_it_prints_nothing_compiles_nothing_and_sets_two_variables(tmp_path: Path) -> None:
    model, extensions = save_tiny_model(tmp_path / "model"), tmp_path / "extensions"
    environment = {
        **os.environ,
        "PATH": str(tmp_path),  # no compiler
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environment.pop("LOCAL_RANK", None)
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    code = f"from tests.contract.test_deepspeed_contract import main; main({str(model)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "changed: ['LOCAL_RANK', 'PYTORCH_NVML_BASED_CUDA_CHECK']\n"
    assert "deepspeed" not in done.stderr.lower(), done.stderr
    assert not extensions.exists()
