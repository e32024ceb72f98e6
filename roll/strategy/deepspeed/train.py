"""Training and scoring with DeepSpeed ZeRO.

Every method is collective: all ranks of the cluster call it together, each with its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from roll.algorithms.loss_interface import TermsLoss
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import DeepspeedConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.types import RankInfo
from roll.models import lora
from roll.models.checkpoint_tensors import CheckpointLayout
from roll.models.deferred.recipes import read_run
from roll.models.deferred.tensor import Deferred, fill
from roll.models.parts.host_inputs import checkpoint_layers
from roll.models.trained import select_trained
from roll.platform.cuda import free_cached
from roll.strategy import tensor_names as names
from roll.strategy.backend_setup import (
    ModelSetup,
    require_adamw,
    require_adapter,
    require_trainable,
)
from roll.strategy.deepspeed import export, state
from roll.strategy.deepspeed.compat import restore_linear
from roll.strategy.deepspeed.engine_module import Root, as_token_model
from roll.strategy.deepspeed.memory import Parking, states
from roll.strategy.deepspeed.shard_map import MASTER, flats, pieces, shape_of, whole_masters
from roll.strategy.deepspeed.update import Update, guarded_adamw
from roll.strategy.deepspeed.zero_engine import gather_whole, start
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


class DeepspeedStrategy(Generic[T]):
    """Implementation of `TrainStrategy`, or, without an optimizer, of `ScoreStrategy` only."""

    def __init__(self, config: DeepspeedConfig, setup: ModelSetup[T]) -> None:
        self._group = GroupMembership(setup.spec)
        self._device = self._group.device
        self._model_config = setup.model
        self._dtype: torch.dtype = getattr(torch, setup.model.dtype)
        self._max_tokens = setup.max_tokens_per_microbatch
        self._rank_info = RankInfo(
            setup.spec.rank, setup.spec.rank, setup.spec.world_size, is_dp_leader=True
        )
        self._cut = config.stage == 3
        self._parking = Parking()
        self._engine: Any = None
        self._update: Update | None = None
        trains = setup.optimizer is not None
        whole = setup.head.load(
            setup.model, torch.float32 if trains else self._dtype, deferred=True
        )
        if self._cut:
            # All ranks must gather parameters in one order. Each rank decides by its own rows
            # whether to select tokens for the last feed-forward part, and with activation
            # checkpointing that changes the order.
            whole.last_mlp = None
        select_trained(
            whole.model,
            setup.model,
            trainable=trains,
            new_head=whole.new_head,
            seed=setup.spec.seed,
        )
        layers = whole.compile_layers(setup.model)
        if self._cut:
            gather_whole(layers)
        if trains and setup.model.lora is not None:
            lora.seed_dropout(setup.model.lora, setup.spec.seed, setup.spec.rank)
        if setup.packing:
            whole.pack_rows()
        self._model = Root(whole)
        if setup.optimizer is not None:
            self._start_training(
                config, require_adamw(config.kind, setup.optimizer), setup.total_steps
            )
        elif config.stage == 3:
            self._engine = start(
                config, self._model, None, compute=self._dtype, device=self._device
            )
        else:
            self._fill()
            self._model.to(self._device)
        self._scored = as_token_model(self._model, self._model)
        self._trained = as_token_model(self._engine, self._model)

    @property
    def rank_info(self) -> RankInfo:
        return self._rank_info

    def score(self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False) -> T:
        self._model.eval()
        terms = forward.score(
            self._scored,
            batch,
            device=self._device,
            max_tokens=self._max_tokens,
            entropy=entropy,
            squares=squares,
            agree=lambda passes: max_over_ranks(passes, self._device),
        )
        if self._cut:
            # Without a backward pass ZeRO-3 keeps parameters gathered for their expected next use.
            self._engine.optimizer.empty_partition_cache()
        return terms

    def score_base(self, batch: TokenBatch) -> T:
        require_adapter(self._model_config)
        with lora.adapter_disabled(self._model.model):
            return self.score(batch)

    def output_head(self) -> OutputHead:
        return output_head(
            self._model.model, lambda part: export.whole(part, self._device).to(self._dtype)
        )

    def train(self, batch: B, loss: TermsLoss[T, B]) -> Metrics:
        """Sum gradients over micro-batches, up to DeepSpeed's boundary at the last, take a step.

        Collective. See `TrainStrategy.train`.
        """
        update, info = require_trainable(self._update), self._rank_info
        metrics = LossMetrics(len(batch), info.dp_size)
        self._engine.train()
        for total, last in micro_losses(
            self._trained, batch, loss, metrics, device=self._device, max_tokens=self._max_tokens
        ):
            self._engine.set_gradient_accumulation_boundary(last)
            # DeepSpeed divides by the number of ranks, but the token weights already contain the
            # divisor of the mean.
            self._engine.backward(total * info.dp_size, scale_wrt_gas=False)
        grad_norm, lr, applied = update.apply()
        return metrics.take() | update_metrics(grad_norm, lr, applied=applied, info=info)

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        return export.manifest(self._model.model, self._leaves_as(adapter=adapter), self._dtype)

    def frozen_weights(self) -> frozenset[str]:
        return names.frozen(self._model.model, self._saved)

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        saved = self._leaves_as(adapter=adapter)
        return export.local_parts(self._model.model, saved, self._device)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export.full_weights` in the dtype of forward passes."""
        return export.full_weights(self._model.model, self._saved, self._dtype, self._device)

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        return state.begin_save(
            path,
            self._engine,
            self._model.model,
            require_trainable(self._update),
            copied=copied,
            optimizer=optimizer,
        )

    def save(self, path: Path, *, optimizer: bool = True) -> None:
        save_now(self.begin_save(path, copied=False, optimizer=optimizer))

    def load(self, path: Path) -> None:
        state.load(path, self._engine, self._model.model, require_trainable(self._update))

    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        model = self._model.model
        save_trained(
            path,
            model,
            self._model_config,
            merged=merged,
            factors=lambda: whole_masters(
                self._engine, require_trainable(self._update).optimizer, model
            ),
            manifest=self.weight_manifest,
            weights=self.export_weights,
        )

    def offload(self) -> None:
        if self._device.type != "cpu":
            self._parking.put_aside(t for t in self.states() if t.device.type != "cpu")
            free_cached()

    def onload(self) -> None:
        self._parking.take_back()

    def states(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept between updates.

        For a frozen model these are its parameters and buffers.
        """
        optimizer = None if self._update is None else self._update.optimizer
        return states(self._model, self._engine, optimizer)

    def close(self) -> None:
        """Remove DeepSpeed's hooks and end this strategy's membership in the process group."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
            restore_linear()
        self._group.leave()

    def _start_training(
        self, config: DeepspeedConfig, optimizer: AdamWConfig, total_steps: int | None
    ) -> None:
        """Start DeepSpeed with AdamW; give its master weights their unrounded values."""
        if config.activation_checkpointing:
            checkpoint_layers(self._model.model, self._device, offload=config.offload_activations)
        # Keep the unrounded values, or where they are: DeepSpeed makes its master weights from
        # parameters that are already rounded to the compute dtype.
        masters = {
            name: p.recipe if isinstance(p, Deferred) else p.data
            for name, p in names.trained(self._model.model)
        }
        if not self._cut:
            self._fill()
        adam = guarded_adamw(self._model, optimizer)
        self._engine = start(
            config,
            self._model,
            adam,
            max_grad_norm=optimizer.max_grad_norm,
            compute=self._dtype,
            device=self._device,
        )
        self._update = Update(
            self._engine,
            adam,
            optimizer,
            total_steps,
            shared=self._engine.optimizer is not adam,
        )
        self._update.start_moments(flats(self._engine, adam))
        if self._dtype != torch.float32:
            for piece in pieces(self._engine, adam, self._model.model):
                master, own = masters[piece.name], piece.tensors[MASTER]
                if isinstance(master, Tensor):
                    own.copy_(master.view(-1)[piece.first :][: piece.num_elements])
                else:
                    read_run(master, piece.first, own)

    def _fill(self) -> None:
        """Read all parameters that are still in files; every rank has the whole model."""
        for parameter in self._model.parameters():
            if isinstance(parameter, Deferred):
                fill(parameter, self._dtype, self._device)

    @cached_property
    def _saved(self) -> CheckpointLayout:
        return names.saved(self._model.model, shape_of)

    def _leaves_as(self, *, adapter: bool) -> CheckpointLayout | None:
        """Return the argument `saved` of the functions in `export`; None selects the adapter."""
        return None if adapter else self._saved
