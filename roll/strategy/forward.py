"""The forward pass that every PyTorch backend shares: token ids in, log-probs or values out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms import logprobs
from roll.algorithms.api import PolicyTerms, ScoreTerms, ValueTerms
from roll.config.model import ModelConfig
from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError
from roll.models import packing
from roll.models.load import (
    load_causal_lm,
    load_score_model,
    load_value_model,
    split_head,
    split_value_head,
)
from roll.strategy import microbatch

T = TypeVar("T")


class TokenModel(nn.Module, ABC, Generic[T]):
    """A backbone and a head whose forward pass ends in a number or two per token.

    Rows are right-padded and attention is causal, so no real token sees padding and no mask is
    needed. Named parameters are those of the Hugging Face model behind the prefix `model.`.
    """

    model: PreTrainedModel
    new_head: nn.Module | None = None
    """What an adapter does not adapt, and is trained as a whole."""
    packs = False
    """Whether a micro-batch goes through the backbone as one row without padding."""

    def pack_rows(self) -> None:
        """From now on, and only where the model can.

        Raises:
            ConfigError: it cannot.
        """
        packing.enable(self.model)
        self.packs = True

    def forward(
        self, tokens_BT: Tensor, positions_N: Tensor, lengths: Sequence[int], entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A number, and the entropy, of each of the tokens at `positions_N`, float32 `[B, T]` and
        zero elsewhere. A tuple, in which FSDP finds the tensors.

        Args:
            lengths: real tokens of each row.
        """
        if not self.packs:
            hidden_BTD = self.hidden(tokens_BT)
            return self.head(hidden_BTD, tokens_BT, positions_N, entropy)
        real_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
        real_R = real_BT.flatten().nonzero().flatten().to(tokens_BT.device)
        tokens_1R = tokens_BT.flatten()[real_R][None]
        hidden_1RD = self.hidden(tokens_1R, **packing.arguments(lengths, tokens_BT.device))
        places_N = torch.searchsorted(real_R, positions_N)
        packed = self.head(hidden_1RD, tokens_1R, places_N, entropy)

        def unpack(values_1R: Tensor) -> Tensor:
            values_N = values_1R.flatten()[places_N]
            return values_N.new_zeros(tokens_BT.shape).put(positions_N, values_N)

        main_1R, entropy_1R = packed
        return unpack(main_1R), None if entropy_1R is None else unpack(entropy_1R)

    @abstractmethod
    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        """Hidden states `[B, T, D]`, on which `head` stands."""

    @abstractmethod
    def head(
        self, hidden_BTD: Tensor, tokens_BT: Tensor, positions_N: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` returns, of rows as they are."""

    @abstractmethod
    def terms(self, main_BT: Tensor, entropy_BT: Tensor | None) -> T:
        """What `forward` returned, by its name."""


def _last_hidden(backbone: nn.Module, tokens_BT: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    hidden_BTD = backbone(input_ids=tokens_BT, use_cache=False, **arguments).last_hidden_state
    assert isinstance(hidden_BTD, Tensor)
    return hidden_BTD


class PolicyModel(TokenModel[PolicyTerms]):
    """A causal LM whose forward pass ends in log-probs instead of logits."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens
        # In a tuple, so that the parts are not registered a second time under other names.
        self._parts = split_head(model)
        if temperature <= 0:
            raise ConfigError(
                f"temperature {temperature} has no log-probs (greedy); set it above 0 to train"
            )
        self._temperature = temperature * self._parts[1].divisor

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return _last_hidden(self._parts[0], tokens_BT, arguments)

    def head(
        self, hidden_BTD: Tensor, tokens_BT: Tensor, positions_N: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropy."""
        head = self._parts[1]
        terms = logprobs.from_hidden(
            hidden_BTD,
            head.weight_VD,
            head.bias_V,
            tokens_BT,
            positions_N,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy=entropy,
        )
        return terms.logprobs_BT, terms.entropy_BT

    def terms(self, main_BT: Tensor, entropy_BT: Tensor | None) -> PolicyTerms:
        return PolicyTerms(logprobs_BT=main_BT, entropy_BT=entropy_BT)


class ClassifierModel(TokenModel[T]):
    """A Hugging Face classifier with one label, read at single tokens."""

    reads_before: ClassVar[int]
    """Tokens that the state which is read lies before the one it is reported at."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._parts = split_value_head(model)
        # Not registered: it is part of the model.
        object.__setattr__(self, "new_head", self._parts[1])

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return _last_hidden(self._parts[0], tokens_BT, arguments)

    def head(
        self, hidden_BTD: Tensor, tokens_BT: Tensor, positions_N: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden_ND = hidden_BTD.flatten(0, 1)[positions_N - self.reads_before]
        values_N = self._parts[1](hidden_ND).squeeze(-1).float()
        at = (positions_N // tokens_BT.shape[1], positions_N % tokens_BT.shape[1])
        return values_N.new_zeros(tokens_BT.shape).index_put(at, values_N), None


class ValueModel(ClassifierModel[ValueTerms]):
    """A token classifier, read as the value of what was written before each token."""

    reads_before = 1

    def terms(self, main_BT: Tensor, entropy_BT: Tensor | None) -> ValueTerms:
        return ValueTerms(values_BT=main_BT)


class ScoreModel(ClassifierModel[ScoreTerms]):
    """A sequence classifier, read as the score of a text up to each token."""

    reads_before = 0

    def terms(self, main_BT: Tensor, entropy_BT: Tensor | None) -> ScoreTerms:
        return ScoreTerms(scores_BT=main_BT)


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """Makes policies: log-probs of `logits / temperature`, `chunk_tokens` of them at once."""

    temperature: float
    chunk_tokens: int

    def load(self, model: ModelConfig, dtype: torch.dtype) -> PolicyModel:
        return PolicyModel(
            load_causal_lm(model, dtype=dtype),
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
        )


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Makes critics."""

    def load(self, model: ModelConfig, dtype: torch.dtype) -> ValueModel:
        return ValueModel(load_value_model(model, dtype=dtype))


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Makes reward models."""

    def load(self, model: ModelConfig, dtype: torch.dtype) -> ScoreModel:
        return ScoreModel(load_score_model(model, dtype=dtype))


class Head(Protocol[T]):
    """What the last layer of a model is for."""

    def load(self, model: ModelConfig, dtype: torch.dtype) -> TokenModel[T]:
        """The model on the CPU, with parameters of `dtype`."""
        ...


def token_terms(
    model: TokenModel[T], batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> T:
    """Terms of the needed tokens of one micro-batch, on `device`; zero at the others."""
    positions_N = logprobs.positions(needed_BT).to(device)
    main_BT, entropy_BT = model(
        batch.tokens.to(device), positions_N, batch.lengths.tolist(), entropy
    )
    return model.terms(main_BT, entropy_BT)


def empty_pass(model: TokenModel[T], device: torch.device) -> Tensor:
    """A pass over nothing, as a loss of zero: a rank without rows left still joins collectives."""
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    main_BT, _ = model(tokens_BT, tokens_BT.new_empty(0), [2], False)
    assert isinstance(main_BT, Tensor)
    return main_BT.sum()


def score(
    model: TokenModel[T],
    batch: TokenBatch,
    *,
    device: torch.device,
    max_tokens: int,
    entropy: bool,
    agree: Callable[[int], int],
) -> T:
    """The terms of all real tokens, float32 `[B, T]` on the CPU, rows in order.

    Args:
        agree: the number of passes, given this rank's own; the same on every rank.
    """
    out_BT = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    entropy_BT = torch.zeros_like(out_BT) if entropy else None
    lengths = batch.lengths.tolist()
    parts = microbatch.plan(lengths, max_tokens, unit=batch.unit, packed=model.packs)
    passes = agree(len(parts))
    with torch.no_grad():
        for rows in parts:
            micro = microbatch.take(batch, rows)
            width = micro.tokens.shape[1]
            needed_BT = torch.arange(width) < micro.lengths[:, None]
            positions_N = logprobs.positions(needed_BT).to(device)
            main_BT, micro_entropy_BT = model(
                micro.tokens.to(device), positions_N, micro.lengths.tolist(), entropy
            )
            out_BT[rows, :width] = main_BT.cpu()
            if entropy_BT is not None and micro_entropy_BT is not None:
                entropy_BT[rows, :width] = micro_entropy_BT.cpu()
        for _ in range(passes - len(parts)):
            empty_pass(model, device)
    return model.terms(out_BT, entropy_BT)
