"""What every rank of a training backend is put through; the tests compare the results.

One group of processes runs all of it, because starting one costs seconds.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from roll.core.threads.write_thread import WriteThread, Written
from roll.core.types import WorkerSpec
from roll.strategy.interfaces import TrainStrategy
from tests.contract.backends import TRAIN_BACKENDS, TrainBackend, gradient_of_step
from tests.tiny import rollout_batch

ROWS = 8
SMALL_BUDGET = 40
ADAM = AdamWConfig(lr=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=1)


class EntropyBonusLoss:
    """REINFORCE with an entropy bonus; `scale` infinite gives a gradient that is not finite. With
    `bonus` None the loss reads no entropies."""

    def __init__(self, scale: float = 1.0, bonus: float | None = 0.1) -> None:
        self.scale, self.bonus = scale, bonus

    @property
    def reads_entropy(self) -> bool:
        return self.bonus is not None

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="train_batch")
        policy_BT = -terms.logprobs_BT * advantages_BT * self.scale
        if self.bonus is None:
            assert terms.entropy_BT is None, "nobody asked for entropies"
            return TokenLoss(loss_BT=policy_BT)
        assert terms.entropy_BT is not None
        entropy_BT = -self.bonus * terms.entropy_BT
        return TokenLoss(
            loss_BT=policy_BT + entropy_BT,
            parts_BT={"policy": policy_BT, "entropy": entropy_BT},
            metrics_BT={"entropy": terms.entropy_BT.detach()},
        )


def train_batch() -> RolloutBatch:
    batch = rollout_batch(ROWS, seed=3)
    g = torch.Generator().manual_seed(4)
    advantages = torch.randn(batch.tokens.shape, generator=g) * batch.loss_mask
    weights = batch.loss_mask.float() / batch.loss_mask.sum()
    return replace(batch, advantages=advantages, token_weights=weights)


def plain_loss(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Loss of `EntropyBonusLoss` on whole logits, one row at a time, without padding."""
    assert batch.advantages is not None
    assert batch.token_weights is not None
    total = torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[row, :length]
        logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        chosen = logp[torch.arange(length - 1), tokens[1:]]
        entropy = -(logp.exp() * logp).sum(-1)
        loss = -chosen * batch.advantages[row, 1:length] - 0.1 * entropy
        total = total + (loss * batch.token_weights[row, 1:length]).sum()
    return total


def repadded(batch: RolloutBatch) -> RolloutBatch:
    """Five more columns, and padding of values that are no token ids."""
    wide = RolloutBatch.concat([batch, batch.select([0])])
    extra = torch.nn.functional.pad

    def widen(x: Tensor | None) -> Tensor | None:
        return None if x is None else extra(x[:ROWS], [0, 5])

    at = torch.arange(batch.tokens.shape[1] + 5)
    tokens = extra(wide.tokens[:ROWS], [0, 5]).masked_fill(at >= batch.lengths[:, None], 10**6)
    return replace(
        batch,
        tokens=tokens,
        loss_mask=extra(batch.loss_mask, [0, 5]),
        rollout_logprobs=widen(batch.rollout_logprobs),
        advantages=widen(batch.advantages),
        token_weights=widen(batch.token_weights),
    )


def exported(strategy: TrainStrategy[PolicyTerms]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.export_weights()}


def gradient(run: dict[str, Any], start: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient_of_step(start[name] - w) for name, w in run["weights"].items()}


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    scale = max(float(x.abs().max()) for x in b.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


def leaders(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose results a cluster keeps."""
    return [result for result in ranks if result["info"].is_dp_leader]


def job(spec: WorkerSpec, folder: Path, backend_name: str) -> dict[str, Any]:
    backend = next(b for b in TRAIN_BACKENDS if b.name == backend_name)
    tied = ModelConfig(path=str(folder.parent / "tied"))
    untied = ModelConfig(path=str(folder.parent / "untied"))
    # Kept for its process group, which the strategies built after it share.
    first = backend.build(spec, untied)
    results: dict[str, Any] = {
        "info": first.rank_info,
        "export": exported(first),
        "parts": {name: part.clone() for name, part in first.export_parts()},
        "manifest": first.weight_manifest(),
        "frozen": first.frozen_weights(),
        "export_tied": exported(backend.build(spec, tied)),
        "steps": _steps(backend, spec, untied),
        "bonus": {
            name: _one_step(backend, spec, untied, budget=SMALL_BUDGET, bonus=bonus)
            for name, bonus in {"unread": None, "without weight": 0.0}.items()
        },
        "bf16": _one_step(backend, spec, untied.model_copy(update={"dtype": "bfloat16"})),
        "checkpoint": _checkpoint(backend, spec, untied, folder),
        "other_model": _error_of_other_model(backend, spec, tied, folder),
        "damaged": _errors_of_damaged_files(backend, spec, untied, folder),
        "skipped": _skipped(backend, spec, untied),
    }
    first.offload()
    first.onload()
    results["onloaded"] = exported(first)
    first.save_hf(folder / "hf")
    results["saved_hf"] = load_file(folder / "hf" / "model.safetensors")
    gc.collect()  # the other strategies, which nobody has closed
    first.close()
    results["group_left"] = not dist.is_initialized()
    return results


JOBS = {b.name: partial(job, backend_name=b.name) for b in TRAIN_BACKENDS}


def rows_of(strategy: TrainStrategy[PolicyTerms], batch: RolloutBatch) -> RolloutBatch:
    """What a cluster's dispatch would give this rank."""
    info = strategy.rank_info
    return batch.split(info.dp_size)[info.dp_rank]


def _one_step(
    backend: TrainBackend,
    spec: WorkerSpec,
    model: ModelConfig,
    batch: RolloutBatch | None = None,
    *,
    bonus: float | None = 0.1,
    **options: Any,
) -> dict[str, Any]:
    strategy = backend.build(spec, model, **options)
    rows = rows_of(strategy, batch or train_batch())
    # A score before the update must leave nothing behind, and one after it must see it.
    before = strategy.score(rows).logprobs_BT
    metrics = strategy.train(rows, EntropyBonusLoss(bonus=bonus))
    return {
        "before": before,
        "after": strategy.score(rows, entropy=True),
        "metrics": metrics,
        "weights": exported(strategy),
    }


def _steps(backend: TrainBackend, spec: WorkerSpec, model: ModelConfig) -> dict[str, Any]:
    batch = train_batch()
    shuffled = batch.select([5, 2, 7, 0, 3, 6, 1, 4])
    by_length = batch.select(batch.lengths.argsort(descending=True))
    runs = {
        "whole": _one_step(backend, spec, model),
        "small micro-batches": _one_step(backend, spec, model, budget=SMALL_BUDGET, chunk=7),
        "one row each": _one_step(backend, spec, model, budget=1),
        "shuffled": _one_step(backend, spec, model, shuffled, budget=SMALL_BUDGET),
        # The first rank has the long rows, so the ranks need different numbers of passes.
        "uneven": _one_step(backend, spec, model, by_length, budget=SMALL_BUDGET),
        "padded": _one_step(backend, spec, model, repadded(batch)),
    }
    for option in backend.options:
        runs[option] = _one_step(
            backend, spec, model, budget=SMALL_BUDGET, **backend.turned(option)
        )
    return runs


def _checkpoint(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, folder: Path
) -> dict[str, Any]:
    loss = EntropyBonusLoss()
    straight = backend.build(spec, model, optimizer=ADAM, total_steps=4)
    rows = rows_of(straight, train_batch())
    straight.train(rows, loss)
    straight.train(rows, loss)
    straight.save(folder / "checkpoint")
    save = straight.begin_save(folder / "beside", copied=True, optimizer=True)
    straight_draws = _draws()
    saved = exported(straight)
    straight_metrics = straight.train(rows, loss)
    # Written only now, so the update would be in it if it shared anything with the model.
    beside = WriteThread(save.write, save.complete if spec.rank == 0 else None, "save")
    straight.score(rows)  # its collectives and the thread must not disturb each other
    _complete(beside, spec)
    straight.save(folder / "weights", optimizer=False)
    weights = exported(straight)
    resumed = backend.build(spec, model, optimizer=ADAM, total_steps=4)
    resumed.load(folder / "checkpoint")
    resumed_draws = _draws()
    results: dict[str, Any] = {
        "straight_draws": straight_draws,
        "resumed_draws": resumed_draws,
        "saved": saved,
        "straight_metrics": straight_metrics.values_by_name(),
        "resumed_metrics": resumed.train(rows, loss).values_by_name(),
        "straight": exported(straight),
        "resumed": exported(resumed),
        "contents": [contents(folder / name) for name in ("checkpoint", "beside", "weights")],
    }
    elsewhere = folder.parent / "2" / "checkpoint"
    if spec.world_size == 1 and elsewhere.exists():
        resumed.load(elsewhere)
        results["from_two_ranks"] = exported(resumed)
    # From unequal moments to none: nothing of the old ones may be left.
    resumed.train(rows, loss)
    resumed.load(folder / "weights")
    results["without_moments"] = weights, exported(resumed)
    resumed.train(rows, loss)
    straight.load(folder / "weights")
    straight.train(rows, loss)
    results["from_no_moments"] = exported(resumed), exported(straight)
    return results


def _complete(write: WriteThread, spec: WorkerSpec) -> None:
    """What the driver does."""
    for aim in (Written.OWN, Written.ALL):
        deadline = time.monotonic() + 60
        while write.look() < aim:
            assert time.monotonic() < deadline, write.look()
            time.sleep(0.01)
        if spec.world_size > 1:
            dist.barrier()
        write.go_on()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _draws() -> tuple[float, float]:
    return float(torch.rand(())), random.random()


def _error_of_other_model(
    backend: TrainBackend, spec: WorkerSpec, other: ModelConfig, folder: Path
) -> list[str]:
    strategy = backend.build(spec, other, optimizer=ADAM, total_steps=4)
    messages = []
    for path in (folder / "checkpoint", folder / "nothing"):
        try:
            strategy.load(path)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


DAMAGED = ("meta.json", "rng_")
"""Beginnings of the names of files that are cut short."""


def _errors_of_damaged_files(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, folder: Path
) -> list[str]:
    strategy = backend.build(spec, model, optimizer=ADAM, total_steps=4)
    messages = []
    for name in DAMAGED:
        copy = folder / f"damaged_{name}"
        if spec.rank == 0:
            shutil.copytree(folder / "checkpoint", copy)
            for file in copy.glob(f"{name}*"):
                os.truncate(file, file.stat().st_size // 2)
        if spec.world_size > 1:
            dist.barrier()
        try:
            strategy.load(copy)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def _skipped(backend: TrainBackend, spec: WorkerSpec, model: ModelConfig) -> dict[str, Any]:
    strategy = backend.build(spec, model, optimizer=ADAM, total_steps=4)
    before = exported(strategy)
    rows = rows_of(strategy, train_batch())
    bad = strategy.train(rows, EntropyBonusLoss(scale=float("inf")))
    unchanged = exported(strategy)
    good = strategy.train(rows, EntropyBonusLoss())
    changed = exported(strategy)
    nothing = torch.zeros_like(rows.loss_mask)
    masked = replace(rows, loss_mask=nothing, token_weights=nothing.float())
    return {
        "before": before,
        "unchanged": unchanged,
        "bad": bad,
        "good": good,
        "changed": changed,
        "masked": strategy.train(masked, EntropyBonusLoss()),
        "after_masked": exported(strategy),
    }
