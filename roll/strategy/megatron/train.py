"""Training and scoring with Megatron-Core.

Every method is collective: all ranks of the cluster call it together. Ranks with the same data
parallel rank pass the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mcore_adapter.modeling.data_parallel import gather_weights
from mcore_adapter.modeling.model import seed_dropout
from mcore_adapter.modeling.mtp import set_mtp_logits
from roll.algorithms import logprobs
from roll.algorithms.loss_interface import TermsLoss, reads_entropy
from roll.config.sections.strategy import MegatronConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.types import RankInfo
from roll.strategy.backend_setup import (
    ModelSetup,
    require_adamw,
    require_adapter,
    require_trainable,
)
from roll.strategy.interfaces import Saving
from roll.strategy.megatron import export, groups, memory, state
from roll.strategy.megatron.batches.division import micro_batches
from roll.strategy.megatron.batches.micro import Micro
from roll.strategy.megatron.model import load_model
from roll.strategy.megatron.outputs import Reader, classifier_of, reader_of
from roll.strategy.megatron.passes import of_all_tokens, places, run
from roll.strategy.megatron.teacher import output_head
from roll.strategy.megatron.update import Update
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.reduce import LossMetrics, micro_loss, update_metrics, weighted_sum
from roll.strategy.training.saved.checkpoint_state import save_now
from roll.strategy.training.token_model import ModelOutputs
from roll.weight_sync.manifest import Manifest

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


class MegatronStrategy(Generic[T]):
    """Implementation of `TrainStrategy` for policies, critics and reward models, or, without an
    optimizer, of `ScoreStrategy`. `T` is the type of a forward pass's result.

    Raises:
        ConfigError: layout, model and number of ranks do not match, or the head is another one.
    """

    def __init__(self, config: MegatronConfig, setup: ModelSetup[T]) -> None:
        self._group = GroupMembership(setup.spec)
        self._device = self._group.device
        self._model_config = setup.model
        kind = classifier_of(setup.head)
        self._max_tokens = setup.max_tokens_per_microbatch
        self._seed = setup.spec.seed
        self._mtp_weight, self._mtp_detached = config.mtp_loss_weight, config.mtp_detached
        sizes = groups.sizes_of(config)
        self._owns_cut = groups.join(sizes, config.cp, setup.spec)
        self._rank_info = groups.rank_info()
        trainable = setup.optimizer is not None
        self._model = load_model(
            config,
            sizes,
            setup.model,
            kind,
            trainable=trainable,
            packs=setup.packing,
            seed=self._seed,
        )
        self._reader: Reader[T] = reader_of(setup.head, self._model.vocab)
        self._update = (
            None
            if setup.optimizer is None
            else Update(
                self._model,
                setup.model,
                require_adamw(config.kind, setup.optimizer),
                setup.total_steps,
                detached=config.mtp_loss_weight is not None and config.mtp_detached,
            )
        )

    @property
    def rank_info(self) -> RankInfo:
        return self._rank_info

    def score(self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False) -> T:
        self._gather()
        micros = micro_batches(batch, self._max_tokens, self._model, self._device)
        taught = isinstance(batch, TrainBatch) and batch.teacher_outputs is not None
        names = self._reader.names(entropy=entropy, taught=taught, squares=squares)

        def reduce(
            outputs: Sequence[Tensor], micro: Micro[TokenBatch], rows: TokenBatch
        ) -> tuple[Tensor, list[Tensor]]:
            needed_BT = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]
            found = self._outputs(
                outputs[0], micro, rows, needed_BT, entropy=entropy, squares=squares
            )
            return found.values.sum(), [getattr(found, name) for name in names]

        self._set_mode(training=False)
        out = torch.zeros(len(names), *batch.tokens.shape)
        with torch.no_grad():
            for micro, found in run(self._model, micros, reduce, forward_only=True):
                for whole_BT, part_BT in zip(out, found, strict=True):
                    whole_BT[micro.rows, : part_BT.shape[1]] = part_BT.cpu()
        out = groups.from_last_stage(out.to(self._device)).cpu()
        return self._reader.terms(ModelOutputs(**dict(zip(names, out, strict=True))))

    def score_base(self, batch: TokenBatch) -> T:
        require_adapter(self._model_config)
        trained = self._model.trained
        assert trained is not None  # every model with adapter settings has one
        with trained.adapter.off():
            return self.score(batch)

    def output_head(self) -> OutputHead:
        self._gather()
        return output_head(self._model, self._model_config)

    def train(self, batch: B, loss: TermsLoss[T, B]) -> Metrics:
        """Run all micro-batches through the pipeline, forward and backward, then take a step.

        Collective. See `TrainStrategy.train`.
        """
        update = require_trainable(self._update)
        batch.require("token_weights", made_by="token_weights")
        info = self._rank_info
        metrics = LossMetrics(len(batch), info.dp_size)
        micros = micro_batches(batch, self._max_tokens, self._model, self._device)

        entropy = reads_entropy(loss)

        def reduce(outputs: Sequence[Tensor], micro: Micro[B], rows: B) -> tuple[Tensor, None]:
            def terms_of(needed_BT: Tensor) -> T:
                found = self._outputs(outputs[0], micro, rows, needed_BT, entropy=entropy)
                return self._reader.terms(found)

            total = micro_loss(rows, terms_of, loss, metrics, self._device)
            if self._mtp_weight is not None:
                further = self._mtp_loss(outputs[1:], micro, rows)
                metrics.add_beside("mtp", further)
                total = total + self._mtp_weight * further
            # Megatron-Core divides by the number of data parallel ranks, but the token weights
            # already contain the divisor of the mean.
            return total * info.dp_size, None

        self._set_mode(training=True)
        if self._model.trained is not None and self._model.trained.adapter.lora.dropout:
            # The seed depends on the update: tensor parallel ranks drop the same elements, and a
            # resumed run drops the same elements as an uninterrupted run.
            seed_dropout(self._seed, update.schedule.updates)
        run(self._model, micros, reduce, forward_only=False)
        grad_norm, lr, applied = update.apply()
        return metrics.take() | update_metrics(grad_norm, lr, applied=applied, info=info)

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        return export.manifest(self._model, adapter=adapter)

    def frozen_weights(self) -> frozenset[str]:
        return export.frozen(self._model)

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        self._gather()
        return export.parts(self._model, adapter=adapter)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._gather()
        return export.full_weights(self._model)

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        update = require_trainable(self._update)
        self._gather()
        return state.begin_save(path, self._model, update, copied=copied, optimizer=optimizer)

    def save(self, path: Path, *, optimizer: bool = True) -> None:
        save_now(self.begin_save(path, copied=False, optimizer=optimizer))

    def load(self, path: Path) -> None:
        self._gather()
        state.load(path, self._model, require_trainable(self._update))

    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        self._gather()
        trained = self._model.trained
        if trained is not None and not merged:
            state.save_adapter(path, self._model, trained, self._model_config)
            return
        state.save_hf(path, self._model, self._model_config)

    def offload(self) -> None:
        self._gather()
        if self._device.type != "cpu":
            memory.offload(self._model, self._update)

    def onload(self) -> None:
        if self._device.type != "cpu":
            memory.onload(self._model, self._update, self._device)

    def close(self) -> None:
        """Destroy Megatron-Core's groups if this strategy created them; leave the default group."""
        if self._owns_cut:
            groups.leave()
            self._owns_cut = False
        self._group.leave()

    def _gather(self) -> None:
        """Gather the weights that an update has left to the next update's forward pass, before
        anything else reads or moves them. Collective."""
        if self._update is not None:
            gather_weights(self._model.chunks)

    def _set_mode(self, *, training: bool) -> None:
        """Prepare the model for passes with gradients, in which it also predicts further tokens if
        it is trained to, or for passes without."""
        for chunk in self._model.chunks:
            chunk.train(training)
            if self._model.further:
                set_mtp_logits(chunk, on=training, detached=self._mtp_detached)

    def _mtp_loss(self, further: Sequence[Tensor], micro: Micro[Any], rows: TrainBatch) -> Tensor:
        """Return the mean loss of the layers that predict further tokens.

        The first of them sees a token's row up to two tokens before it, and the token before it;
        each further one looks one token further ahead. Trained tokens with too few tokens before
        them are left out.

        Args:
            further: logits of each layer, as in `_outputs`.
        """
        weights_BT = rows.require("token_weights", made_by="token_weights").to(self._device)
        total = torch.zeros((), device=self._device)
        for ahead, logits_BTS in enumerate(further, 2):
            enough_T = torch.arange(rows.tokens.shape[1]) >= ahead
            needed_BT = rows.loss_mask & enough_T
            found = self._outputs(logits_BTS, micro, rows, needed_BT, ahead=ahead)
            total = total - weighted_sum(found.values, weights_BT)
        return total / len(further)

    def _outputs(
        self,
        output_BTS: Tensor,
        micro: Micro[Any],
        rows: TokenBatch,
        needed_BT: Tensor,
        *,
        entropy: bool = False,
        squares: bool = False,
        ahead: int | None = None,
    ) -> ModelOutputs:
        """Compute the outputs of the needed tokens of a micro-batch, `[B, T]`; zero at the others.

        Args:
            output_BTS: output of the last stage on the device, as `passes.run` gives it.
            rows: rows of the micro-batch, on the CPU.
            needed_BT: bool mask of the needed tokens, on the CPU.
            ahead: number of places from a logit to the token that it predicts; None: that of the
                head.
        """
        found_N, width = logprobs.positions(needed_BT), needed_BT.shape[1]
        read_N = found_N - (self._reader.shift if ahead is None else ahead)
        mine_M, read_M = places(self._model, micro, read_N, self._device)
        positions_N = found_N.to(self._device)
        tokens_M = rows.tokens.to(self._device).flatten()[positions_N[mine_M]]
        temperatures_M = None
        if rows.temperatures is not None:
            own_B = rows.temperatures.to(self._device)
            temperatures_M = own_B[positions_N[mine_M] // width]
        teachers = None
        if ahead is None and isinstance(rows, TrainBatch) and rows.teacher_outputs is not None:
            teachers = self._reader.teachers(
                rows.teacher_outputs, needed_BT, self._device, output_BTS.shape[-1]
            )
            if self._model.cp > 1:
                teachers = [each.among(mine_M) for each in teachers]
        outputs = self._reader.read(
            output_BTS.flatten(0, 1).index_select(0, read_M),
            tokens_M,
            temperatures_M,
            teachers,
            entropy=entropy,
            squares=squares,
        )

        def spread(part_M: Tensor) -> Tensor:
            whole_N = of_all_tokens(self._model, part_M, mine_M, len(positions_N))
            return whole_N.new_zeros(rows.tokens.shape).put(positions_N, whole_N)

        return outputs.map(spread)
