"""LoRA adapters in PEFT format: through layouts and back, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.storage.peft import open_peft
from mcore_adapter.convert.storage.tensor_file import read_header
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.tiny_checkpoints import ALONE, assert_same, contents, numbered, write

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "vocab_size": 5,
    "tie_word_embeddings": False,
    "num_experts": 0,
}
MOE = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12}
RANK, ALPHA = 3, 6
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYOUTS = [ParallelSizes(), ParallelSizes(tp=2), ParallelSizes(tp=2, pp=2, layers=(0, 2))]


def model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    shapes = {k: v.shape for k, v in contents(numbered(folder, config)).items()}
    return write(folder, config, {k: torch.randn(v).to(dtype) for k, v in shapes.items()})


def adapter(folder: Path, base: Path, modules: tuple[str, ...], **options: Any) -> Path:
    """What PEFT writes for `LoraConfig(r=3, lora_alpha=6, target_modules=modules)`."""
    tensors = {}
    for name, weight in contents(base).items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, weight.shape[1])
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], RANK)
    write(folder, {}, tensors)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(modules),
        **options,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "modules", [ALL, ("q_proj", "v_proj"), ("k_proj", "down_proj"), ("up_proj", "lm_head")]
)
def test_an_adapter_comes_back_byte_for_byte(
    sizes: ParallelSizes, modules: tuple[str, ...], tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, modules)
    commands.to_mcore(peft, tmp_path / "mcore", sizes, ALONE)
    commands.to_mcore(tmp_path / "mcore", tmp_path / "moved", ParallelSizes(tp=4, pp=2), ALONE)
    for layout in ("mcore", "moved"):
        commands.to_hf(tmp_path / layout, tmp_path / f"from {layout}", ALONE)
        assert_same(peft, tmp_path / f"from {layout}")
        assert sorted(p.name for p in (tmp_path / f"from {layout}").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]


def test_experts_have_adapters_of_their_own(tmp_path: Path) -> None:
    base = model(tmp_path / "base", MOE)
    peft = adapter(tmp_path / "peft", base, ALL)
    commands.to_mcore(peft, tmp_path / "mcore", ParallelSizes(tp=2, pp=2, ep=2, etp=1), ALONE)
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.lora_B.weight"
    assert contents(tmp_path / "mcore")[f"experts-pp1-ep1-etp0.safetensors:{name}"].any()
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    assert_same(peft, tmp_path / "back")


@pytest.mark.parametrize("modules", [ALL, ("q_proj", "v_proj"), ("up_proj",)])
def test_the_factors_of_every_shard_make_the_shard_of_the_product(
    modules: tuple[str, ...], tmp_path: Path
) -> None:
    """B A of a rank is what the layout of the full product B A gives that rank."""
    base = model(tmp_path / "base", CONFIG)
    peft = contents(adapter(tmp_path / "peft", base, modules))
    commands.to_mcore(tmp_path / "peft", tmp_path / "factors", ParallelSizes(tp=2), ALONE)
    weights = contents(base)
    products = {name: product(peft, name, weights[name]) for name in weights}
    write(tmp_path / "products", CONFIG, products)
    commands.to_mcore(tmp_path / "products", tmp_path / "expected", ParallelSizes(tp=2), ALONE)
    factors, expected = contents(tmp_path / "factors"), contents(tmp_path / "expected")
    checked = 0
    for name, a in factors.items():
        if ".lora_A." in name:
            b = factors[name.replace("lora_A", "lora_B")]
            torch.testing.assert_close(b @ a, expected[name.replace("lora_A.", "")])
            checked += 1
    assert checked == len(factors) // 2 > 0


def product(peft: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{prefix}.lora_A.weight" not in peft:
        return torch.zeros_like(weight, dtype=torch.float32)
    return peft[f"{prefix}.lora_B.weight"] @ peft[f"{prefix}.lora_A.weight"]


@pytest.mark.parametrize("through_mcore", [False, True])
@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 1}}, None),
    ],
)
def test_merging_adds_the_scaled_product(
    options: dict[str, Any], scale: float | None, through_mcore: bool, tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG, torch.bfloat16)
    path = adapter(tmp_path / "peft", base, ALL, **options)
    peft = contents(path)
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(tp=2, pp=2), ALONE)
    if through_mcore:
        commands.to_mcore(path, tmp_path / "adapter", ParallelSizes(tp=2), ALONE)
        path = tmp_path / "adapter"
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE, adapter=path, merge=True)
    merged = contents(tmp_path / "back")
    for name, weight in contents(base).items():
        of_name = scale or (1 if "q_proj" in name else ALPHA) / RANK
        expected = (weight.double() + of_name * product(peft, name, weight).double()).bfloat16()
        # bf16 has 8 bits: one unit in the last place where fp32 rounds to the other side
        torch.testing.assert_close(merged[name], expected, rtol=2**-7, atol=1e-6)
        changed = name.removesuffix(".weight").endswith(ALL)
        assert torch.equal(merged[name], weight) is not changed, name


def test_an_adapter_apart_lies_beside_the_weights(tmp_path: Path) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, ALL)
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(tp=2), ALONE)
    commands.to_mcore(peft, tmp_path / "adapter", ParallelSizes(tp=2), ALONE)
    for path in (peft, tmp_path / "adapter"):
        dst = tmp_path / f"with {path.name}"
        commands.to_hf(tmp_path / "mcore", dst, ALONE, adapter=path)
        assert_same(base, dst)
        assert_same(peft, dst / "adapter")


def test_an_adapter_that_was_trained_on_fused_weights_shares_its_a(tmp_path: Path) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, ("q_proj", "k_proj", "v_proj"))
    tensors = contents(peft)
    for name in tensors:
        if "lora_A" in name:  # as training on the fused weight has it
            tensors[name] = tensors[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")]
    layout = tmp_path / "mcore"
    commands.to_mcore(peft, layout, ParallelSizes(), ALONE)
    meta = json.loads((layout / "mcore.json").read_text())
    fused = {}
    for layer in range(2):
        at = f"decoder.layers.{layer}.self_attention.linear_qkv."
        hf = f"base_model.model.model.layers.{layer}.self_attn."
        meta["adapter"][at + "weight"]["ranks"] = [RANK]
        fused[at + "lora_A.weight"] = tensors[hf + "q_proj.lora_A.weight"].clone()
        rows = []
        for group in range(2):
            for kind, heads in (
                ("q", (2 * group, 2 * group + 1)),
                ("k", (group,)),
                ("v", (group,)),
            ):
                b = tensors[f"{hf}{kind}_proj.lora_B.weight"]
                rows += [b[head * 4 : head * 4 + 4] for head in heads]
        fused[at + "lora_B.weight"] = torch.cat(rows)
    config = json.loads((layout / "config.json").read_text())
    write(layout, config, fused)
    file = layout / "dense-pp0-tp0.safetensors"
    (layout / "model.safetensors").rename(file)
    meta["files"] = {file.name: {"bytes": file.stat().st_size, "tensors": len(fused)}}
    (layout / "mcore.json").write_text(json.dumps(meta))
    commands.to_mcore(layout, tmp_path / "moved", ParallelSizes(tp=2, pp=2), ALONE)
    commands.to_hf(tmp_path / "moved", tmp_path / "back", ALONE)
    back = contents(tmp_path / "back")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, "<u4"), (torch.bfloat16, "<u2")])
@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("gate_proj", "up_proj"), ("k_proj",)])
def test_values_outside_the_blocks_of_fused_factors_are_not_lost_in_silence(
    modules: tuple[str, ...], dtype: torch.dtype, bits: str, tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, modules)
    factors = {name: factor.to(dtype) for name, factor in contents(peft).items()}
    save_file(factors, peft / "adapter_model.safetensors")
    commands.to_mcore(peft, tmp_path / "mcore", ParallelSizes(), ALONE)
    file = tmp_path / "mcore" / "dense-pp0-tp0.safetensors"
    name, piece = next(
        (name, piece) for name, piece in read_header(file).items() if name.endswith("lora_B.weight")
    )
    fused = np.memmap(file, np.dtype(bits), "r+", piece.offset, piece.spec.shape)
    fused[tuple(np.argwhere(fused == 0)[-1])] = 1
    fused.flush()
    with pytest.raises(ConversionError, match=f"{name} is not block diagonal"):
        commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    assert not (tmp_path / "back").exists()


def test_adapters_that_are_more_than_linear_factors_are_refused(tmp_path: Path) -> None:
    base = model(tmp_path / "base", CONFIG)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"use_dora": True}, "use_dora is True; only low-rank factors"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\]; only"),
        ({"peft_type": "IA3"}, "of type 'IA3', expected 'LORA'"),
        ({"base_model_name_or_path": "org/name"}, "where no config.json is; name the folder"),
    ]
    for index, (options, match) in enumerate(cases):
        peft = adapter(tmp_path / str(index), base, ("q_proj",), **options)
        with pytest.raises(ConversionError, match=match):
            commands.to_mcore(peft, tmp_path / "dst", ParallelSizes(), ALONE)
    commands.to_mcore(
        tmp_path / "4", tmp_path / "dst", ParallelSizes(), Settings(workers=1), base=base
    )


@pytest.mark.parametrize(
    "init",
    [True, False, "gaussian", "orthogonal", "mica", "eva", "pissa", "pissa_niter_2", "olora"],
)
def test_an_adapter_is_refused_if_peft_changes_the_base_for_it(init: Any, tmp_path: Path) -> None:
    base, saved = nn.Linear(16, 16, bias=False), tmp_path / "adapter"
    weight = base.weight.detach().clone()
    options = LoraConfig(r=4, target_modules=["0"], init_lora_weights=init)
    get_peft_model(nn.Sequential(base), options).save_pretrained(str(saved))
    with torch.no_grad():
        base.weight.copy_(weight)
    PeftModel.from_pretrained(nn.Sequential(base), saved)
    if torch.equal(base.weight, weight):
        assert len(open_peft(saved, CONFIG).tensors) == 2
    else:
        with pytest.raises(ConversionError, match="path_initial_model_for_weight_conversion"):
            open_peft(saved, CONFIG)


@pytest.mark.parametrize(
    ("init", "instead"),
    [("corda", "makes a plain LoRA"), ("lora_ga", "makes a plain LoRA"), ("loftq", "merge it in")],
)
def test_an_adapter_for_weights_that_peft_has_changed_is_refused(
    init: str, instead: str, tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, ("q_proj",), init_lora_weights=init)
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(), ALONE)
    with pytest.raises(ConversionError, match=f"init_lora_weights is '{init}'.*{instead}"):
        commands.to_hf(tmp_path / "mcore", tmp_path / "merged", ALONE, adapter=peft, merge=True)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base = model(tmp_path / "base", CONFIG)
    other = model(tmp_path / "other", {**CONFIG, "hidden_size": 12})
    peft = adapter(tmp_path / "peft", other, ("q_proj",))
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(), ALONE)
    with pytest.raises(ConversionError, match="is it of another model"):
        commands.to_hf(tmp_path / "mcore", tmp_path / "dst", ALONE, adapter=peft, merge=True)
    with pytest.raises(ConversionError, match="--merge needs an --adapter"):
        commands.to_hf(tmp_path / "mcore", tmp_path / "dst", ALONE, merge=True)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"lora_alpha": None}, "lora_alpha is None, expected a positive number"),
        ({"lora_alpha": "6"}, "lora_alpha is '6', expected"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\], expected an object"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern has no pattern"),
        ({"alpha_pattern": {"q_proj": "big"}}, "q_proj is 'big'"),
    ],
)
def test_an_adapter_without_a_scale_is_not_merged(
    changed: dict[str, Any], match: str, tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG)
    peft = adapter(tmp_path / "peft", base, ("q_proj",), **changed)
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(), ALONE)
    with pytest.raises(ConversionError, match=match):
        commands.to_hf(tmp_path / "mcore", tmp_path / "merged", ALONE, adapter=peft, merge=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("of_model", "of_adapter", "match"),
    [
        (torch.float64, torch.float32, "is of type F64 and its factors are of types F32 and F32"),
        (torch.float8_e4m3fn, torch.float32, "is of type F8_E4M3 and its factors"),
        (torch.float32, torch.float64, "its factors are of types F64 and F64"),
        (torch.bfloat16, torch.float8_e5m2, "F8_E5M2; a merge adds F32, BF16, F16 only"),
    ],
)
def test_types_that_float32_cannot_add_are_not_merged(
    of_model: torch.dtype, of_adapter: torch.dtype, match: str, tmp_path: Path
) -> None:
    base = model(tmp_path / "base", CONFIG, of_model)
    peft = adapter(tmp_path / "peft", base, ("q_proj",))
    factors = {name: factor.to(of_adapter) for name, factor in contents(peft).items()}
    save_file(factors, peft / "adapter_model.safetensors")
    commands.to_mcore(base, tmp_path / "mcore", ParallelSizes(), ALONE)
    with pytest.raises(ConversionError, match=match):
        commands.to_hf(tmp_path / "mcore", tmp_path / "merged", ALONE, adapter=peft, merge=True)
    assert not (tmp_path / "merged").exists()
    commands.to_hf(tmp_path / "mcore", tmp_path / "apart", ALONE, adapter=peft)
