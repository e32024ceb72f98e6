"""Teachers: models whose forward pass describes the distribution of the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from roll.algorithms.logprobs import soft_cap
from roll.algorithms.teacher_divergence import logprobs_of, top_logprobs
from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.teacher_outputs import OutputHead, TeacherRow
from roll.models.load import load_causal_lm
from roll.models.parts.head import split_head
from roll.models.vision.tower import Tower, find_tower
from roll.strategy.training.token_model import ForwardRequest, ModelOutputs, TokenModel, last_hidden


@dataclass(frozen=True, slots=True)
class TeacherTerms:
    """Results of a teacher's forward pass."""

    rows: list[TeacherRow] = field(default_factory=list)
    """One entry per row of the batch, for the trained tokens of that row."""


class TeacherModel(TokenModel[TeacherTerms]):
    """A causal LM whose forward pass returns hidden states, or the most probable tokens.

    Args:
        target: what students learn from; without `top_k` the teacher returns hidden states.
        num_tokens: size of the vocabulary that teacher and student share, in tokens; logits after
            these tokens are left out. Used only with `top_k`.
        chunk_tokens: number of tokens whose logits exist at the same time.
        tower: vision part of the model; None if it reads no pictures.
    """

    target_shift = 1

    def __init__(
        self,
        model: PreTrainedModel,
        target: DistillTargetConfig,
        num_tokens: int,
        chunk_tokens: int,
        tower: Tower | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tower = tower
        self._target = target
        self._num_tokens = num_tokens
        self._chunk_tokens = chunk_tokens
        # In a tuple, so that the parts are not registered a second time under other names.
        self._parts = split_head(model)

    def hidden(self, tokens_BT: Tensor, **arguments: object) -> Tensor:
        return last_hidden(self._parts[0], tokens_BT, arguments)

    def head(self, states_ND: Tensor, targets_N: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Return hidden states `[N, D]`; with `top_k` = K, log-probs and ids of likely tokens.

        `values` `[N, K + 1]` are then the log-probs of the K most probable tokens, and in the last
        column that of all other tokens together. `top_ids` `[N, K + 1]` are the ids of the K
        tokens, as float32; the last column is 0 and means nothing.
        """
        if self._target.top_k is None:
            return ModelOutputs(states_ND)
        head, k = self._parts[1], self._target.top_k
        logprobs_NK = states_ND.new_empty(len(states_ND), k + 1, dtype=torch.float32)
        ids_NK = torch.zeros_like(logprobs_NK)
        for i in range(0, len(states_ND), self._chunk_tokens):
            part = slice(i, i + self._chunk_tokens)
            logits = linear(states_ND[part], head.weight_VD, head.bias_V).float()
            logits = soft_cap(logits, head.cap)
            divisor = head.divisor * self._target.teacher_temperature
            logprobs = logprobs_of(logits, divisor, self._num_tokens)
            top_ids, logprobs_NK[part] = top_logprobs(logprobs, k)
            ids_NK[part, :k] = top_ids.float()  # exact below 2^24
        return ModelOutputs(logprobs_NK, top_ids=ids_NK)

    def spread(self, values_N: Tensor, positions_N: Tensor, shape: torch.Size) -> Tensor:
        """Return `values_N` `[N, ...]` unchanged: `collect` needs only the requested tokens."""
        return values_N

    def terms(self, outputs: ModelOutputs) -> TeacherTerms:
        """Return terms without rows: only `collect` makes rows."""
        return TeacherTerms()

    def needed(self, batch: TokenBatch) -> Tensor:
        """Return the mask of the trained tokens, bool `[B, T]`."""
        assert isinstance(batch, TrainBatch)
        return batch.loss_mask

    def collect(
        self, batch: TokenBatch, passes: Iterator[tuple[list[int], ModelOutputs]]
    ) -> TeacherTerms:
        """Return one `TeacherRow` per row of `batch`, on the CPU, with the needed tokens only."""
        needed_BT = self.needed(batch)
        found: dict[int, TeacherRow] = {}
        for indices, found_N in passes:
            columns = [found_N.values.cpu()]
            if found_N.top_ids is not None:
                columns.insert(0, found_N.top_ids[:, :-1].long().cpu())
            found.update(zip(indices, teacher_rows(needed_BT[indices], columns), strict=True))
        return TeacherTerms([found[row] for row in range(len(batch))])


def teacher_rows(needed_BT: Tensor, outputs: Sequence[Tensor]) -> list[TeacherRow]:
    """Divide outputs of a teacher among the rows that they belong to.

    Args:
        needed_BT: bool mask of the trained tokens, N in all without position 0.
        outputs: those of these tokens, `[N, ...]`, in one of the forms of `TeacherRow.outputs`.
    """
    positions = [needed_T[1:].nonzero().flatten() + 1 for needed_T in needed_BT]
    sizes = [len(each) for each in positions]
    return [
        # Copies: a part would be sent with all that it is a part of.
        TeacherRow("", at, tuple(each.clone() for each in of_row))
        for at, *of_row in zip(positions, *(each.split(sizes) for each in outputs), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """Loader of teachers. The fields are the arguments of `TeacherModel`."""

    target: DistillTargetConfig
    num_tokens: int
    chunk_tokens: int

    def load(
        self, model: ModelConfig, dtype: torch.dtype, *, deferred: bool = False
    ) -> TeacherModel:
        loaded = load_causal_lm(model, dtype=dtype, deferred=deferred)
        return TeacherModel(
            loaded, self.target, self.num_tokens, self.chunk_tokens, find_tower(loaded, model)
        )


def output_head(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> OutputHead:
    """Copy the full head of a causal LM to the CPU. Collective if `whole` is.

    Args:
        whole: returns the full parameter, given this rank's part of it.
    """
    assert isinstance(model, PreTrainedModel)
    head = split_head(model)[1]

    def copied(part: Tensor) -> Tensor:
        return whole(part).detach().to("cpu", copy=True)

    bias_V = None if head.bias_V is None else copied(head.bias_V)
    return OutputHead(copied(head.weight_VD), bias_V, head.divisor, head.cap)
