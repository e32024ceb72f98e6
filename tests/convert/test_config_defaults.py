"""What `config.json` leaves out is what transformers takes; what it cannot mean is refused."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields as fields_of_class
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mcore_adapter.errors import ConfigError, McoreAdapterError
from mcore_adapter.modeling.config import BuildOptions, model_config
from mcore_adapter.models import FAMILIES, fields_of, table_of
from mcore_adapter.models.common import shape_of
from mcore_adapter.models.config import Config, Size, completed
from mcore_adapter.models.defaults import DEFAULTS
from mcore_adapter.models.defaults.vision import SECTIONS, TOWER
from mcore_adapter.models.fields import layer_kinds, rope_parameters
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.hf_classes import default, in_transformers, language_class

DERIVED = {
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "mlp_only_layers",
    "sliding_window",
}
"""Keys whose defaults the classes of transformers change once others are known."""
ROPE = {"rope_theta", "rope_local_base_freq", "rope_parameters", "partial_rotary_factor"}
TOLD_ELSEWHERE = {"partial_rotary_factor", "type"}
FURTHER = {
    "full_attention_interval",
    "sliding_window_pattern",
    "rotary_dim",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
}
"""Keys that the classes take without declaring them."""
LATENT = {"deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"}


class Recording(Config):
    """Notes down which keys are read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def but(self, **changed: Any) -> Config:
        made = Recording({**self, **changed})
        made.read = self.read
        return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_default_is_that_of_the_class_in_transformers(kind: str) -> None:
    theirs = language_class(kind)
    made = theirs()
    declared = {field.name: field.default for field in fields_of_class(theirs)}
    for name, value in DEFAULTS[kind].items():
        if name in ROPE | FURTHER:
            continue
        if name == "num_nextn_predict_layers" and not hasattr(made, name):
            assert value == 0  # the class does not know these layers
            continue
        if name in DERIVED:
            assert declared.get(name) == value, name
        elif name == "tie_word_embeddings":
            assert CONFIG_MAPPING[in_transformers(kind)]().tie_word_embeddings == value
        else:
            assert getattr(made, name) == value, name
    config = completed(default(kind))
    by_kind = made.rope_parameters
    if "full_attention" not in by_kind:
        by_kind = {"full_attention": by_kind}
    for layers, expected in by_kind.items():
        rope = rope_parameters(config, layers)
        given, wanted = (
            {k: v for k, v in each.items() if v is not None and k not in TOLD_ELSEWHERE}
            for each in (rope, expected)
        )
        assert given == wanted
    partial = config.get("partial_rotary_factor")
    assert made.rope_parameters.get("partial_rotary_factor") == partial
    heads = made.hidden_size // made.num_attention_heads
    if kind not in LATENT | {"gemma4_text"}:
        shape = shape_of(config)
        assert shape.head_dim == (getattr(made, "head_dim", None) or heads)
        assert shape.num_kv_heads == made.num_key_value_heads


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_is_described_by_its_type_alone(kind: str) -> None:
    """Published configs of models that see have no `pad_token_id`."""
    made = model_config(default(kind), ParallelSizes(), BuildOptions())
    assert made.pad == language_class(kind)().pad_token_id


@pytest.mark.parametrize("kind", TOWER)
@pytest.mark.parametrize("text", [{}, {"pad_token_id": 3}])
def test_a_padding_token_beside_the_language_model_is_not_its_own(
    kind: str, text: dict[str, Any]
) -> None:
    nested = {"pad_token_id": 7, "text_config": {"num_hidden_layers": 2, **text}}
    theirs = CONFIG_MAPPING[kind](**nested).text_config.pad_token_id
    assert completed({"model_type": kind, **nested})["pad_token_id"] == theirs


def test_the_interval_of_qwen3_next_is_that_of_transformers() -> None:
    kinds = CONFIG_MAPPING["qwen3_next"]().layer_types
    every = DEFAULTS["qwen3_next"]["full_attention_interval"]
    assert [kind == "full_attention" for kind in kinds] == [
        (layer + 1) % every == 0 for layer in range(48)
    ]


@pytest.mark.parametrize("kind", TOWER)
def test_every_default_of_a_tower_is_that_of_the_class_in_transformers(kind: str) -> None:
    made = CONFIG_MAPPING[kind]().vision_config
    for name, value in TOWER[kind].items():
        theirs = getattr(made, name)
        assert (list(theirs) if isinstance(theirs, tuple) else theirs) == value, name


@pytest.mark.parametrize("kind", TOWER)
def test_the_default_sections_of_positions_are_those_of_transformers(kind: str) -> None:
    with torch.device("meta"):
        config = CONFIG_MAPPING[kind](
            text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}
        )
        model = AutoModelForImageTextToText.from_config(config)
    assert model.model.language_model.rotary_emb.mrope_section == SECTIONS[kind]


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("count", [26, 12, 1])
def test_the_windows_of_gemma_are_those_of_transformers(kind: str, count: int) -> None:
    kinds = CONFIG_MAPPING[kind](num_hidden_layers=count).layer_types
    assert kinds == layer_kinds(completed({"model_type": kind, "num_hidden_layers": count}))


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    tables, fields = [], []
    for kind in ("kimi_k2", "deepseek_v3"):
        config = {"model_type": kind, "num_hidden_layers": 4, "q_lora_rank": 7}
        tables.append(table_of(config).params)
        fields.append(fields_of(config))
    assert tables[0] == tables[1]
    assert fields[0] == fields[1]


@pytest.mark.parametrize("kind", FAMILIES)
def test_tables_and_fields_read_only_keys_that_have_a_default(kind: str) -> None:
    """So that no key can be missing for one and not for the other."""
    config = Recording(completed(default(kind)))
    FAMILIES[kind].table(config)
    FAMILIES[kind].fields(config)
    optional = {"sliding_window", "use_sliding_window", "rope_scaling", "rope_parameters"}
    if kind in TOWER:  # `completed` gives the first one; families of language models read the rest
        optional |= {"vision_config", "layer_types", "norm_topk_prob"}
    unknown = config.read - set(DEFAULTS[kind]) - optional - {"model_type"}
    assert not unknown


def test_a_family_has_no_defaults_of_its_own() -> None:
    """`config.get(key, default)` in a family would be a second description of what is missing."""
    for family in FAMILIES.values():
        assert isinstance(family, ModuleType)
        assert "config.get(" not in inspect.getsource(family)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("bias", [None, False, True])
def test_table_and_fields_agree_on_what_attention_has(kind: str, bias: bool | None) -> None:
    config = default(kind)
    if bias is not None:
        config |= {"attention_bias": bias, "qkv_bias": bias}
    if (kind, bias) == ("gemma4_text", True):
        with pytest.raises(ConfigError, match="attention_bias is True, which cannot be built"):
            table_of(config)
        return
    if (bias and kind in LATENT) or (kind, bias) == ("gpt_oss", False):
        with pytest.raises(ConfigError, match=r"attention_bias is .* which cannot be built"):
            fields_of(config)
        return
    fields = fields_of(config)
    rows = {row.op.mcore.partition("self_attention.")[2] for row in table_of(config).params}
    every_linear = bool(fields.config.get("add_bias_linear"))
    assert ("linear_qkv.bias" in rows) == (fields.config["add_qkv_bias"] or every_linear)
    assert ("linear_proj.bias" in rows) == (fields.traits.out_bias or every_linear)
    if not fields.latent:
        normed = fields.config["qk_layernorm"] or fields.traits.wide_qk_norm
        assert ("q_layernorm.weight" in rows) == normed


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"hidden_size": "8"}, "hidden_size is '8', expected a whole number from 1"),
        ({"hidden_size": 8.0}, r"hidden_size is 8\.0, expected a whole number"),
        ({"hidden_size": None}, "hidden_size is None, expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a whole number from 1"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"num_key_value_heads": 3}, "num_attention_heads 32 is no multiple of num_key"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected .* to 10000"),
        ({"num_experts": 10**9}, "num_experts 1000000000 times num_hidden_layers"),
        ({"num_experts": 4, "num_local_experts": 6}, "num_experts is 4 and num_local_experts is 6"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers is '1', expected a list of whole numbers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"hidden_act": ["silu"]}, "hidden_act is .*expected a text"),
        ({"head_dim": []}, r"head_dim is \[\], expected a whole number"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        table_of({"model_type": "qwen3_moe", **changed})
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("kind", [None, 7, ["llama"], {"llama": 1}, "", "\ud800"])
def test_a_model_type_that_is_none_is_refused(kind: object) -> None:
    with pytest.raises(McoreAdapterError, match="is not supported"):
        table_of({"model_type": kind})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "nemotron_h"}, "'nemotron_h' is not supported: the Mamba 2 layers"),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
            "its language model is a qwen3_5_text, which is",
        ),
        ({"model_type": "qwen3_5_txt"}, "did you mean qwen3_5_text?"),
    ],
)
def test_a_model_type_without_a_table_is_refused_with_what_is_known(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(McoreAdapterError, match=re.escape(said)):
        table_of(config)


def test_a_size_tells_what_it_follows_from() -> None:
    heads, width = Size(4, "heads"), Size(8, "width")
    assert (heads * width).label == "heads * width"
    assert (2 * (heads + width)).label == "2 * (heads + width)"
    assert json.dumps([heads * width]) == "[32]"


def test_transformers_is_not_imported_for_it() -> None:
    folder = Path(inspect.getfile(Config)).parent
    assert not [file for file in folder.rglob("*.py") if "import transformers" in file.read_text()]
