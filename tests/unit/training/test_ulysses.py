"""Models whose rows cannot be cut into slices are refused when they are built."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from roll.core.errors import ConfigError
from roll.models import ulysses

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options))


def linear() -> PreTrainedModel:
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **heads))


def recurrent() -> PreTrainedModel:
    sizes = {k: v for k, v in SMALL.items() if k != "head_dim"} | {"lru_width": 48}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes))


def stretched() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return llama(rope_parameters=rope)


def flash() -> PreTrainedModel:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "ranks", "says"),
    [
        (linear, 2, "layers of kind .*linear_attention"),
        (recurrent, 2, "layers of kind convolution"),
        (lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2)), 2, "sinks"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), 2, "attn_logit_softcapping"),
        (stretched, 2, "type dynamic, which depend on how long a row is"),
        (flash, 2, "flash_attention_2, which takes no slices"),
        (llama, 4, "6 attention heads, which 4 ranks cannot share evenly"),
        (llama, 3, "2 key and value heads: 3 ranks can neither share nor repeat them"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(make: Any, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"ulysses: model type.*{says}.*leave out `ulysses`"):
        ulysses.enable(make(), ranks)


@pytest.mark.parametrize("ranks", [2, 6])
def test_a_model_whose_key_heads_are_shared_or_repeated_is_taken(ranks: int) -> None:
    model = llama()
    ulysses.enable(model, ranks)
    assert model.config._attn_implementation == ulysses.ATTENTION
