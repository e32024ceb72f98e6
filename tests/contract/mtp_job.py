"""What every rank of a Megatron layout is put through with layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from roll.core.types import WorkerSpec
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import PACKING, PLAIN_STEP, TrainBackend
from tests.contract.train_job import ADAM, EntropyBonusLoss, exported, rows_of, train_batch

WEIGHT = 0.3
CLIPPED = AdamWConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=1e-3)
MODES: dict[str, dict[str, Any]] = {
    "without": {},
    "detached": {"mtp_loss_weight": WEIGHT},
    "attached": {"mtp_loss_weight": WEIGHT, "mtp_detached": False},
}
MODEL = ("model.embed_tokens.*", "model.layers.[0-3].*", "model.norm.*", "lm_head.*")
"""All but the further layers."""
LONGER = {"deepseek_v3": "pp 2", "glm4_moe": "one rank"}
"""Family -> layout in which it is put through more."""
BUDGET = 40
"""Tokens of a micro-batch: ranks and stages have several, of unlike lengths."""


def batch() -> RolloutBatch:
    """Rows of 7 to 17 tokens, and of one and two. Some are trained from their second or third token
    on, where further layers have too few tokens before it."""
    rows = train_batch()
    lengths, mask_BT = rows.lengths.clone(), rows.loss_mask.clone()
    lengths[3], lengths[6] = 1, 2
    mask_BT[::2, 2:5] = True
    mask_BT[6, 1] = True
    mask_BT &= torch.arange(rows.tokens.shape[1]) < lengths[:, None]
    weights_BT = mask_BT.float() / mask_BT.sum()
    return replace(rows, lengths=lengths, loss_mask=mask_BT, token_weights=weights_BT)


class Runs:
    """Of one family in one layout, with a folder of its own."""

    def __init__(self, spec: WorkerSpec, model: Path, layout: Mapping[str, Any], home: Path):
        self._spec, self._model = spec, ModelConfig(path=str(model))
        self._layout, self._home = layout, home

    def build(
        self, mode: str, optimizer: AdamWConfig = PLAIN_STEP, freeze: tuple[str, ...] = ()
    ) -> TrainStrategy[Any]:
        layout = {name: value for name, value in self._layout.items() if name != PACKING}
        backend = TrainBackend("", MegatronConfig, (), settings={**layout, **MODES[mode]})
        total = 6 if optimizer is ADAM else None
        model = self._model.model_copy(update={"freeze": freeze})
        return backend.build(
            self._spec,
            model,
            budget=BUDGET,
            optimizer=optimizer,
            total_steps=total,
            packing=PACKING in self._layout,
        )

    def longer(self) -> dict[str, Any]:
        """Limited gradients, frozen weights, checkpoints."""
        found: dict[str, Any] = {}
        for mode in ("without", "detached"):
            found[f"{mode}, clipped"] = self.updated(self.build(mode, CLIPPED), 3)
        for mode in ("detached", "attached"):
            found[f"{mode}, frozen"] = self.updated(self.build(mode, freeze=MODEL))
        return found | {"gone on": self.gone_on(), "refused": self.refused()}

    def updated(self, strategy: TrainStrategy[Any], steps: int = 1) -> dict[str, Any]:
        rows = rows_of(strategy, batch())
        for _ in range(steps):
            metrics = strategy.train(rows, EntropyBonusLoss())
        return {
            "info": strategy.rank_info,
            "metrics": metrics,
            "weights": exported(strategy),
            "pushed": [meta.name for meta in strategy.weight_manifest().tensors],
            "parts": [name for name, _ in strategy.export_parts()],
            "scores": strategy.score(rows).logprobs_BT,
            "saved": self.saved(strategy),
        }

    def saved(self, strategy: TrainStrategy[Any]) -> dict[str, Tensor]:
        """All tensors of a saved folder; only rank 0 reads it."""
        strategy.save_hf(self._home / "hf")
        if self._spec.rank:
            return {}
        found = load_file(self._home / "hf" / "model.safetensors")
        return {name: tensor.clone() for name, tensor in found.items()}  # the file changes

    def gone_on(self) -> dict[str, Any]:
        """The third update: of a run that goes on, and of one that was resumed."""
        straight, other = (self.build("detached", ADAM) for _ in range(2))
        self.updated(straight, 2)
        straight.save(self._home / "checkpoint")
        found: dict[str, Any] = {"begun": self.saved(straight)}
        found |= self.resumed(self._home / "checkpoint", other)
        return found | {"straight": self.updated(straight)}

    def resumed(self, checkpoint: Path, strategy: TrainStrategy[Any]) -> dict[str, Any]:
        strategy.load(checkpoint)
        return {"loaded": self.saved(strategy), "resumed": self.updated(strategy)}

    def refused(self) -> str:
        """What is said of a checkpoint of layers that this run does not train."""
        try:
            self.build("without", ADAM).load(self._home / "checkpoint")
        except CheckpointError as error:
            return str(error)
        return ""


def job(
    spec: WorkerSpec, folder: Path, names: list[str], layouts: dict[str, dict[str, Any]]
) -> dict[Any, Any]:
    """All families in all layouts: by family, layout and what was done."""
    group = GroupMembership(spec)
    results: dict[Any, Any] = {}
    for layout, options in layouts.items():
        homes = {name: folder.parent / "homes" / layout / name for name in names}
        every = {n: Runs(spec, folder.parent / n, options, home) for n, home in homes.items()}
        holder = every[names[0]].build("without")  # of the groups that the others share
        for name, runs in every.items():
            for mode in MODES:
                results[name, layout, mode] = runs.updated(runs.build(mode))
            if LONGER[name] == layout:
                results |= {(name, layout, what): found for what, found in runs.longer().items()}
            elif layout == "one rank":
                there = folder.parent / "homes" / LONGER[name] / name / "checkpoint"
                other = runs.build("detached", ADAM)
                results[name, layout, "moved"] = runs.resumed(there, other)
        holder.close()
    group.leave()
    return results
