"""Steps of every optimizer of an FSDP2 model, for a comparison with plain PyTorch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel, Qwen3ForCausalLM

from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    OthersConfig,
    SgdConfig,
)
from roll.config.sections.strategy import Fsdp2Config
from roll.core.errors import CheckpointError
from roll.core.types import WorkerSpec
from roll.strategy.fsdp2.export import whole
from roll.strategy.fsdp2.update import Update
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.saved.checkpoint_state import save_now
from tests.contract.backends import TrainBackend
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import tiny_qwen3

STEPS = 4
HAS_TORCHAO = find_spec("torchao") is not None
ANY_NORM = 1e9
KINDS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=ANY_NORM, warmup_steps=2),
    "adafactor": AdafactorConfig(
        lr=1e-2, weight_decay=0.1, max_grad_norm=ANY_NORM, schedule="linear"
    ),
    "muon": MuonConfig(
        lr=1e-2,
        weight_decay=0.1,
        max_grad_norm=ANY_NORM,
        schedule="linear",
        others=OthersConfig(lr=1e-3, weight_decay=0.2),
    ),
    "muon original": MuonConfig(
        lr=0.02,
        momentum=0.9,
        nesterov=False,
        ns_steps=3,
        scale="original",
        max_grad_norm=ANY_NORM,
        warmup_steps=3,
        others=OthersConfig(lr=3e-4, betas=(0.8, 0.9)),
    ),
    "sgd": SgdConfig(lr=1e-2, weight_decay=0.1, momentum=0.9, max_grad_norm=ANY_NORM),
}

if HAS_TORCHAO:
    KINDS["adamw_8bit"] = AdamW8bitConfig(
        lr=1e-2, weight_decay=0.1, max_grad_norm=ANY_NORM, warmup_steps=2
    )


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return tiny_qwen3(tied=False, layers=1, hidden=32)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Random numbers, of other sizes for each parameter."""
    g = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=g) * 10 ** torch.randn((), generator=g)
        for name, p in model.named_parameters()
    }


def sharded_steps(spec: WorkerSpec, folder: Path, layout: str = "shards") -> dict[str, Any]:
    """Weights after the steps, by the name of the optimizer."""
    group = GroupMembership(spec)
    found = {name: _steps(config, spec, layout) for name, config in KINDS.items()}
    group.leave()
    return found


def _steps(config: OptimizerConfig, spec: WorkerSpec, layout: str) -> dict[str, Tensor]:
    model = sharded_model(spec, layout)
    update = Update(model, torch.device("cpu"), config, STEPS)
    for step in range(STEPS):
        take_step(model, update, step)
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def take_step(model: PreTrainedModel, update: Update, step: int) -> None:
    for (name, p), gradient in zip(
        model.named_parameters(), gradients(model, step).values(), strict=True
    ):
        assert isinstance(p, DTensor), name
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
    _, _, applied = update.apply()
    assert applied
    assert all(p.grad is None for p in model.parameters())


def sharded_model(spec: WorkerSpec, layout: str) -> PreTrainedModel:
    """A model of which each rank has a part: `shards` of rows, one of several `copies`, or those
    of `tp`, too."""
    model = tiny_model()
    world = spec.world_size
    (layer,) = model.model.layers
    if layout == "shards":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        fully_shard(layer, mesh=mesh)
    elif layout == "copies":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shard"))
        fully_shard(layer, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tp"))
        plan = {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, both["tp"], plan, src_data_rank=None)
        for module in layer.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(isinstance(p, DTensor) for p in own):
                fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=both["shard"])
    fully_shard(model, mesh=mesh)
    return model


BACKEND = TrainBackend("fsdp2", Fsdp2Config, ())
SHARED = TrainBackend("fsdp2-ep2", Fsdp2Config, (), {"ep": 2}, experts=True)
"""Two ranks share the experts; one has all of them."""
TOTAL = 4
"""Optimizer steps of the schedules; three are taken."""
SCHEDULE: dict[str, Any] = {"schedule": "linear", "warmup_steps": 1, "max_grad_norm": 0.5}
FACTORS = (0.5, 1.0, 0.5)
"""Learning rates of the three steps, as parts of the peak."""
TRAINED: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(lr=1e-3, weight_decay=0.1, eps=1e-4, **SCHEDULE),
    "adafactor": AdafactorConfig(lr=3e-2, weight_decay=0.1, **SCHEDULE),
    "muon": MuonConfig(
        lr=1e-2, weight_decay=0.1, others=OthersConfig(lr=1e-3, eps=1e-4), **SCHEDULE
    ),
    "sgd": SgdConfig(lr=1e-1, weight_decay=0.1, momentum=0.9, **SCHEDULE),
}

if HAS_TORCHAO:
    TRAINED["adamw_8bit"] = AdamW8bitConfig(lr=1e-3, weight_decay=0.1, eps=1e-4, **SCHEDULE)
SHARING = [name for name in TRAINED if name != "muon"]
"""Those that train experts."""


def training(spec: WorkerSpec, folder: Path, backend: TrainBackend = BACKEND) -> dict[str, Any]:
    """Three updates of each optimizer; the third once more after a resume."""
    group = GroupMembership(spec)
    names = SHARING if backend.experts else TRAINED
    found = {name: _training(spec, folder, name, backend) for name in names}
    group.leave()
    return found


def _training(spec: WorkerSpec, folder: Path, name: str, backend: TrainBackend) -> dict[str, Any]:
    model, config = ModelConfig(path=str(folder.parent / "model")), TRAINED[name]
    loss = EntropyBonusLoss()
    straight = backend.build(spec, model, optimizer=config, total_steps=TOTAL)
    rows = rows_of(straight, train_batch())
    start = exported(straight)
    # A checkpoint before the first step has no state of an optimizer.
    straight.save(folder / name / "0")
    metrics = [straight.train(rows, loss).values_by_name()]
    first = exported(straight)
    metrics.append(straight.train(rows, loss).values_by_name())
    save_now(straight.begin_save(folder / name / "2", copied=True, optimizer=True))
    saved = exported(straight)
    metrics.append(straight.train(rows, loss).values_by_name())
    resumed = backend.build(spec, model, optimizer=config, total_steps=TOTAL)
    resumed.load(folder / name / "2")
    found: dict[str, Any] = {
        "start": start,
        "first": first,
        "saved": saved,
        "metrics": metrics,
        "weights": exported(straight),
        "resumed_metrics": resumed.train(rows, loss).values_by_name(),
        "resumed": exported(resumed),
    }
    for where, theirs in (("0", folder), ("2", folder.parent / "2")):
        if (theirs / name / where).exists():
            resumed.load(theirs / name / where)
            found[f"loaded {where}"] = exported(resumed)
            resumed.train(rows, loss)
            found[f"after {where}"] = exported(resumed)
    other = backend.build(
        spec, model, optimizer=TRAINED["sgd" if name == "adamw" else "adamw"], total_steps=TOTAL
    )
    try:
        other.load(folder / name / "2")
    except CheckpointError as error:
        found["other"] = str(error)
    return found
