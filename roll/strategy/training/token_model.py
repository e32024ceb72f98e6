"""A model that PyTorch backends train or score with: token ids in, numbers per token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms.teacher_divergence import TeacherOutputs
from roll.core.batches import TokenBatch
from roll.models import packing
from roll.models.determinism import train_without
from roll.models.last_mlp import LastMlp
from roll.strategy.training.sequence_shards import SequenceShards

T = TypeVar("T")


class ModelOutputs(NamedTuple):
    """Results of a forward pass: one row for each of the N requested tokens, or spread over whole
    rows `[B, T]`. A tuple, because FSDP looks for the tensors of an output in tuples."""

    values: Tensor
    """The number of each token: log-probability, value or score. A teacher gives hidden states
    `[N, D]` instead, or log-probabilities `[N, K + 1]` of its likeliest tokens and of all others
    together."""
    entropy: Tensor | None = None
    """Entropy of the distribution that each token was drawn from."""
    divergence: Tensor | None = None
    """Divergence between the distributions of student and teacher at each token."""
    top_ids: Tensor | None = None
    """Ids `[N, K + 1]` of a teacher's likeliest tokens, as float32 so that DeepSpeed can stack them
    with `values`; the last column means nothing."""

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelOutputs:
        """Return the outputs with `change` applied to each tensor."""
        given = {name: part for name, part in self._asdict().items() if part is not None}
        return ModelOutputs(**{name: change(part) for name, part in given.items()})


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """What is to be told of rows `[B, T]`."""

    positions_N: Tensor
    """Flat indices of the tokens that it is about."""
    lengths: Sequence[int]
    """Real tokens of each row."""
    entropy: bool = False
    """Also how uncertain the model was of each."""
    teacher_outputs: Sequence[TeacherOutputs] | None = None
    """What teachers say of these tokens."""

    def among(self, chosen: Tensor) -> ForwardRequest:
        """Return the request for fewer of the tokens, with the same positions.

        Args:
            chosen: int64, ascending; numbers of the tokens, counted from 0 to N - 1.
        """
        if self.teacher_outputs is None:
            return self
        return replace(self, teacher_outputs=[each.among(chosen) for each in self.teacher_outputs])


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
    shards: SequenceShards | None = None
    """The ranks that share each row; None: it is computed here."""
    last_mlp: LastMlp | None = None
    """What need not be computed at every token, where the architecture is known to allow it."""
    target_shift: ClassVar[int]
    """Tokens that the state which is read lies before the one it is reported at."""

    def pack_rows(self) -> None:
        """From now on, and only where the model can.

        Raises:
            ConfigError: it cannot.
        """
        packing.enable(self.model)
        self.packs = True

    def train(self, mode: bool = True) -> Self:
        """Numbers are those of evaluation mode but for an adapter's dropout."""
        super().train(mode)
        if mode:
            train_without(self.model)
        return self

    def forward(self, tokens_BT: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Return the numbers of the requested tokens, spread over `[B, T]` by `spread`."""
        rows, places_N, sequences = tokens_BT, request.positions_N, None
        if self.packs:
            real_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(request.lengths)[:, None]
            real_R = real_BT.flatten().nonzero().flatten().to(tokens_BT.device)
            rows, sequences = tokens_BT.flatten()[real_R][None], request.lengths
            places_N = torch.searchsorted(real_R, request.positions_N)
        outputs = self._read(rows, places_N, sequences, request)

        def spread(values_N: Tensor) -> Tensor:
            return self.spread(values_N, request.positions_N, tokens_BT.shape)

        return outputs.map(spread)

    def spread(self, values_N: Tensor, positions_N: Tensor, shape: torch.Size) -> Tensor:
        """Float32 `[B, T]`, zero at the other tokens."""
        # Not a view: FSDP hangs its hooks on the result.
        return values_N.new_zeros(shape).put(positions_N, values_N)

    def _read(
        self,
        rows_BT: Tensor,
        positions_N: Tensor,
        lengths: Sequence[int] | None,
        request: ForwardRequest,
    ) -> ModelOutputs:
        """`hidden` and `head`, of its slice only where ranks share the rows.

        Args:
            positions_N: where the tokens are in these rows.
            lengths: of the sequences, if the only row is packed.
        """
        targets_N, shards = rows_BT.flatten()[positions_N], self.shards
        if shards is None:
            arguments = {} if lengths is None else packing.arguments(lengths, rows_BT.device)
            states_ND = self.states(rows_BT, positions_N - self.target_shift, arguments)
            return self.head(states_ND, targets_N, request)
        own = shards.cut(rows_BT, positions_N, lengths, self.target_shift)
        states_MD = self.states(own.tokens_BW, own.states_M, own.arguments)
        outputs = self.head(states_MD, targets_N[own.mine_M], request.among(own.mine_M))
        return outputs.map(lambda part_M: shards.join(part_M, own.mine_M, len(positions_N)))

    def states(self, rows_BT: Tensor, read_N: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """`[N, D]`, on which `head` stands; collective.

        Args:
            rows_BT: tokens that are computed here.
            read_N: flat indices of those whose states they are.
            arguments: of the model's backbone.
        """
        if self.last_mlp is not None and (self.shards is None or self.shards.tp == 1):
            arguments = {**arguments, **self.last_mlp.arguments(read_N, rows_BT.numel())}
        return self.hidden(rows_BT, **arguments).flatten(0, 1)[read_N]

    @abstractmethod
    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        """Hidden states `[B, T, D]`; with `last_mlp.arguments` right at those tokens alone."""

    @abstractmethod
    def head(self, states_ND: Tensor, targets_N: Tensor, request: ForwardRequest) -> ModelOutputs:
        """What `forward` returns, a row for each token that is asked for.

        Args:
            states_ND: hidden states, `target_shift` tokens before each.
            targets_N: the tokens.
        """

    @abstractmethod
    def terms(self, outputs: ModelOutputs) -> T:
        """What `forward` returned, by its name."""

    def needed(self, batch: TokenBatch) -> Tensor:
        """Mask `[B, T]` of the tokens that scoring is about."""
        return torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def collect(self, batch: TokenBatch, passes: Iterator[tuple[list[int], ModelOutputs]]) -> T:
        """The terms of the whole batch, on the CPU, rows in order.

        Args:
            passes: rows and what `forward` returned of them, micro-batch by micro-batch.
        """
        whole = {"values": torch.zeros(batch.tokens.shape)}
        for rows, found in passes:
            for name, part in found._asdict().items():
                if part is not None:
                    out_BT = whole.setdefault(name, torch.zeros(batch.tokens.shape))
                    out_BT[rows, : part.shape[1]] = part.cpu()
        return self.terms(ModelOutputs(**whole))


def last_hidden(backbone: nn.Module, tokens_BT: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    hidden_BTD = backbone(input_ids=tokens_BT, use_cache=False, **arguments).last_hidden_state
    assert isinstance(hidden_BTD, Tensor)
    return hidden_BTD
