"""Which matrices FSDP2's tensor parallel ranks share, and models that cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from roll.config.sections.model import LoraConfig
from roll.core.errors import ConfigError
from roll.models import lora
from roll.strategy.fsdp2.tensor_parallel import plan
from tests.tiny import tiny_qwen3, tiny_qwen3_moe

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama(**sizes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL | {"intermediate_size": 96} | sizes))


def adapted() -> PreTrainedModel:
    model = llama()
    lora.insert_adapter(model, LoraConfig(rank=2))
    return model


def test_rows_and_columns_of_attention_and_mlp_are_cut() -> None:
    found = plan(tiny_qwen3(layers=2), 2)
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns = (*attention, "mlp.gate_proj", "mlp.up_proj")
    want = {f"layers.{i}.{name}": "colwise" for i in range(2) for name in columns}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    assert found == want | {f"layers.{i}.{name}": "rowwise" for i in range(2) for name in rows}


@pytest.mark.parametrize(
    ("make", "ranks", "says"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1)), 2, "'gpt2' is empty.*kind: megatron"),
        (tiny_qwen3_moe, 2, "'qwen3_moe' asks for moe_tp_experts"),
        (
            lambda: Phi3ForCausalLM(Phi3Config(**SMALL, intermediate_size=96)),
            2,
            "'phi3' asks for colwise_gather_output, rowwise_split_input",
        ),
        (
            lambda: ApertusForCausalLM(ApertusConfig(**SMALL, intermediate_size=96)),
            2,
            "says nothing of layers.0.mlp.act_fn",
        ),
        (adapted, 2, r"self_attn.q_proj is a peft.*Linear; only plain linear layers.*model\.lora"),
        (llama, 3, "16 rows of layers.0.self_attn.k_proj.*do not divide over 3 ranks"),
        (lambda: llama(num_key_value_heads=3), 2, "3 key and value heads.*do not divide"),
        (lambda: llama(intermediate_size=97), 2, "97 rows of layers.0.mlp.gate_proj"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(make: Any, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"tp: .*{says}"):
        plan(make(), ranks)
