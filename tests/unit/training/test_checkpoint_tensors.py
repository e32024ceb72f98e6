"""What leaves a model, and enters it, is what its checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from roll.config.sections.model import LoraConfig
from roll.core.errors import ConfigError
from roll.models import lora
from roll.models.checkpoint_tensors import CheckpointLayout, copy_into_model
from roll.strategy import tensor_names as names
from roll.strategy.hf.memory import WeightMemory
from roll.weight_sync.manifest import meta_of
from tests.families import FAMILIES, WITH_VISION, make, save

EVERY = sorted({**FAMILIES, **WITH_VISION})


def loaded(folder: Path) -> PreTrainedModel:
    vision = folder.name in WITH_VISION
    factory = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model: PreTrainedModel = factory.from_pretrained(folder)
    return model


def own_tensors(model: PreTrainedModel) -> tuple[CheckpointLayout, dict[str, torch.Tensor]]:
    own = {name: value.detach() for name, value in names.distinct(model)}
    return names.saved(model, lambda value: value.shape), own


@pytest.mark.parametrize("name", EVERY)
def test_what_leaves_is_what_save_pretrained_writes(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / name, name)
    files = load_file(folder / "model.safetensors")
    for model in (make(name), loaded(folder)):
        saved, own = own_tensors(model)
        found = {
            tensor.name: value
            for bundle in saved.bundles
            for tensor, value in zip(bundle.saved, saved.to_checkpoint(bundle, own), strict=True)
        }
        assert found.keys() == files.keys()
        for key, value in files.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)
        shapes = {t.name: tuple(t.shape) for bundle in saved.bundles for t in bundle.saved}
        assert shapes == {key: tuple(value.shape) for key, value in files.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_what_a_checkpoint_holds_enters_a_model_as_from_pretrained_loads_it(
    tmp_path: Path, name: str
) -> None:
    folder = save(tmp_path / name, name)
    model, expected = loaded(folder), loaded(folder)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    memory = WeightMemory(model)
    files = load_file(folder / "model.safetensors")
    assert memory.shapes.keys() - memory.optional == files.keys() - memory.optional
    places = memory.places()
    for key, value in files.items():
        place = places.place(meta_of(key, value))
        places.take(key, value if place is None else place.copy_(value))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, msg=key)


def test_experts_leave_from_where_they_lie() -> None:
    """So those of a model that is sharded are not gathered."""
    saved, own = own_tensors(make("qwen3_moe"))
    assert all(bundle.are_runs for bundle in saved.bundles)
    bundle = next(b for b in saved.bundles if b.sources[0].endswith("experts.gate_up_proj"))
    parts = list(saved.to_checkpoint(bundle, own))
    storage = own[bundle.sources[0]].untyped_storage().data_ptr()
    assert all(part.untyped_storage().data_ptr() == storage for part in parts)
    assert [t.first for t in bundle.saved] == sorted(t.first or 0 for t in bundle.saved)


def test_what_is_transposed_or_joined_on_the_way_leaves_and_enters_too() -> None:
    model = make("llama")
    model._weight_conversions = [  # as `from_pretrained` notes them
        WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        WeightConverter(
            "mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]
        ),
    ]
    saved, own = own_tensors(model)
    expected = revert_weight_conversion(model, dict(own))
    others = [bundle for bundle in saved.bundles if not bundle.are_runs]
    assert sorted(len(bundle.sources) for bundle in others) == [1, 1, 2, 2]
    found = {
        tensor.name: value
        for bundle in saved.bundles
        for tensor, value in zip(bundle.saved, saved.to_checkpoint(bundle, own), strict=True)
    }
    assert "model.layers.0.mlp.gate_up.weight" in found
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    empty = {name: torch.zeros_like(value) for name, value in own.items()}
    for bundle in others:
        elements = saved.elements(bundle, {name: own[name].shape for name in bundle.sources})
        for tensor in bundle.saved:
            copy_into_model(bundle, elements[tensor.name], found[tensor.name], empty)
        assert all(torch.equal(empty[name], own[name]) for name in bundle.sources)


def test_a_push_asks_a_model_once_for_its_tensors_and_a_bundle_once_for_its_elements() -> None:
    class ForwardRequest(LlamaForCausalLM):
        asked = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            self.asked += 1
            found: dict[str, Any] = super().state_dict(*args, **kwargs)
            return found

    class Counted(Chunk):
        converted = 0

        def convert(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            Counted.converted += 1
            found: dict[str, torch.Tensor] = super().convert(*args, **kwargs)
            return found

    class Joined(Concatenate):
        @property
        def reverse_op(self) -> Counted:
            return Counted(self.dim)

    model = ForwardRequest(make("llama").config)
    halves = ["mlp.left.weight", "mlp.right.weight"]
    model._weight_conversions = [WeightConverter(halves, "mlp.down_proj.weight", [Joined(dim=1)])]
    memory = WeightMemory(model)
    values = {name: torch.randn(shape) for name, shape in memory.shapes.items()}
    asked, converted = model.asked, Counted.converted
    places = memory.places()
    for name, value in values.items():
        place = places.place(meta_of(name, value))
        places.take(name, value if place is None else place.copy_(value))
    assert model.asked == asked + 1
    layers = model.config.num_hidden_layers
    assert Counted.converted == converted + layers
    for number in range(layers):
        name = f"model.layers.{number}.mlp."
        whole = torch.cat([values[f"{name}{side}.weight"] for side in ("left", "right")], dim=1)
        assert torch.equal(model.get_parameter(f"{name}down_proj.weight"), whole)


def test_an_adapter_of_experts_is_refused_and_one_of_attention_leaves_whole() -> None:
    with pytest.raises(ConfigError, match=r"name linear layers, such as \[q_proj"):
        lora.insert_adapter(make("qwen3_moe"), LoraConfig(rank=2))
    model = make("qwen3_moe")
    lora.insert_adapter(model, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    adapted = lora.deltas(model)
    assert adapted.keys() <= dict(names.distinct(model)).keys()
    factors = {id(p) for delta in adapted.values() for p in (delta.a_RI, delta.b_OR)}
    assert factors == {id(parameter) for _, parameter in names.trained(model)}
