"""Base class of the models that PyTorch backends use: token ids in, numbers per token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.algorithms.teacher_divergence import TeacherOutputs
from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch
from roll.models import packing
from roll.models.determinism import train_without
from roll.models.kernels.compiled import compile_layers
from roll.models.kernels.rotary import border, check_rows
from roll.models.parts.last_mlp import LastMlp
from roll.models.vision.inputs import PictureInputs
from roll.models.vision.tower import Tower
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
    squares: Tensor | None = None
    """Sum of the squared probabilities of the distribution that each token was drawn from."""
    top_ids: Tensor | None = None
    """Ids `[N, K + 1]` of a teacher's likeliest tokens, as float32 so that DeepSpeed can stack them
    with `values`; the last column means nothing."""

    def map(self, change: Callable[[Tensor], Tensor]) -> ModelOutputs:
        """Return the outputs with `change` applied to each tensor."""
        given = {name: part for name, part in self._asdict().items() if part is not None}
        return ModelOutputs(**{name: change(part) for name, part in given.items()})


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Request for the results of some tokens of rows `[B, T]`."""

    positions_N: Tensor
    """Flat indices, into the rows, of the N requested tokens, int64."""
    lengths: Sequence[int]
    """Number of tokens of each row, without padding."""
    entropy: bool = False
    """True to compute also the entropy of the model's distribution at each requested token."""
    squares: bool = False
    """True to compute also the sum of the squared probabilities of this distribution."""
    teacher_outputs: Sequence[TeacherOutputs] | None = None
    """Outputs of teachers for the requested tokens, one entry per teacher."""
    temperatures_N: Tensor | None = None
    """Temperature of each requested token, float32; None: that of the model's head for all."""
    pictures: PictureInputs | None = None
    """Pictures of the rows; None: the pass does not run the model's vision part."""

    def among(self, chosen: Tensor) -> ForwardRequest:
        """Return the request for fewer of the tokens, with the same positions.

        Args:
            chosen: int64, ascending; numbers of the tokens, counted from 0 to N - 1.
        """
        request = self
        if self.teacher_outputs is not None:
            outputs = [each.among(chosen) for each in self.teacher_outputs]
            request = replace(request, teacher_outputs=outputs)
        if self.temperatures_N is not None:
            request = replace(request, temperatures_N=self.temperatures_N[chosen])
        return request


class TokenModel(nn.Module, ABC, Generic[T]):
    """A backbone with a head whose forward pass returns a few numbers per token.

    Rows are right-padded and attention is causal, so no real token sees padding, and no attention
    mask is needed. Parameters have the names of the Hugging Face model, with the prefix `model.`.
    `T` is the type of the results that `terms` returns.
    """

    model: PreTrainedModel
    new_head: nn.Module | None = None
    """Head that is trained in full even if the model has an adapter; None without such a head."""
    packs = False
    """True if the rows of a micro-batch go through the backbone as one row without padding."""
    tower: Tower | None = None
    """Vision part of the model; None if it reads no pictures."""
    shards: SequenceShards | None = None
    """The ranks that share each row; None: it is computed here."""
    last_mlp: LastMlp | None = None
    """Last feed-forward part, computed only at the needed tokens; None unless the architecture is
    known to allow this."""
    target_shift: ClassVar[int]
    """Distance, in tokens, between a token and the hidden state that its result is computed from:
    the result of token t comes from the state at t - `target_shift`."""

    @property
    def trains_tower_alone(self) -> bool:
        """True if every trained parameter belongs to the vision part."""
        if self.tower is None:
            return False
        of_tower = {id(parameter) for parameter in self.tower.module.parameters()}
        return all(id(p) in of_tower for p in self.parameters() if p.requires_grad)

    @property
    def border(self) -> int | None:
        """Number of tokens up to which rows go through passes of their own, apart from longer ones;
        None: all rows may share passes."""
        return border(self.model.config.get_text_config())

    def pack_rows(self) -> None:
        """Join the rows of each micro-batch into one row without padding from now on.

        Raises:
            ConfigError: the model's architecture does not support this.
        """
        packing.enable(self.model)
        self.packs = True

    def compile_layers(self, config: ModelConfig) -> list[nn.Module]:
        """Compile the layers if `config.compile` says so; return those that are compiled.

        Then the last feed-forward part is computed at all tokens: its selection would make the last
        layer another piece of code, to be compiled for itself.

        Raises:
            ConfigError: see `compiled.compile_layers`.
        """
        layers = compile_layers(self.model, config)
        if layers and self.last_mlp is not None:
            self.last_mlp.remove()
            self.last_mlp = None
        return layers

    def train(self, mode: bool = True) -> Self:
        """Set training mode such that only the dropout of an adapter changes the results.

        Everything else computes the same numbers as in evaluation mode.
        """
        super().train(mode)
        if mode:
            train_without(self.model)
        return self

    def forward(self, tokens_BT: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Return the numbers of the requested tokens, spread over `[B, T]` by `spread`; ConfigError
        if the numbers of a row would depend on the other rows."""
        check_rows(self.model.config.get_text_config(), request.lengths)
        rows, places_N, sequences = tokens_BT, request.positions_N, None
        pictures = request.pictures
        if self.packs:
            real_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(request.lengths)[:, None]
            real_R = real_BT.flatten().nonzero().flatten().to(tokens_BT.device)
            rows, sequences = tokens_BT.flatten()[real_R][None], request.lengths
            places_N = torch.searchsorted(real_R, request.positions_N)
            pictures = None if pictures is None else pictures.packed(real_R)
        outputs = self._read(rows, places_N, sequences, replace(request, pictures=pictures))

        def spread(values_N: Tensor) -> Tensor:
            return self.spread(values_N, request.positions_N, tokens_BT.shape)

        return outputs.map(spread)

    def spread(self, values_N: Tensor, positions_N: Tensor, shape: torch.Size) -> Tensor:
        """Place values of requested tokens into float32 `[B, T]`, zero at all other tokens."""
        # Not a view: FSDP hangs its hooks on the result.
        return values_N.new_zeros(shape).put(positions_N, values_N)

    def _read(
        self,
        rows_BT: Tensor,
        positions_N: Tensor,
        lengths: Sequence[int] | None,
        request: ForwardRequest,
    ) -> ModelOutputs:
        """Run `hidden` and `head`. If ranks share the rows, this rank runs them on its slice only.

        Args:
            positions_N: flat indices, into `rows_BT`, of the requested tokens.
            lengths: lengths of the sequences if `rows_BT` is one packed row, else None.
            request: request with the pictures of `rows_BT`.
        """
        targets_N, shards = rows_BT.flatten()[positions_N], self.shards
        if shards is None:
            arguments = {} if lengths is None else packing.arguments(lengths, rows_BT.device)
            read_N = positions_N - self.target_shift
            states_ND = self.states(rows_BT, read_N, arguments, request.pictures)
            return self.head(states_ND, targets_N, request)
        own = shards.cut(rows_BT, positions_N, lengths, self.target_shift, request.pictures)
        states_MD = self.states(own.tokens_BW, own.states_M, own.arguments, own.pictures)
        outputs = self.head(states_MD, targets_N[own.mine_M], request.among(own.mine_M))
        return outputs.map(lambda part_M: shards.join(part_M, own.mine_M, len(positions_N)))

    def states(
        self,
        rows_BT: Tensor,
        read_N: Tensor,
        arguments: Mapping[str, Any],
        pictures: PictureInputs | None,
    ) -> Tensor:
        """Compute the hidden states `[N, D]` that are the input of `head`. Collective.

        Args:
            rows_BT: token ids that this rank computes.
            read_N: flat indices, into `rows_BT`, of the states to return.
            arguments: keyword arguments of the model's backbone.
            pictures: pictures of `rows_BT`; None: the vision part does not run.
        """
        if pictures is not None:
            assert self.tower is not None
            arguments = {**arguments, **self.tower.arguments(rows_BT, pictures)}
        if self.last_mlp is not None and (self.shards is None or self.shards.tp == 1):
            arguments = {**arguments, **self.last_mlp.arguments(read_N, rows_BT.numel())}
        # Not by `[read_N]`, whose backward pass adds one row after the other on CPUs.
        return self.hidden(rows_BT, **arguments).flatten(0, 1).index_select(0, read_N)

    @abstractmethod
    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        """Compute the hidden states `[B, T, D]` of the backbone.

        If `arguments` contains `last_mlp.arguments`, the states are correct only at the tokens
        listed there.
        """

    @abstractmethod
    def head(self, states_ND: Tensor, targets_N: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Compute the outputs of the N requested tokens, each tensor `[N, ...]`.

        Args:
            states_ND: hidden states, `target_shift` tokens before each requested token.
            targets_N: ids of the requested tokens.
        """

    @abstractmethod
    def terms(self, outputs: ModelOutputs) -> T:
        """Put the outputs of `forward` into a record with named fields."""

    def needed(self, batch: TokenBatch) -> Tensor:
        """Return the bool mask `[B, T]` of the tokens to score: all tokens except padding."""
        return torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]

    def collect(self, batch: TokenBatch, passes: Iterator[tuple[list[int], ModelOutputs]]) -> T:
        """Merge the outputs of all micro-batches into the terms of the batch, on the CPU.

        Args:
            passes: row indices of each micro-batch, and the outputs of `forward` for those rows.
        """
        whole = {"values": torch.zeros(batch.tokens.shape)}
        for rows, found in passes:
            for name, part in found._asdict().items():
                if part is not None:
                    out_BT = whole.setdefault(name, torch.zeros(batch.tokens.shape))
                    out_BT[rows, : part.shape[1]] = part.cpu()
        return self.terms(ModelOutputs(**whole))


def last_hidden(backbone: nn.Module, tokens_BT: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Run a backbone without a KV cache; return the states after its last layer, `[B, T, D]`.

    Args:
        arguments: keyword arguments of the backbone; its input, if they contain `inputs_embeds`.
    """
    ids = {} if "inputs_embeds" in arguments else {"input_ids": tokens_BT}
    hidden_BTD = backbone(**ids, use_cache=False, **arguments).last_hidden_state
    assert isinstance(hidden_BTD, Tensor)
    return hidden_BTD
