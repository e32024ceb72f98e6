"""Readers of the output of a model's last stage, one for each head that a role may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from mcore_adapter.parallel.logprobs import token_logprobs
from mcore_adapter.parallel.vocabulary import VocabularyPart
from roll.algorithms.loss_interface import PolicyTerms, ScoreTerms, ValueTerms
from roll.algorithms.teacher_divergence import Comparison, TeacherOutputs
from roll.core.errors import ConfigError
from roll.core.teacher_outputs import TeacherRow
from roll.models.load import Classifier
from roll.strategy.megatron import groups
from roll.strategy.megatron.divergence import divergences, outputs_here
from roll.strategy.training.heads import (
    PolicyHead,
    PolicyModel,
    ScoreHead,
    ScoreModel,
    ValueHead,
    ValueModel,
)
from roll.strategy.training.token_model import ModelOutputs

T = TypeVar("T")


class Reader(ABC, Generic[T]):
    """Reader of the output of the last stage. `T` is the type of the results."""

    shift: ClassVar[int]
    """Distance between a token and the output that its result is read from, as
    `TokenModel.target_shift`."""

    def names(self, *, entropy: bool, taught: bool, squares: bool) -> list[str]:
        """Return the names of the outputs that `read` computes, in the order of `ModelOutputs`.

        Args:
            entropy: also compute the entropy of a policy's distributions.
            taught: also compute their divergence from teachers.
            squares: also compute the sums of their squared probabilities.
        """
        return ["values"]

    def teachers(
        self, rows: Sequence[TeacherRow], needed_BT: Tensor, device: torch.device, width: int
    ) -> Sequence[TeacherOutputs]:
        """Collect what teachers said of the needed tokens, for `read`; nothing unless the model is
        a policy.

        Args:
            rows: outputs of the teacher of each row.
            needed_BT: bool mask of the needed tokens, on the CPU.
            width: number of this rank's logits, padding included.
        """
        return ()

    @abstractmethod
    def read(
        self,
        output_MS: Tensor,
        tokens_M: Tensor,
        temperatures_M: Tensor | None,
        teachers: Sequence[TeacherOutputs] | None,
        *,
        entropy: bool,
        squares: bool,
    ) -> ModelOutputs:
        """Compute the outputs of M tokens, float32 `[M]` each. Collective if ranks share the
        output.

        Args:
            output_MS: output of the last stage, `shift` tokens before each token.
            tokens_M: ids of the tokens.
            temperatures_M: temperature of each token; None: that of the head.
            teachers: result of `teachers` for these tokens; None: no teacher has read the rows.
            entropy: as for `names`, and so `squares`.
        """

    @abstractmethod
    def terms(self, outputs: ModelOutputs) -> T:
        """Put outputs `[B, T]` into a record with named fields."""


class PolicyReader(Reader[PolicyTerms]):
    """Reader of logits; each tensor parallel rank has a part of the vocabulary.

    Args:
        vocab: number of tokens in the vocabulary, without padding.
    """

    shift = PolicyModel.target_shift

    def __init__(self, head: PolicyHead, vocab: int) -> None:
        self._head = head
        self._vocab = vocab

    def names(self, *, entropy: bool, taught: bool, squares: bool) -> list[str]:
        asked = {"entropy": entropy, "divergence": taught, "squares": squares}
        return ["values", *(name for name, wanted in asked.items() if wanted)]

    def teachers(
        self, rows: Sequence[TeacherRow], needed_BT: Tensor, device: torch.device, width: int
    ) -> Sequence[TeacherOutputs]:
        return outputs_here(rows, needed_BT, device, self._compared, self._part(width))

    def read(
        self,
        output_MS: Tensor,
        tokens_M: Tensor,
        temperatures_M: Tensor | None,
        teachers: Sequence[TeacherOutputs] | None,
        *,
        entropy: bool,
        squares: bool,
    ) -> ModelOutputs:
        logprobs_M, entropy_M, squares_M = token_logprobs(
            output_MS,
            tokens_M,
            vocab=self._vocab,
            temperature=self._head.temperature if temperatures_M is None else temperatures_M,
            chunk=self._head.chunk_tokens,
            group=groups.tensor_parallel(),
            entropy=entropy,
            squares=squares,
        )
        if teachers is None:
            return ModelOutputs(logprobs_M, entropy_M, squares=squares_M)
        divergence_M = divergences(
            output_MS,
            teachers,
            self._compared,
            self._part(output_MS.shape[1]),
            chunk_tokens=self._head.chunk_tokens,
        )
        return ModelOutputs(logprobs_M, entropy_M, divergence_M, squares_M)

    @property
    def _compared(self) -> Comparison:
        """Settings of the comparison; a policy whose rows a teacher has read has some."""
        assert self._head.compared is not None
        return self._head.compared

    def _part(self, width: int) -> VocabularyPart:
        """Return this rank's part of the tokens that are compared, given the number of its
        logits."""
        return VocabularyPart(groups.tensor_parallel(), self._compared.num_tokens, width)

    def terms(self, outputs: ModelOutputs) -> PolicyTerms:
        return PolicyTerms(outputs.values, outputs.entropy, outputs.divergence, outputs.squares)


class _NumberReader(Reader[T]):
    """Reader of one number per token, which every tensor parallel rank has."""

    def read(
        self,
        output_MS: Tensor,
        tokens_M: Tensor,
        temperatures_M: Tensor | None,
        teachers: Sequence[TeacherOutputs] | None,
        *,
        entropy: bool,
        squares: bool,
    ) -> ModelOutputs:
        return ModelOutputs(output_MS.squeeze(-1))


class ValueReader(_NumberReader[ValueTerms]):
    """Reader of values."""

    shift = ValueModel.target_shift

    def terms(self, outputs: ModelOutputs) -> ValueTerms:
        return ValueTerms(values_BT=outputs.values)


class ScoreReader(_NumberReader[ScoreTerms]):
    """Reader of scores."""

    shift = ScoreModel.target_shift

    def terms(self, outputs: ModelOutputs) -> ScoreTerms:
        return ScoreTerms(scores_BT=outputs.values)


def classifier_of(head: object) -> Classifier | None:
    """Return the kind of classifier that a role's head makes of the model; None: it is a policy.

    Raises:
        ConfigError: this backend has no such head.
    """
    if isinstance(head, ValueHead | ScoreHead):
        return head.classifier
    if not isinstance(head, PolicyHead):
        raise ConfigError(
            f"kind: megatron has no {type(head).__name__}: it has policies, critics and reward "
            "models; other models need kind: fsdp2 or deepspeed"
        )
    return None


def reader_of(head: Any, vocab: int) -> Reader[Any]:
    """Return the reader for a head that `classifier_of` accepts.

    Args:
        vocab: number of tokens in the vocabulary, without padding.
    """
    if isinstance(head, PolicyHead):
        return PolicyReader(head, vocab)
    return ValueReader() if isinstance(head, ValueHead) else ScoreReader()
