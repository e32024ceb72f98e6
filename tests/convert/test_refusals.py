"""What cannot be converted is refused with one clear message, and nothing is left behind."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversion_plan import check_layout
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.convert.shapes import check_widths
from mcore_adapter.convert.storage.output import complete_or_absent
from mcore_adapter.errors import ConversionError, LayoutError, McoreAdapterError, UnknownModelError
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.tiny_checkpoints import ALONE, contents, numbered, write
from tests.convert.tiny_models import COMMON, MODELS

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "vocab_size": 5,
    "tie_word_embeddings": False,
    "num_experts": 0,
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return numbered(tmp_path / "src", CONFIG)


def refused(
    kind: type[McoreAdapterError], match: str, src: Path, sizes: ParallelSizes | None = None
) -> None:
    """Both as an error and in that nothing new lies beside the source."""
    before = sorted(os.listdir(src.parent))
    with pytest.raises(kind, match=match) as caught:
        commands.to_mcore(src, src.parent / "dst", sizes or ParallelSizes(), ALONE)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(src.parent)) == before


def change(src: Path, **values: Any) -> None:
    (src / "config.json").write_text(json.dumps({**CONFIG, **values}))


def test_an_output_that_exists(src: Path) -> None:
    (src.parent / "dst").mkdir()
    refused(ConversionError, "dst exists; name a folder", src)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with (
        pytest.raises(ConversionError, match=r"GB free, 1000000000\.00 GB are needed"),
        complete_or_absent(tmp_path / "dst", 10**18),
    ):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        (ParallelSizes(tp=3), "num_attention_heads 4 does not divide over tp = 3"),
        (ParallelSizes(pp=2), "3 layers do not divide into pp"),
        (ParallelSizes(pp=2, layers=(1, 1)), "make 2, the model has 3"),
        (ParallelSizes(ep=2), "this llama has none"),
    ],
)
def test_a_layout_that_does_not_divide(sizes: ParallelSizes, match: str, src: Path) -> None:
    refused(LayoutError, match, src, sizes)


def test_a_dimension_that_does_not_divide(tmp_path: Path) -> None:
    src = numbered(tmp_path / "src", {**CONFIG, "intermediate_size": 6})
    refused(LayoutError, r"mlp\.linear_fc1\.weight: 12 of shape", src, ParallelSizes(tp=4))


@pytest.mark.parametrize(
    ("name", "sizes", "match"),
    [
        (
            "qwen3_moe",
            ParallelSizes(etp=3),
            r"experts.*fc1.*does not divide over 3 tensor",
        ),
        ("qwen3", ParallelSizes(tp=4), None),
        ("qwen3_next", ParallelSizes(tp=4), "num_key_value_heads 2 does not divide over tp = 4"),
        ("qwen3_5", ParallelSizes(tp=4), "num_key_value_heads 2 does not divide over tp = 4"),
    ],
)
def test_what_megatron_cannot_build_is_refused_before_weights_are_read(
    name: str, sizes: ParallelSizes, match: str | None
) -> None:
    """Megatron-Core asserts, or fails in the first forward pass, without a name."""
    more = {"linear_num_key_heads": 4} if name in ("qwen3_next", "qwen3_5") else {}
    table = table_of({**COMMON, **MODELS[name], **more})
    with nullcontext() if match is None else pytest.raises(LayoutError, match=match):
        check_layout(table, sizes)
        check_widths(table, sizes)


def test_a_truncated_file(src: Path) -> None:
    file = src / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    refused(ConversionError, "truncated or corrupt: its header promises", src)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{]", b"abc"])
def test_a_file_that_is_no_safetensors(content: bytes, src: Path) -> None:
    (src / "model.safetensors").write_bytes(content)
    refused(ConversionError, "is no safetensors file, or corrupt", src)


def test_tensors_that_overlap(src: Path) -> None:
    whole = (src / "model.safetensors").read_bytes()
    start, end = 8, 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[start:end])
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    header[one]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - start)
    (src / "model.safetensors").write_bytes(whole[:start] + text + whole[end:])
    refused(ConversionError, "does not begin where the last ends", src)


def test_an_unknown_model_type(src: Path) -> None:
    change(src, model_type="lama")
    refused(UnknownModelError, "'lama' is not supported; did you mean llama", src)


def test_a_missing_and_an_unmapped_tensor(src: Path) -> None:
    tensors = contents(src)
    tensors["model.layers.1.mlp.upp_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    write(src, CONFIG, tensors)
    refused(ConversionError, "1 missing: .*up_proj.* may be .*upp_proj.*1 unmapped: ", src)


def test_a_tensor_too_many(src: Path) -> None:
    tensors = {**contents(src), "model.layers.1.mlp.extra.weight": torch.ones(2)}
    write(src, CONFIG, tensors)
    refused(ConversionError, r"the table of llama; 1 unmapped: model\.layers\.1\.mlp\.extra", src)


def test_a_tensor_of_another_shape_than_the_configuration_says(src: Path) -> None:
    change(src, num_key_value_heads=4)
    refused(ConversionError, r"shapes do not fit config\.json: .*k_proj\.weight \[8, 8\]", src)


def test_parts_of_different_types(src: Path) -> None:
    tensors = contents(src)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    write(src, CONFIG, tensors)
    refused(ConversionError, "become one tensor but are of types", src)


def test_a_quantized_checkpoint(src: Path) -> None:
    change(src, quantization_config={"quant_method": "fp8"})
    refused(ConversionError, r"quantized \(fp8\); convert it to bf16 first", src)


def test_folders_that_are_neither(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(ConversionError, "neither a Hugging Face checkpoint", tmp_path / "empty")
    refused(ConversionError, "is no folder", tmp_path / "nowhere")


def test_weights_in_another_format(src: Path) -> None:
    (src / "model.safetensors").rename(src / "pytorch_model.bin")
    refused(ConversionError, "has neither model.safetensors nor", src)


def test_a_shard_that_the_index_names_but_is_missing(src: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    (src / "model.safetensors").unlink()
    refused(ConversionError, "00001-of-00002.safetensors is missing", src)


def test_integers_that_should_become_floats(src: Path) -> None:
    with pytest.raises(ConversionError, match="type I32 cannot become BF16"):
        commands.to_mcore(src, src.parent / "dst", ParallelSizes(), Settings("bf16", workers=1))
    assert os.listdir(src.parent) == ["src"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_leaves_nothing(workers: int, src: Path) -> None:
    with pytest.raises(ConversionError, match="type I32 cannot become"):
        commands.to_mcore(
            src, src.parent / "dst", ParallelSizes(), Settings("fp16", workers=workers)
        )
    assert os.listdir(src.parent) == ["src"]


def test_layouts_that_are_not_whole(src: Path) -> None:
    layout = src.parent / "layout"
    commands.to_mcore(src, layout, ParallelSizes(tp=2), ALONE)
    file = layout / "dense-pp0-tp1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    refused(ConversionError, r"truncated or of another conversion", layout)
    file.unlink()
    refused(ConversionError, r"tp1\.safetensors is missing, and mcore\.json names it", layout)
    other = whole.replace(b"decoder.layers.0.mlp.linear_fc2", b"decoder.layers.0.mlp.linear_fc3")
    file.write_bytes(other)
    refused(ConversionError, r"lacks decoder\.layers\.0\.mlp\.linear_fc2", layout)
    file.write_bytes(whole)
    commands.to_hf(layout, src.parent / "back", ALONE)


def test_hugging_face_files_are_not_converted_to_themselves(src: Path) -> None:
    with pytest.raises(ConversionError, match="is in Hugging Face format already"):
        commands.to_hf(src, src.parent / "dst", ALONE)


def test_a_tied_checkpoint_may_store_its_embedding_twice(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    src = numbered(tmp_path / "src", config)
    tensors = contents(src)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(src, config, tensors)
    commands.to_mcore(src, tmp_path / "mcore", ParallelSizes(tp=2), ALONE)
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    assert torch.equal(contents(tmp_path / "back")["lm_head.weight"], tensors["lm_head.weight"])
