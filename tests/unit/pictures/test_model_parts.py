"""Parts of models that see: frozen, and with adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from roll.config.frozen import part_of
from roll.config.sections.model import LoraConfig, ModelConfig, ModelPart
from roll.core.errors import ConfigError
from roll.models import lora
from roll.models.load import load_causal_lm
from roll.models.trained import select_trained
from roll.models.vision.parts import FAMILIES
from tests.tiny import save_tiny_model, tiny_qwen3
from tests.vision_models import make_vision_model, save_vision_model, seen_row

BY_HAND = {
    "vision": ("patch_embed", "pos_embed", "blocks"),
    "projector": ("merger", "deepstack_merger_list"),
}
"""Modules below `visual` of each part."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def test_every_parameter_belongs_to_the_part_it_is_in(family: str) -> None:
    model = make_vision_model(family)
    found: dict[str, set[int]] = {"vision": set(), "projector": set(), "language": set()}
    for name, parameter in model.named_parameters():
        found[part_of(name)].add(id(parameter))
    for part, modules in BY_HAND.items():
        inside = [getattr(model.model.visual, each, None) for each in modules]
        wanted = {id(p) for module in inside if module is not None for p in module.parameters()}
        assert found[part] == wanted
    language = {*model.model.language_model.parameters(), *model.lm_head.parameters()}
    assert found["language"] == {id(p) for p in language}


@pytest.mark.parametrize("parts", [("vision",), ("vision", "projector"), ("language",)])
def test_frozen_parts_get_no_gradients(family: str, parts: tuple[ModelPart, ...]) -> None:
    model = make_vision_model(family)
    config = ModelConfig(path="unused", freeze=parts)
    select_trained(model, config, trainable=True, new_head=None, seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (part_of(name) not in parts), name


def test_nothing_is_trained_of_a_model_that_only_scores(family: str) -> None:
    model = make_vision_model(family)
    select_trained(model, ModelConfig(path="unused"), trainable=False, new_head=None, seed=0)
    assert not any(p.requires_grad for p in model.parameters())


def test_freezing_everything_or_parts_that_a_model_lacks_is_refused() -> None:
    whole = ModelConfig(path="unused", freeze=("vision", "projector", "language"))
    with pytest.raises(ConfigError, match="all parameters of the model, so nothing is trained"):
        select_trained(make_vision_model("qwen2_vl"), whole, trainable=True, new_head=None, seed=0)
    vision = ModelConfig(path="unused", freeze=("vision",))
    with pytest.raises(ConfigError, match="model type 'qwen3' is not divided into vision"):
        select_trained(tiny_qwen3(), vision, trainable=True, new_head=None, seed=0)
    everywhere = ModelConfig(path="unused", lora=LoraConfig(parts=("vision", "language")))
    with pytest.raises(ConfigError, match=r"model\.lora\.parts: .* is not divided"):
        select_trained(tiny_qwen3(), everywhere, trainable=True, new_head=None, seed=0)


@pytest.mark.parametrize("targets", ["all-linear", ("gate_proj", "q_proj")])
def test_adapters_are_in_the_language_model_alone(
    targets: str | tuple[str, ...],
) -> None:
    model = make_vision_model("qwen2_5_vl")  # its tower has layers called gate_proj, too
    lora.insert_adapter(model, LoraConfig(rank=2, targets=targets))  # type: ignore[arg-type]
    adapted = {name.removesuffix(".weight") for name in lora.deltas(model)}
    per_layer = 7 if targets == "all-linear" else 2
    assert len(adapted) == per_layer * 2
    assert {part_of(name) for name in adapted} == {"language"}
    assert "lm_head" not in adapted


def test_adapters_are_in_other_parts_where_they_are_asked_for() -> None:
    model = make_vision_model("qwen2_5_vl")
    lora.insert_adapter(model, LoraConfig(rank=2, parts=("projector",)))
    assert {part_of(name) for name in lora.deltas(model)} == {"projector"}
    model, settings = (
        make_vision_model("qwen2_5_vl"),
        LoraConfig(parts=("vision",), targets=("q_proj",)),
    )
    with pytest.raises(ConfigError, match="no linear layer is called 'q_proj'"):
        lora.insert_adapter(model, settings)


def test_peft_loads_an_adapter_of_the_language_model_alone(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path / "model", "qwen2_5_vl")
    model = load_causal_lm(ModelConfig(path=str(path)))
    settings = LoraConfig(rank=2, targets=("gate_proj", "q_proj"))
    lora.insert_adapter(model, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    factors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    lora.save(tmp_path / "adapter", factors, settings, model, str(path))
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert all(name.startswith("model.language_model.") for name in told["target_modules"])
    base = AutoModelForImageTextToText.from_pretrained(path)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    row = seen_row("qwen2_5_vl")
    with torch.no_grad():
        inputs = row.forward_inputs(row.tokens)
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
    assert not [name for name, _ in again.named_parameters() if "visual" in name and "lora" in name]


def test_a_text_model_needs_no_parts(tmp_path: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(save_tiny_model(tmp_path / "text"))))
    lora.insert_adapter(model, LoraConfig(rank=2))
    assert len(lora.deltas(model)) == 14
