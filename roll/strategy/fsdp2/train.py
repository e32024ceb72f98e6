"""Training and scoring with PyTorch FSDP2.

Parameters, gradients and optimizer state are sharded over the ranks. Every method is collective:
all ranks of the cluster call it together. Ranks that share rows pass the same rows; other ranks
pass their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from roll.algorithms.loss_interface import TermsLoss
from roll.config.sections.strategy import Fsdp2Config
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.types import RankInfo
from roll.models import lora, ulysses
from roll.models.checkpoint_tensors import CheckpointLayout
from roll.platform.cuda import free_cached
from roll.strategy import tensor_names as names
from roll.strategy.backend_setup import ModelSetup, require_adapter, require_trainable
from roll.strategy.fsdp2 import export, mesh, state
from roll.strategy.fsdp2.export import whole
from roll.strategy.fsdp2.reference_copy import ReferenceCopy
from roll.strategy.fsdp2.shard import load_sharded
from roll.strategy.fsdp2.update import Update
from roll.strategy.interfaces import Saving
from roll.strategy.training import forward
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.losses import micro_losses
from roll.strategy.training.reduce import LossMetrics, max_over_ranks, update_metrics
from roll.strategy.training.saved.checkpoint_state import save_now, save_trained
from roll.strategy.training.teacher_forward import output_head
from roll.weight_sync.manifest import Manifest

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


class Fsdp2Strategy(Generic[T]):
    """Implementation of `TrainStrategy`, or, without an optimizer, of `ScoreStrategy` only."""

    def __init__(self, config: Fsdp2Config, setup: ModelSetup[T]) -> None:
        self._group = GroupMembership(setup.spec)
        self._device = self._group.device
        self._model_config = setup.model
        self._dtype: torch.dtype = getattr(torch, setup.model.dtype)
        self._max_tokens = setup.max_tokens_per_microbatch
        self._reshard = config.reshard_after_forward
        self._moves = self._device.type != "cpu" and not config.cpu_offload
        meshes = mesh.make(config, setup.spec, self._device)
        self._rank_info = meshes.info
        self._model = load_sharded(
            config,
            setup.model,
            setup.head,
            device=self._device,
            meshes=meshes,
            trainable=setup.optimizer is not None,
            seed=setup.spec.seed,
        )
        if setup.model.lora is not None:
            lora.seed_dropout(setup.model.lora, setup.spec.seed, setup.spec.rank)
        if setup.packing:
            self._model.pack_rows()
        if meshes.shards is not None:
            ulysses.enable(self._model.model, config.ulysses, tp=config.tp)
            self._model.shards = meshes.shards
        self._update = (
            None
            if setup.optimizer is None
            else Update(self._model.model, self._device, setup.optimizer, setup.total_steps)
        )

        self._reference = ReferenceCopy(self._model.model) if setup.keeps_reference else None

    @property
    def rank_info(self) -> RankInfo:
        return self._rank_info

    def score(self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False) -> T:
        self._model.eval()
        terms = forward.score(
            self._model,
            batch,
            device=self._device,
            max_tokens=self._max_tokens,
            entropy=entropy,
            squares=squares,
            agree=lambda passes: max_over_ranks(passes, self._device),
        )
        # Without a backward pass some parameters stay gathered and would not see the next update,
        # and the notes grow that FSDP takes of the order of layers, for a backward pass.
        if isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()
        return terms

    def score_base(self, batch: TokenBatch) -> T:
        if self._reference is not None:
            with self._reference.in_place():
                return self.score(batch)
        require_adapter(self._model_config)
        with lora.adapter_disabled(self._model.model):
            return self.score(batch)

    def output_head(self) -> OutputHead:
        return output_head(self._model.model, lambda part: whole(part).to(self._dtype))

    def train(self, batch: B, loss: TermsLoss[T, B]) -> Metrics:
        """Sum gradients over ranks and micro-batches, take a step. Collective.

        Each micro-batch reduces the gradients of a layer when the layer has them, so a rank keeps
        only its shard of their sum. Copies of the model add theirs in the last micro-batch. See
        `TrainStrategy.train`.
        """
        update, info = require_trainable(self._update), self._rank_info
        metrics = LossMetrics(len(batch), info.dp_size)
        self._model.train()
        root = self._model
        for total, last in micro_losses(
            self._model, batch, loss, metrics, device=self._device, max_tokens=self._max_tokens
        ):
            if isinstance(root, FSDPModule):  # else one rank has all, see `load_sharded`
                root.set_requires_all_reduce(last)
                root.set_reshard_after_backward(last or self._reshard)
            total.backward()
        grad_norm, lr, applied = update.apply()
        return metrics.take() | update_metrics(grad_norm, lr, applied=applied, info=info)

    def move_reference(self, decay: float) -> None:
        assert self._reference is not None, "the model was built without a reference"
        self._reference.move(decay)

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        return export.manifest(self._model.model, self._leaves_as(adapter=adapter), self._dtype)

    def frozen_weights(self) -> frozenset[str]:
        return names.frozen(self._model.model, self._saved)

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        return export.local_parts(self._model.model, self._leaves_as(adapter=adapter))

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export.full_weights` in the dtype of forward passes."""
        return export.full_weights(self._model.model, self._saved, self._dtype)

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        return state.begin_save(
            path,
            self._model.model,
            require_trainable(self._update),
            self._reference,
            copied=copied,
            optimizer=optimizer,
        )

    def save(self, path: Path, *, optimizer: bool = True) -> None:
        save_now(self.begin_save(path, copied=False, optimizer=optimizer))

    def load(self, path: Path) -> None:
        state.load(path, self._model.model, require_trainable(self._update), self._reference)

    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        model = self._model.model
        save_trained(
            path,
            model,
            self._model_config,
            merged=merged,
            factors=lambda: ((name, whole(p.detach())) for name, p in names.trained(model)),
            manifest=self.weight_manifest,
            weights=self.export_weights,
        )

    def offload(self) -> None:
        if self._moves:
            self._move(torch.device("cpu"))
        free_cached()  # with `cpu_offload`, too: what a step has used is still reserved

    def onload(self) -> None:
        if self._moves:
            self._move(self._device)

    def close(self) -> None:
        """End this strategy's membership in the process group."""
        self._group.leave()

    def _move(self, device: torch.device) -> None:
        """Move the model and the optimizer state."""
        self._model.to(device)
        if self._reference is not None:
            self._reference.to(device)
        if self._update is None:
            return
        for optimizer in self._update.optimizers:
            for values in optimizer.state.values():
                for name, value in values.items():
                    values[name] = value.to(device)

    @cached_property
    def _saved(self) -> CheckpointLayout:
        return names.saved(self._model.model, export.SHAPE_OF)

    def _leaves_as(self, *, adapter: bool) -> CheckpointLayout | None:
        """Return the argument `saved` of the functions in `export`; None selects the adapter."""
        return None if adapter else self._saved
