"""All families, as transformers writes them, through several layouts and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.errors import ConversionError
from mcore_adapter.models import FAMILIES as KNOWN
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.tiny_checkpoints import (
    ALONE,
    FAMILIES,
    assert_same,
    by_transformers,
    contents,
    rewrite,
    there_and_back,
)

DENSE = [
    ParallelSizes(),
    ParallelSizes(tp=2),
    ParallelSizes(pp=2, vpp=2),
    ParallelSizes(tp=2, pp=2, layers=(3, 1)),
]
SPARSE = [
    ParallelSizes(ep=4),
    ParallelSizes(tp=2, ep=2, etp=1),
    ParallelSizes(tp=1, pp=2, ep=2, etp=2),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        by_transformers(folder / family, family)
    return folder


def has_experts(family: str) -> bool:
    return "num_experts_per_tok" in FAMILIES[family]


def test_every_model_type_is_tested() -> None:
    assert {family["model_type"] for family in FAMILIES.values()} == set(KNOWN)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back_byte_for_byte_from_every_layout(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    for index, sizes in enumerate([*DENSE, *(SPARSE if has_experts(family) else [])]):
        back = there_and_back(checkpoints / family, tmp_path / str(index), sizes)
        assert_same(checkpoints / family, back)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_made_of_another_is_the_one_made_of_hugging_face(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    first, second = (SPARSE[1], SPARSE[2]) if has_experts(family) else (DENSE[1], DENSE[3])
    commands.to_mcore(checkpoints / family, tmp_path / "first", first, ALONE)
    commands.to_mcore(tmp_path / "first", tmp_path / "moved", second, ALONE)
    commands.to_mcore(checkpoints / family, tmp_path / "second", second, ALONE)
    assert_same(tmp_path / "moved", tmp_path / "second")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"])
def test_layers_that_predict_further_tokens_are_kept(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    src = with_mtp(checkpoints / family, tmp_path / "src")
    commands.to_mcore(src, tmp_path / "mcore", ParallelSizes(tp=2, pp=2, ep=2, etp=1), ALONE)
    layout = contents(tmp_path / "mcore")
    stages = {name.split("-")[1] for name in layout if ":mtp.layers.0." in name}
    assert stages == {"pp1"}, "Megatron has them on the last stage"
    assert not any("shared_head" in name or "embed_tokens" in name for name in layout)
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    assert_same(src, tmp_path / "back")


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_next_token_layer_of_qwen_is_kept(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    tensors = contents(checkpoints / family)
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.3."):
            copy = name.replace("model.layers.3.", "mtp.layers.0.")
            tensors[copy] = torch.randn_like(tensor)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(32)
    tensors["mtp.fc.weight"] = torch.randn(32, 64)
    src = rewrite(checkpoints / family, tmp_path / "src", tensors)
    back = there_and_back(src, tmp_path, ParallelSizes(tp=2, pp=2))
    assert_same(src, back)


def test_a_shared_tensor_that_differs_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    src = with_mtp(checkpoints / "glm4_moe", tmp_path / "src")
    tensors = contents(src)
    tensors["model.layers.4.embed_tokens.weight"][0, 0] += 1
    rewrite(src, tmp_path / "other", tensors)
    with pytest.raises(ConversionError, match=r"embed_tokens\.weight differs from model\.embed"):
        commands.to_mcore(tmp_path / "other", tmp_path / "mcore", ParallelSizes(), ALONE)
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_bf16_is_rounded_as_torch_does_and_kept_biases_are_not(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    settings = Settings(dtype="bf16", workers=1)
    commands.to_mcore(checkpoints / family, tmp_path / "mcore", ParallelSizes(tp=2), settings)
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    back = contents(tmp_path / "back")
    for name, tensor in contents(checkpoints / family).items():
        precise = name.endswith("e_score_correction_bias")
        assert torch.equal(back[name], tensor if precise else tensor.bfloat16()), name
    assert '"bfloat16"' in (tmp_path / "back" / "config.json").read_text()


def with_mtp(src: Path, dst: Path) -> Path:
    """As published checkpoints have it: numbered behind the layers, shared tensors stored twice."""
    tensors = contents(src)
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.3."):
            tensors[name.replace("layers.3.", "layers.4.")] = torch.randn_like(tensor)
    at = "model.layers.4."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}{name}.weight"] = torch.randn(32)
    tensors[at + "eh_proj.weight"] = torch.randn(32, 64)
    tensors[at + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[at + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return rewrite(src, dst, tensors, num_nextn_predict_layers=1)
