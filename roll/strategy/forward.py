"""The forward pass that every PyTorch backend shares: token ids in, log-probs or values out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms import logprobs
from roll.algorithms.api import PolicyTerms, ScoreTerms, ValueTerms
from roll.algorithms.lessons import Comparison, Lesson, divergences, lessons
from roll.config.model import ModelConfig
from roll.core.batches import TokenBatch, TrainBatch
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
from roll.strategy.slices import Slices

T = TypeVar("T")
Outputs = tuple[Tensor, Tensor | None, Tensor | None]
"""A number of each token (a log-prob, a value), its entropy, its divergence from the teacher's."""


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
    slices: Slices | None = None
    """The ranks that share each row; None: it is computed here."""
    reads_before: ClassVar[int]
    """Tokens that the state which is read lies before the one it is reported at."""

    def pack_rows(self) -> None:
        """From now on, and only where the model can.

        Raises:
            ConfigError: it cannot.
        """
        packing.enable(self.model)
        self.packs = True

    def forward(
        self,
        tokens_BT: Tensor,
        positions_N: Tensor,
        lengths: Sequence[int],
        entropy: bool,
        learned: Sequence[Lesson] | None = None,
    ) -> Outputs:
        """What `terms` gives names to, of the tokens at `positions_N`. A tuple, in which FSDP finds
        the tensors.

        Args:
            lengths: real tokens of each row.
            learned: what teachers say of these tokens.
        """
        rows, places_N, sequences = tokens_BT, positions_N, None
        if self.packs:
            real_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
            real_R = real_BT.flatten().nonzero().flatten().to(tokens_BT.device)
            rows, sequences = tokens_BT.flatten()[real_R][None], lengths
            places_N = torch.searchsorted(real_R, positions_N)
        outputs = self._read(rows, places_N, sequences, entropy, learned)

        def spread(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else self.spread(values_N, positions_N, tokens_BT.shape)

        main, entropies, divergences = outputs
        return (
            self.spread(main, positions_N, tokens_BT.shape),
            spread(entropies),
            spread(divergences),
        )

    def spread(self, values_N: Tensor, positions_N: Tensor, shape: torch.Size) -> Tensor:
        """Float32 `[B, T]`, zero at the other tokens."""
        # Not a view: FSDP hangs its hooks on the result.
        return values_N.new_zeros(shape).put(positions_N, values_N)

    def _read(
        self,
        rows_BT: Tensor,
        positions_N: Tensor,
        lengths: Sequence[int] | None,
        entropy: bool,
        learned: Sequence[Lesson] | None,
    ) -> Outputs:
        """`hidden` and `head`, of its slice only where ranks share the rows.

        Args:
            lengths: of the sequences, if the only row is packed.
        """
        if self.slices is not None:
            return self.slices.read(self, rows_BT, positions_N, lengths, entropy, learned)
        arguments = {} if lengths is None else packing.arguments(lengths, rows_BT.device)
        hidden_BTD = self.hidden(rows_BT, **arguments)
        states_ND = hidden_BTD.flatten(0, 1)[positions_N - self.reads_before]
        return self.head(states_ND, rows_BT.flatten()[positions_N], entropy, learned)

    @abstractmethod
    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        """Hidden states `[B, T, D]`, on which `head` stands."""

    @abstractmethod
    def head(
        self,
        states_ND: Tensor,
        targets_N: Tensor,
        entropy: bool,
        learned: Sequence[Lesson] | None,
    ) -> Outputs:
        """What `forward` returns, a row for each token that is asked for.

        Args:
            states_ND: hidden states, `reads_before` tokens before each.
            targets_N: the tokens.
        """

    @abstractmethod
    def terms(self, outputs: Outputs) -> T:
        """What `forward` returned, by its name."""

    def needed(self, batch: TokenBatch) -> Tensor:
        """Mask `[B, T]` of the tokens that scoring is about."""
        return torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def collect(self, batch: TokenBatch, passes: Iterator[tuple[list[int], Outputs]]) -> T:
        """The terms of the whole batch, on the CPU, rows in order.

        Args:
            passes: rows and what `forward` returned of them, micro-batch by micro-batch.
        """
        outputs: list[Tensor | None] = [torch.zeros(batch.tokens.shape), None, None]
        for rows, found in passes:
            for i, part in enumerate(found):
                if part is None:
                    continue
                out_BT = outputs[i]
                if out_BT is None:
                    out_BT = outputs[i] = torch.zeros(batch.tokens.shape)
                out_BT[rows, : part.shape[1]] = part.cpu()
        main_BT, entropy_BT, divergence_BT = outputs
        assert main_BT is not None
        return self.terms((main_BT, entropy_BT, divergence_BT))


def last_hidden(backbone: nn.Module, tokens_BT: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    hidden_BTD = backbone(input_ids=tokens_BT, use_cache=False, **arguments).last_hidden_state
    assert isinstance(hidden_BTD, Tensor)
    return hidden_BTD


class PolicyModel(TokenModel[PolicyTerms]):
    """A causal LM whose forward pass ends in log-probs instead of logits."""

    reads_before = 1

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        chunk_tokens: int,
        compared: Comparison | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens
        self._compared = compared
        # In a tuple, so that the parts are not registered a second time under other names.
        self._parts = split_head(model)
        if temperature <= 0:
            raise ConfigError(
                f"temperature {temperature} has no log-probs (greedy); set it above 0 to train"
            )
        self._temperature = temperature * self._parts[1].divisor

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return last_hidden(self._parts[0], tokens_BT, arguments)

    def head(
        self,
        states_ND: Tensor,
        targets_N: Tensor,
        entropy: bool,
        learned: Sequence[Lesson] | None,
    ) -> Outputs:
        """Log-probs, entropy and the divergence from teachers."""
        head = self._parts[1]
        logprobs_N, entropy_N = logprobs.from_hidden(
            states_ND,
            head.weight_VD,
            head.bias_V,
            targets_N,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy=entropy,
        )
        if learned is None:
            return logprobs_N, entropy_N, None
        assert self._compared is not None
        divergence_N = divergences(
            states_ND,
            head.weight_VD,
            head.bias_V,
            learned,
            self._compared,
            divisor=head.divisor,
            chunk_tokens=self._chunk_tokens,
        )
        return logprobs_N, entropy_N, divergence_N

    def terms(self, outputs: Outputs) -> PolicyTerms:
        logprobs_BT, entropy_BT, divergence_BT = outputs
        return PolicyTerms(logprobs_BT, entropy_BT, divergence_BT)


class ClassifierModel(TokenModel[T]):
    """A Hugging Face classifier with one label, read at single tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._parts = split_value_head(model)
        # Not registered: it is part of the model.
        object.__setattr__(self, "new_head", self._parts[1])

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return last_hidden(self._parts[0], tokens_BT, arguments)

    def head(
        self,
        states_ND: Tensor,
        targets_N: Tensor,
        entropy: bool,
        learned: Sequence[Lesson] | None,
    ) -> Outputs:
        return self._parts[1](states_ND).squeeze(-1).float(), None, None


class ValueModel(ClassifierModel[ValueTerms]):
    """A token classifier, read as the value of what was written before each token."""

    reads_before = 1

    def terms(self, outputs: Outputs) -> ValueTerms:
        return ValueTerms(values_BT=outputs[0])


class ScoreModel(ClassifierModel[ScoreTerms]):
    """A sequence classifier, read as the score of a text up to each token."""

    reads_before = 0

    def terms(self, outputs: Outputs) -> ScoreTerms:
        return ScoreTerms(scores_BT=outputs[0])


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """Makes policies: log-probs of `logits / temperature`, `chunk_tokens` of them at once."""

    temperature: float
    chunk_tokens: int
    compared: Comparison | None = None
    """With teachers, where it has some."""

    def load(self, model: ModelConfig, dtype: torch.dtype) -> PolicyModel:
        return PolicyModel(
            load_causal_lm(model, dtype=dtype),
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            compared=self.compared,
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


def run(
    model: TokenModel[T], batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> Outputs:
    """What the model's `forward` returns of the needed tokens of one micro-batch, on `device`."""
    taught = batch.taught if isinstance(batch, TrainBatch) else None
    return model(
        batch.tokens.to(device),
        logprobs.positions(needed_BT).to(device),
        batch.lengths.tolist(),
        entropy,
        None if taught is None else lessons(taught, needed_BT, device),
    )


def token_terms(
    model: TokenModel[T], batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> T:
    """Terms of the needed tokens of one micro-batch, on `device`; zero at the others."""
    return model.terms(run(model, batch, needed_BT, device, entropy))


def empty_pass(model: TokenModel[T], device: torch.device) -> Tensor:
    """A pass over nothing, as a loss of zero: a rank without rows left still joins collectives."""
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    main = model(tokens_BT, tokens_BT.new_empty(0), [2], False)[0]
    assert isinstance(main, Tensor)
    return main.sum()


def score(
    model: TokenModel[T],
    batch: TokenBatch,
    *,
    device: torch.device,
    max_tokens: int,
    entropy: bool,
    agree: Callable[[int], int],
) -> T:
    """The terms of all real tokens, or of those that the model speaks of, on the CPU.

    Args:
        agree: the number of passes, given this rank's own; the same on every rank.
    """
    parts = microbatch.plan(batch.lengths.tolist(), max_tokens, unit=batch.unit, packed=model.packs)
    passes = agree(len(parts))

    def outputs() -> Iterator[tuple[list[int], Outputs]]:
        for rows in parts:
            micro = microbatch.take(batch, rows)
            yield rows, run(model, micro, model.needed(micro), device, entropy)
        for _ in range(passes - len(parts)):
            empty_pass(model, device)

    with torch.no_grad():
        return model.collect(batch, outputs())
