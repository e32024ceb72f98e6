"""Models with the head that a role needs: log-probs of a policy, values or scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from roll.algorithms import logprobs
from roll.algorithms.loss_interface import PolicyTerms, ScoreTerms, ValueTerms
from roll.algorithms.teacher_divergence import Comparison, divergences
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import (
    CRITIC,
    REWARD_MODEL,
    Classifier,
    load_causal_lm,
    load_score_model,
    load_value_model,
)
from roll.models.parts import last_mlp
from roll.models.parts.head import split_head, split_value_head
from roll.models.vision.tower import Tower, find_tower
from roll.strategy.training.compiled_logits import compiled_chunks
from roll.strategy.training.token_model import ForwardRequest, ModelOutputs, TokenModel, last_hidden

T = TypeVar("T")


class PolicyModel(TokenModel[PolicyTerms]):
    """A causal LM whose forward pass returns log-probs of given tokens instead of logits.

    Args:
        temperature: divides the logits; above zero.
        chunk_tokens: number of tokens whose logits exist at the same time.
        compared: settings of the divergence from teachers; None if the policy has no teacher.
        tower: vision part of the model; None if it reads no pictures.

    Raises:
        ConfigError: the temperature is not above zero.
    """

    target_shift = 1

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        chunk_tokens: int,
        compared: Comparison | None = None,
        tower: Tower | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tower = tower
        self.last_mlp = last_mlp.find(model)
        self._compared = compared
        # In a tuple, so that the parts are not registered a second time under other names.
        self._parts = split_head(model)
        self._chunks = logprobs.LogitChunks(chunk_tokens, self._parts[1].cap)
        if temperature <= 0:
            raise ConfigError(
                f"temperature {temperature} has no log-probs (greedy); set it above 0 to train"
            )
        self._temperature = temperature

    def compile_layers(self, config: ModelConfig) -> list[nn.Module]:
        """Compile what is read of the logits, too."""
        layers = super().compile_layers(config)
        if layers:
            self._chunks = compiled_chunks(self._chunks)
        return layers

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return last_hidden(self._parts[0], tokens_BT, arguments)

    def head(self, states_ND: Tensor, targets_N: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Compute log-probs, entropy, the divergence from teachers and the sum of squared
        probabilities, each float32 `[N]`."""
        head, own_N = self._parts[1], request.temperatures_N
        logprobs_N, entropy_N, squares_N = logprobs.from_hidden(
            states_ND,
            head.weight_VD,
            head.bias_V,
            targets_N,
            temperature=(self._temperature if own_N is None else own_N) * head.divisor,
            chunks=self._chunks,
            entropy=request.entropy,
            squares=request.squares,
        )
        if request.teacher_outputs is None:
            return ModelOutputs(logprobs_N, entropy_N, squares=squares_N)
        assert self._compared is not None
        divergence_N = divergences(
            states_ND,
            head.weight_VD,
            head.bias_V,
            request.teacher_outputs,
            self._compared,
            divisor=head.divisor,
            chunk_tokens=self._chunks.tokens,
            cap=head.cap,
        )
        return ModelOutputs(logprobs_N, entropy_N, divergence_N, squares_N)

    def terms(self, outputs: ModelOutputs) -> PolicyTerms:
        return PolicyTerms(outputs.values, outputs.entropy, outputs.divergence, outputs.squares)


class ClassifierModel(TokenModel[T]):
    """A Hugging Face classifier with one label, whose output is read at individual tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.last_mlp = last_mlp.find(model)
        self._parts = split_value_head(model)
        head = self._parts[1]
        if type(head) is nn.Linear:
            head.forward = partial(_in_float32, head)  # type: ignore[method-assign]
        # Not registered: it is part of the model.
        object.__setattr__(self, "new_head", head)

    def hidden(self, tokens_BT: Tensor, **arguments: Any) -> Tensor:
        return last_hidden(self._parts[0], tokens_BT, arguments)

    def head(self, states_ND: Tensor, targets_N: Tensor, request: ForwardRequest) -> ModelOutputs:
        """Compute the classifier's output for each state, float32 `[N]`."""
        return ModelOutputs(self._parts[1](states_ND).squeeze(-1).float())


def _in_float32(layer: nn.Linear, states: Tensor) -> Tensor:
    """Return the output of a layer, computed and returned in float32: in bfloat16 a score near 10
    has a step of 1/16, so that scores of siblings would be equal that are not.

    It takes the place of the layer's own `forward`, so that hooks of backends, which bring its
    weights together, still run.
    """
    bias = None if layer.bias is None else layer.bias.float()
    return functional.linear(states.float(), layer.weight.float(), bias)


class ValueModel(ClassifierModel[ValueTerms]):
    """A token classifier whose output is the value of the text before each token."""

    target_shift = 1

    def terms(self, outputs: ModelOutputs) -> ValueTerms:
        return ValueTerms(values_BT=outputs.values)


class ScoreModel(ClassifierModel[ScoreTerms]):
    """A sequence classifier whose output is the score of the text that ends with each token."""

    target_shift = 0

    def terms(self, outputs: ModelOutputs) -> ScoreTerms:
        return ScoreTerms(scores_BT=outputs.values)


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """Loader of policies.

    A policy returns log-probs of `logits / temperature`, computed for `chunk_tokens` tokens at a
    time. Rows of a batch with `temperatures` have these instead.
    """

    temperature: float
    chunk_tokens: int
    compared: Comparison | None = None
    """Settings of the divergence from teachers; None if the policy has no teacher."""

    def load(
        self, model: ModelConfig, dtype: torch.dtype, *, deferred: bool = False
    ) -> PolicyModel:
        loaded = load_causal_lm(model, dtype=dtype, deferred=deferred)
        return PolicyModel(
            loaded,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            compared=self.compared,
            tower=find_tower(loaded, model),
        )


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Loader of critics."""

    classifier: ClassVar[Classifier] = CRITIC

    def load(self, model: ModelConfig, dtype: torch.dtype, *, deferred: bool = False) -> ValueModel:
        return ValueModel(load_value_model(model, dtype=dtype, deferred=deferred))


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Loader of reward models."""

    classifier: ClassVar[Classifier] = REWARD_MODEL

    def load(self, model: ModelConfig, dtype: torch.dtype, *, deferred: bool = False) -> ScoreModel:
        return ScoreModel(load_score_model(model, dtype=dtype, deferred=deferred))


class Head(Protocol[T]):
    """Loader of a model with a given kind of head. `T` is the type of the model's results."""

    def load(
        self, model: ModelConfig, dtype: torch.dtype, *, deferred: bool = False
    ) -> TokenModel[T]:
        """Load the model on the CPU, with parameters of `dtype`.

        Args:
            deferred: leave parameters in the files, where that is possible: they are `Deferred`.
        """
        ...
