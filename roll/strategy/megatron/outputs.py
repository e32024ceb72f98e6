"""Readers of the output of a model's last stage, one for each head that a role may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from mcore_adapter.parallel.logprobs import token_logprobs
from roll.algorithms.loss_interface import PolicyTerms, ScoreTerms, ValueTerms
from roll.core.errors import ConfigError
from roll.models.load import Classifier
from roll.strategy.megatron import groups
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

    def names(self, *, entropy: bool, squares: bool) -> list[str]:
        """Return the names of the outputs that `read` computes, in the order of `ModelOutputs`.

        Args:
            entropy: also compute the entropy of a policy's distributions.
            squares: also compute the sums of their squared probabilities.
        """
        return ["values"]

    @abstractmethod
    def read(
        self, output_MS: Tensor, tokens_M: Tensor, temperatures_M: Tensor | None, *, squares: bool
    ) -> ModelOutputs:
        """Compute the outputs of M tokens, float32 `[M]` each. Collective if ranks share the
        output.

        Args:
            output_MS: output of the last stage, `shift` tokens before each token.
            tokens_M: ids of the tokens.
            temperatures_M: temperature of each token; None: that of the head.
            squares: as for `names`.
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

    def names(self, *, entropy: bool, squares: bool) -> list[str]:
        return ["values", *["entropy"] * entropy, *["squares"] * squares]

    def read(
        self, output_MS: Tensor, tokens_M: Tensor, temperatures_M: Tensor | None, *, squares: bool
    ) -> ModelOutputs:
        logprobs_M, entropy_M, squares_M = token_logprobs(
            output_MS,
            tokens_M,
            vocab=self._vocab,
            temperature=self._head.temperature if temperatures_M is None else temperatures_M,
            chunk=self._head.chunk_tokens,
            group=groups.tensor_parallel(),
            squares=squares,
        )
        return ModelOutputs(logprobs_M, entropy_M, squares=squares_M)

    def terms(self, outputs: ModelOutputs) -> PolicyTerms:
        return PolicyTerms(
            logprobs_BT=outputs.values, entropy_BT=outputs.entropy, squares_BT=outputs.squares
        )


class _NumberReader(Reader[T]):
    """Reader of one number per token, which every tensor parallel rank has."""

    def read(
        self, output_MS: Tensor, tokens_M: Tensor, temperatures_M: Tensor | None, *, squares: bool
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
