"""Teachers on Megatron-Core: frozen models that tell hidden states, or their likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from mcore_adapter.local_tensors import unwrapped
from mcore_adapter.parallel.vocabulary import VocabularyPart
from mcore_adapter.parallel_sizes import padded_vocab
from roll.algorithms import logprobs
from roll.algorithms.logprobs import soft_cap
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.teacher_outputs import OutputHead, TeacherRow
from roll.core.types import RankInfo
from roll.models.load import load_config
from roll.models.parts.head import divisor_and_cap
from roll.strategy.backend_setup import ModelSetup
from roll.strategy.megatron import groups, memory
from roll.strategy.megatron.batches.division import micro_batches
from roll.strategy.megatron.batches.micro import Micro
from roll.strategy.megatron.model import MegatronModel, load_model
from roll.strategy.megatron.passes import of_all_tokens, places, run
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.teacher_forward import TeacherHead, TeacherTerms, teacher_rows


class MegatronTeacher:
    """Implementation of `ScoreStrategy` for teachers.

    Logits of a micro-batch are never made: the last stage ends with hidden states.

    Raises:
        ConfigError: layout, model and number of ranks do not match, or the family changes its
            logits in a way that students cannot follow.
    """

    def __init__(
        self, config: MegatronConfig, setup: ModelSetup[TeacherTerms], head: TeacherHead
    ) -> None:
        self._group = GroupMembership(setup.spec)
        self._device = self._group.device
        self._model_config = setup.model
        self._max_tokens = setup.max_tokens_per_microbatch
        self._head = head
        self._divisor, self._cap = divisor_and_cap(load_config(setup.model))
        sizes = groups.sizes_of(config)
        self._owns_cut = groups.join(sizes, config.cp, setup.spec)
        self._rank_info = groups.rank_info()
        loaded = load_model(
            config,
            sizes,
            setup.model,
            None,
            trainable=False,
            packs=setup.packing,
            seed=setup.spec.seed,
        )
        self._model = _telling_states(loaded)

    @property
    def rank_info(self) -> RankInfo:
        return self._rank_info

    def score(
        self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False
    ) -> TeacherTerms:
        """Compute the outputs of all rows; only data parallel leaders return any. Collective."""
        assert isinstance(batch, TrainBatch)
        micros = micro_batches(batch, self._max_tokens, self._model, self._device)

        def reduce(
            every: Sequence[Tensor], micro: Micro[TrainBatch], rows: TrainBatch
        ) -> tuple[Tensor, list[TeacherRow] | None]:
            (states_BTD,), needed_BT = every, rows.loss_mask
            outputs = self._outputs(states_BTD, micro, needed_BT)
            found = None
            if self._rank_info.is_dp_leader:
                found = teacher_rows(needed_BT, [each.cpu() for each in outputs])
            return states_BTD[:0].float().sum(), found

        for chunk in self._model.chunks:
            chunk.eval()
        rows: dict[int, TeacherRow] = {}
        with torch.no_grad():
            for micro, found in run(self._model, micros, reduce, forward_only=True):
                if found is not None:
                    rows.update(zip(micro.rows, found, strict=True))
        return TeacherTerms([rows[row] for row in range(len(batch))] if rows else [])

    def output_head(self) -> OutputHead:
        return output_head(self._model, self._model_config)

    def offload(self) -> None:
        if self._device.type != "cpu":
            memory.offload(self._model, None)

    def onload(self) -> None:
        if self._device.type != "cpu":
            memory.onload(self._model, None, self._device)

    def close(self) -> None:
        """Destroy Megatron-Core's groups if this strategy created them; leave the default group."""
        if self._owns_cut:
            groups.leave()
            self._owns_cut = False
        self._group.leave()

    def _outputs(
        self, states_BTD: Tensor, micro: Micro[TrainBatch], needed_BT: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs at the needed tokens, `[N, ...]`, in a form of `TeacherRow.outputs`.
        Collective.

        Args:
            states_BTD: hidden states of a micro-batch, of ranks that share rows those of their
                tokens.
            needed_BT: bool mask of the trained tokens, on the CPU.
        """
        read_N = logprobs.positions(needed_BT) - 1
        mine_M, read_M = places(self._model, micro, read_N, self._device)
        states_MD = states_BTD.flatten(0, 1).index_select(0, read_M)
        outputs = (states_MD,) if self._head.target.top_k is None else self._likeliest(states_MD)
        return tuple(of_all_tokens(self._model, each, mine_M, len(read_N)) for each in outputs)

    def _likeliest(self, states_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids `[M, K]` of the likeliest tokens, and log-probs `[M, K + 1]` of these and of
        all others together. Collective."""
        target, k = self._head.target, self._head.target.top_k
        assert k is not None
        weight_SD = _head_weight(self._model)
        part = VocabularyPart(groups.tensor_parallel(), self._head.num_tokens, len(weight_SD))
        weight_SD = weight_SD[: part.size]
        ids_MK = torch.zeros(len(states_MD), k, dtype=torch.long, device=self._device)
        logprobs_MK = states_MD.new_empty(len(states_MD), k + 1, dtype=torch.float32)
        for i in range(0, len(states_MD), self._head.chunk_tokens):
            chunk = slice(i, i + self._head.chunk_tokens)
            logits = soft_cap(linear(states_MD[chunk], weight_SD).float(), self._cap)
            found = part.logprobs(logits.div_(self._divisor * target.teacher_temperature))
            ids_MK[chunk] = part.likeliest(found, k)
            logprobs_MK[chunk] = part.coarse(found, ids_MK[chunk])
        return ids_MK, logprobs_MK


def output_head(model: MegatronModel, config: ModelConfig) -> OutputHead:
    """Return the whole head on the CPU, without the padding of the vocabulary. Collective.

    Raises:
        ConfigError: the family changes its logits in a way that students cannot follow.
    """
    divisor, cap = divisor_and_cap(load_config(config))
    last: Any = unwrapped(model.chunks[-1])
    if groups.on_last_stage():
        part = _head_weight(model).detach().clone()
    else:
        width = padded_vocab(model.vocab, model.sizes.tp) // model.sizes.tp
        part = next(last.parameters()).new_empty(width, last.config.hidden_size)
    groups.from_last_stage(part)
    parts = [torch.empty_like(part) for _ in range(model.sizes.tp)]
    dist.all_gather(parts, part, group=groups.tensor_parallel())
    weight_VD = torch.cat([each.cpu() for each in parts])[: model.vocab].clone()
    return OutputHead(weight_VD, None, divisor, cap)


def _telling_states(model: MegatronModel) -> MegatronModel:
    """Let the last stage end with hidden states, as a stage does that others follow."""
    last: Any = unwrapped(model.chunks[-1])
    last.post_process = False
    return replace(model, tells_states=True)


def _head_weight(model: MegatronModel) -> Tensor:
    """Return this rank's part of the head's weight, padding included; the rank is of the last
    stage."""
    last: Any = unwrapped(model.chunks[-1])
    weight = last.output_layer.weight
    # Where one rank has the first and the last layers, a tied head has no weight of its own.
    found: Tensor = last.embedding.word_embeddings.weight if weight is None else weight
    return found
