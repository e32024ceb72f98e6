"""Checkpoints of models that see: their names, their formats, their configs, their adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from mcore_adapter.convert import commands
from mcore_adapter.convert.lora_table import Lora, adapter_table, target_modules
from mcore_adapter.errors import ConfigError, UnknownModelError
from mcore_adapter.load import table_in
from mcore_adapter.models import fields_of, table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert import tiny_models
from tests.convert.hf_classes import TOWERS, config_of, loaded, model_of
from tests.convert.lora_by_hand import PREFIX, SCALE, Adapted, save_adapter
from tests.convert.tiny_checkpoints import (
    ALONE,
    COMMON,
    FAMILIES,
    assert_same,
    by_transformers,
    contents,
    rewrite,
    there_and_back,
)
from tests.tiny import char_tokenizer

README = Path(__file__).parents[2] / "mcore_adapter" / "README.md"
CUT = ParallelSizes(tp=2, pp=2)
EXPERTS = ParallelSizes(tp=2, pp=2, ep=2, etp=1)
SECTIONS = {"mrope_section": [1, 1, 2]}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_files_named_after_modules_hold_the_same_model(kind: str, tmp_path: Path) -> None:
    """And each comes back under the names it came with."""
    model = model_of(config_of(kind, COMMON))
    model.save_pretrained(tmp_path / "files")
    model.save_pretrained(tmp_path / "modules", save_original_format=False)
    names = {which: list(contents(tmp_path / which)) for which in ("files", "modules")}
    assert {"visual.merger.ln_q.weight", "model.norm.weight"} <= set(names["files"])
    renamed = {"model.visual.merger.ln_q.weight", "model.language_model.norm.weight"}
    assert renamed <= set(names["modules"])
    for which in names:
        commands.to_mcore(tmp_path / which, tmp_path / which / "cut", CUT, ALONE)
        commands.to_hf(tmp_path / which / "cut", tmp_path / which / "back", ALONE)
        assert_same(tmp_path / which, tmp_path / which / "back")
    assert_same(tmp_path / "files" / "cut", tmp_path / "modules" / "cut")


@pytest.mark.parametrize("width", [16, 24, 32])
def test_experts_as_published_and_as_saved_are_the_same_experts(width: int, tmp_path: Path) -> None:
    """Published are `[in, out]`. At 16 gate and up are as wide as the model, at 32 down is."""
    family = {**FAMILIES["qwen3_vl_moe"], "moe_intermediate_size": width}
    saved = tmp_path / "saved"
    model_of(config_of("qwen3_vl_moe", {**COMMON, **family})).save_pretrained(saved)
    tensors = contents(saved)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    published = rewrite(saved, tmp_path / "published", tensors)
    for src in (saved, published):
        commands.to_mcore(src, src / "cut", EXPERTS, ALONE)
        commands.to_mcore(src / "cut", src / "moved", ParallelSizes(ep=4), ALONE)
        commands.to_hf(src / "moved", src / "back", ALONE)
        assert_same(src, src / "back")
        theirs, shapes = loaded(src, dtype=torch.float32), table_in(src)
        assert shapes.fused == (src is saved)
        assert theirs.config.model_type == "qwen3_vl_moe"
    assert_same(saved / "cut", published / "cut")


def test_every_tensor_parallel_rank_of_the_first_stage_holds_the_tower(tmp_path: Path) -> None:
    src = by_transformers(tmp_path / "src", "qwen3_vl")
    commands.to_mcore(src, tmp_path / "cut", CUT, ALONE)
    found = contents(tmp_path / "cut")
    for name, tensor in contents(src).items():
        if name.startswith("model.visual."):
            copies = {k: v for k, v in found.items() if k.endswith(name.removeprefix("model."))}
            files = {key.partition(":")[0] for key in copies}
            assert files == {f"dense-pp0-tp{rank}.safetensors" for rank in (0, 1)}
            assert all(torch.equal(copy, tensor) for copy in copies.values())


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [False, True])
def test_early_configs_have_the_keys_of_the_language_model_at_the_top(
    kind: str, tied: bool
) -> None:
    nested = config_of(kind, {**COMMON, "tie_word_embeddings": tied}).to_dict()
    text = nested["text_config"]
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    flat = {k: v for k, v in nested.items() if k != "text_config"}
    others = ("model_type", "rope_parameters", "tie_word_embeddings")
    flat |= {k: v for k, v in text.items() if k not in others}
    flat |= {"rope_theta": 77.0, "rope_scaling": rope}
    theirs = {"rope_theta": 77.0, "rope_type": "default", "mrope_section": [1, 1, 2]}
    nested["text_config"] = {**text, "rope_parameters": theirs}
    assert table_of(flat).params == table_of(nested).params
    assert fields_of(flat) == fields_of(nested)
    before_5 = {**nested, "text_config": {**text, "tie_word_embeddings": tied}}
    del before_5["tie_word_embeddings"]
    assert table_of(before_5).shape.tied == tied


@pytest.mark.parametrize(
    ("kind", "text", "tower", "match"),
    [
        (
            "qwen2_vl",
            {},
            {"depth": 0},
            r"vision_config\.depth is 0, expected a whole number from 1",
        ),
        ("qwen2_vl", {}, {"depth": 10**6}, r"vision_config\.depth is 1000000, .* to 10000"),
        ("qwen3_vl", {}, {"patch_size": [2, 2]}, r"vision_config\.patch_size is \[2, 2\]"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": "0"}, "indexes is '0', expected a list"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": [3]}, r"\[3\], expected rising numbers of"),
        ("qwen3_vl", {}, {"deepstack_visual_indexes": [1, 0]}, r"\[1, 0\], expected rising"),
        ("qwen2_vl", {"mrope_section": [1, 1]}, {}, "expected three numbers that add up to 4"),
        ("qwen2_5_vl", {"mrope_section": [2, 2, 2]}, {}, "expected three numbers that add up to 4"),
        ("qwen2_vl", {**SECTIONS, "mrope_interleaved": True}, {}, "mrope_interleaved is True"),
        ("qwen3_vl", {**SECTIONS, "mrope_interleaved": False}, {}, "mrope_interleaved is False"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(
    kind: str, text: dict[str, Any], tower: dict[str, Any], match: str
) -> None:
    config = config_of(kind, COMMON).to_dict()
    rope = {"rope_type": "default", "rope_theta": 10.0, **SECTIONS, **text}
    config["text_config"] |= {"rope_parameters": rope, "head_dim": 8}
    config["vision_config"] |= tower
    with pytest.raises(ConfigError, match=match):
        fields_of(config)


@pytest.mark.parametrize("kind", TOWERS)
def test_a_value_that_is_no_object_is_refused(kind: str) -> None:
    for name in ("text_config", "vision_config"):
        with pytest.raises(ConfigError, match=f"{name} is 8, expected an object"):
            table_of({"model_type": kind, name: 8})


@pytest.mark.parametrize("kind", TOWERS)
def test_an_adapter_of_all_linear_layers_leaves_the_tower_out(kind: str) -> None:
    """Also where PEFT reads `adapter_config.json`: the names that its pattern matches."""
    config = config_of(kind, {**COMMON, **FAMILIES[kind]})
    with torch.device("meta"):
        model = model_of(config)
    lora = Lora(rank=2, alpha=2.0)
    adapter = adapter_table(table_of(config.to_dict()), lora)
    factors = {
        name.replace("*", str(layer)).removeprefix(PREFIX).partition(".lora_")[0]
        for row in adapter.params
        for name in row.op.hf
        for layer in range(4)
    }
    pattern = target_modules(adapter, lora)
    assert isinstance(pattern, str)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    language = {name for name in linear if name.startswith("model.language_model.layers.")}
    if kind == "qwen3_vl_moe":
        language = {name for name in language if ".self_attn." in name}
    assert {name for name in linear if re.fullmatch(pattern, name)} == factors == language


@pytest.mark.parametrize("which", ["files", "modules"])
def test_an_adapter_named_after_modules_or_files_is_converted_and_merged(
    which: str, tmp_path: Path
) -> None:
    """transformers before 5 named modules as it named tensors in files."""
    src = by_transformers(tmp_path / "src", "qwen2_vl")
    model, factors = adapted_queries(src)
    if which == "files":
        factors = {name.replace(".language_model", ""): t for name, t in factors.items()}
    peft = save_adapter(tmp_path / "peft", factors, ["q_proj"])
    commands.to_mcore(peft, tmp_path / "cut", CUT, ALONE, base=src)
    commands.to_hf(tmp_path / "cut", tmp_path / "back", ALONE)
    assert_same(peft, tmp_path / "back")
    commands.to_mcore(src, tmp_path / "model", CUT, ALONE)
    commands.to_hf(tmp_path / "model", tmp_path / "merged", ALONE, adapter=peft, merge=True)
    merged, base = contents(tmp_path / "merged"), contents(src)
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        torch.testing.assert_close(merged.pop(name), model[name])
        del base[name]
    assert all(torch.equal(merged[name], base[name]) for name in base)


def adapted_queries(folder: Path) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """Merged weights under their names in files, and random factors under those of modules."""
    tensors, generator = contents(folder), torch.Generator().manual_seed(5)
    merged: dict[str, Tensor] = {}
    factors: dict[str, nn.Parameter] = {}
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_proj"
        weight = tensors[f"{name}.weight"]
        made = Adapted(nn.Linear(weight.shape[1], weight.shape[0], bias=False), generator)
        module = name.replace("model.", f"{PREFIX}model.language_model.", 1)
        factors |= {f"{module}.lora_A.weight": made.A, f"{module}.lora_B.weight": made.B}
        merged[f"{name}.weight"] = weight + SCALE * (made.B @ made.A).detach()
    return merged, factors


def test_the_config_in_a_layout_is_that_of_the_folder(tmp_path: Path) -> None:
    src = by_transformers(tmp_path / "src", "qwen3_vl")
    commands.to_mcore(src, tmp_path / "cut", CUT, ALONE)
    theirs = json.loads((src / "config.json").read_text())
    assert json.loads((tmp_path / "cut" / "config.json").read_text()) == theirs


CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {**TOWERS["qwen3_vl"], "depth": 1}),
    "qwen3_5_moe": ("qwen3_5_moe", {**TOWERS["qwen3_vl"], "depth": 1}),
    "gemma3": ("gemma3", {**CLIP, "model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4", {**CLIP, "num_key_value_heads": 2, "head_dim": 8}),
    "mistral3": ("ministral3", {**CLIP, "model_type": "pixtral", "head_dim": 8}),
}
"""By model type, its language model in `tiny_models.MODELS`, and its tower."""


@pytest.mark.parametrize("kind", BESIDE)
def test_the_readme_takes_a_language_model_from_beside_a_tower(kind: str, tmp_path: Path) -> None:
    text, tower = BESIDE[kind]
    # The class of gemma3 with a tower does not bound logits.
    language = {**tiny_models.COMMON, **tiny_models.MODELS[text], "final_logit_softcapping": None}
    own: dict[str, dict[str, Any]] = {
        "gemma3": {"mm_tokens_per_image": 1},
        "gemma4": {"audio_config": None},
    }
    config = AutoConfig.for_model(
        kind,
        text_config=language,
        vision_config=tower,
        tie_word_embeddings=language["tie_word_embeddings"],
        **own.get(kind, {}),
    )
    src, dst = tmp_path / "src", tmp_path / "dst"
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(src)
    char_tokenizer().save_pretrained(src)
    with pytest.raises(UnknownModelError, match="Families of mcore_adapter/README"):
        commands.to_mcore(src, tmp_path / "refused", ParallelSizes(), ALONE)
    (code,) = re.findall(r"```python\n(import torch.*?)```", README.read_text(), re.DOTALL)
    exec(code.replace('"SRC"', repr(str(src))).replace('"DST"', repr(str(dst))), {})
    assert_same(dst, there_and_back(dst, tmp_path, ParallelSizes()))
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
        torch.testing.assert_close(loaded(dst).eval()(input_ids=tokens).logits, expected)
