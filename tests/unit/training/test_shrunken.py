"""Small models of every family: few parameters, every kind of layer, and a whole forward pass."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mcore_adapter.models import FAMILIES
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.load import load_causal_lm
from roll.models.shrunken import shrunken_values, write_shrunken
from roll.models.vision.parts import sees
from tests.tiny import save_tiny_model

SAME_AS = {"kimi_k2": "deepseek_v3"}


def published(kind: str) -> dict[str, Any]:
    """The config of a family with the sizes that transformers gives it by default, and with the
    sections of positions that published models of it have."""
    found = dict(CONFIG_MAPPING[SAME_AS.get(kind, kind)]().to_dict())
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        found["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    return found


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_small_model_of_a_family_computes_and_learns(kind: str) -> None:
    whole = published(kind)
    values = shrunken_values(whole)
    assert values["model_type"] == whole["model_type"]
    assert "quantization_config" not in shrunken_values(
        whole | {"quantization_config": {"bits": 4}}
    )
    text = values.get("text_config", values)
    text["vocab_size"] = 97  # only so that the test is quick
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = 97
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        text[name] = values[name] = None
    config = type(CONFIG_MAPPING[SAME_AS.get(kind, kind)]()).from_dict(values)
    torch.manual_seed(0)
    if sees(config):
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 2e6
    tokens = torch.randint(3, 97, (2, 12))
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    assert logits.shape == (2, 12, 97)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert abs(loss.item() - math.log(97)) < 1.5
    old = whole.get("text_config", whole).get("layer_types")
    if old:
        assert set(text["layer_types"]) == set(old), "every kind of layer is there"


def test_what_lies_beside_the_weights_is_kept_and_no_weight_is_read(tmp_path: Path) -> None:
    source = tmp_path / "large"
    save_tiny_model(source)
    (source / "templates").mkdir()
    (source / "templates" / "a.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_bytes(b"no weights")
    (source / "original").mkdir()
    for name in ("original/consolidated.00.pth", "model.onnx"):
        (source / name).write_bytes(b"no weights")
    target = tmp_path / "small"
    target.mkdir()
    write_shrunken(ModelConfig(path=str(source)), target)
    assert (
        AutoConfig.from_pretrained(target).vocab_size
        == AutoConfig.from_pretrained(source).vocab_size
    )
    assert load_causal_lm(ModelConfig(path=str(target))).num_parameters() > 0
    for name in ("tokenizer.json", "tokenizer_config.json", "templates/a.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "original" / "consolidated.00.pth").exists()
    assert not (target / "model.onnx").exists()
    written = json.loads((target / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"]


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": None, "model_type": "bert_generation_x"}))
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        write_shrunken(ModelConfig(path=str(tmp_path)), tmp_path / "small")
