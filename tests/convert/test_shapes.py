"""Every tensor has the shape that `config.json` says, or nothing of it is read."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversion_plan import check_coverage, present, tasks
from mcore_adapter.convert.fused_experts import table_as_stored
from mcore_adapter.convert.shapes import check_shapes
from mcore_adapter.convert.storage.tensor_file import Piece, Spec
from mcore_adapter.errors import ConversionError
from mcore_adapter.models import FAMILIES, table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.hf_classes import config_of, model_of
from tests.convert.random_models import random_values
from tests.convert.tiny_checkpoints import ALONE, by_transformers, contents, rewrite


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_transformers(tmp_path_factory.mktemp("shapes") / "gpt_oss", "gpt_oss")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_transformers(tmp_path_factory.mktemp("shapes") / "llama", "llama")


def refused(src: Path, match: str) -> None:
    with pytest.raises(ConversionError, match=match):
        commands.to_mcore(src, src.parent / "dst", ParallelSizes(), ALONE)
    assert not (src.parent / "dst").exists()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_shapes_of_a_table_are_those_that_transformers_builds(kind: str) -> None:
    """Any tensor with one row, column or dimension more is refused by its name."""
    draw = random.Random(kind)
    for _ in range(4):
        made = config_of(kind, random_values(kind, draw))
        with torch.device("meta"):
            model = model_of(made)
        theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if made.tie_word_embeddings:
            del theirs["lm_head.weight"]
        table = table_as_stored(table_of(made.to_dict()), theirs)
        planned = tasks(table, ParallelSizes())
        check_coverage(planned, theirs, table)
        planned = present(planned, theirs)
        check_shapes(planned, theirs, table)
        for name, shape in theirs.items():
            for dim in range(len(shape)):
                longer = (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
                with pytest.raises(ConversionError, match=f"{name} "):
                    check_shapes(planned, {**theirs, name: longer}, table)
            with pytest.raises(ConversionError, match=f"{name} "):
                check_shapes(planned, {**theirs, name: (*shape, 1)}, table)


def test_experts_that_the_configuration_does_not_count_are_refused(
    gpt_oss: Path, tmp_path: Path
) -> None:
    src = rewrite(gpt_oss, tmp_path / "src", contents(gpt_oss), num_local_experts=3)
    refused(src, r"mlp\.router\.weight \[4, 32\], expected \[3, 32\] = \[num_local_experts, hidden")


@pytest.mark.parametrize("kind", ["gate_up_proj", "gate_up_proj_bias", "down_proj_bias"])
def test_a_stack_with_fewer_experts_is_never_read_beyond(
    kind: str, gpt_oss: Path, tmp_path: Path
) -> None:
    tensors = contents(gpt_oss)
    name = f"model.layers.2.mlp.experts.{kind}"
    tensors[name] = tensors[name][:3].clone()
    src = rewrite(gpt_oss, tmp_path / "src", tensors)
    refused(src, rf"layers\.2\.mlp\.experts\.{kind} \[3, .*expected \[4, ")


@pytest.mark.parametrize("rows", [60, 70])
def test_an_output_layer_has_the_rows_of_the_vocabulary(
    rows: int, llama: Path, tmp_path: Path
) -> None:
    tensors = {**contents(llama), "lm_head.weight": torch.ones(rows, 32)}
    src = rewrite(llama, tmp_path / "src", tensors)
    refused(src, rf"lm_head\.weight \[{rows}, 32\], expected \[67, 32\] = \[vocab_size, hidden")


def test_a_norm_has_the_width_of_the_model(llama: Path, tmp_path: Path) -> None:
    tensors = {**contents(llama), "model.layers.1.input_layernorm.weight": torch.ones(7)}
    src = rewrite(llama, tmp_path / "src", tensors)
    refused(src, r"layers\.1\.input_layernorm\.weight \[7\], expected \[32\] = \[hidden_size\]")


def test_a_default_that_does_not_fit_is_named(llama: Path, tmp_path: Path) -> None:
    src = rewrite(llama, tmp_path / "src", contents(llama))
    config = json.loads((src / "config.json").read_text())
    del config["num_key_value_heads"]
    (src / "config.json").write_text(json.dumps(config))
    refused(
        src, r"k_proj\.weight \[32, 32\], expected \[64, 32\] = \[num_attention_heads \* head_dim"
    )


@pytest.mark.parametrize("what", ["shape", "type"])
def test_a_shard_of_another_shape_or_type_is_refused(
    what: str, llama: Path, tmp_path: Path
) -> None:
    commands.to_mcore(llama, tmp_path / "layout", ParallelSizes(tp=2), ALONE)
    file = tmp_path / "layout" / "dense-pp0-tp1.safetensors"
    tensors = load_file(file)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    changed = {"type": tensors[name].view(torch.int32), "shape": tensors[name].view(16, 64)}[what]
    save_file({**tensors, name: changed}, file, metadata={"format": "pt"})
    meta = json.loads((file.parent / "mcore.json").read_text())
    meta["files"][file.name]["bytes"] = file.stat().st_size
    (file.parent / "mcore.json").write_text(json.dumps(meta))
    match = rf"{file.name} has {name} as .*expected F32 \[32, 32\]"
    with pytest.raises(ConversionError, match=match):
        commands.to_hf(file.parent, tmp_path / "back", ALONE)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("dense-pp0-tp1.safetensors", "decoder.layers.1.input_layernorm.weight"),
        ("dense-pp1-tp0.safetensors", "output_layer.weight"),
    ],
)
def test_what_ranks_should_share_and_do_not_is_refused(
    file: str, name: str, tmp_path: Path
) -> None:
    """One of them is read: the other would be lost."""
    src = by_transformers(tmp_path / "src", "llama tied")
    commands.to_mcore(src, tmp_path / "layout", ParallelSizes(tp=2, pp=2), ALONE)
    tensors = load_file(tmp_path / "layout" / file)
    tensors[name][0] += 1
    save_file(tensors, tmp_path / "layout" / file, metadata={"format": "pt"})
    meta = json.loads((tmp_path / "layout" / "mcore.json").read_text())
    meta["files"][file]["bytes"] = (tmp_path / "layout" / file).stat().st_size
    (tmp_path / "layout" / "mcore.json").write_text(json.dumps(meta))
    with pytest.raises(ConversionError, match=rf"{file}: {name} differs from that in .*pp0-tp0"):
        commands.to_hf(tmp_path / "layout", tmp_path / "back", ALONE)
    assert not (tmp_path / "back").exists()


def test_a_part_lies_within_its_tensor() -> None:
    stack = Piece(Path("x"), 100, Spec("F32", (3, 4)))
    assert stack.part(2) == Piece(Path("x"), 132, Spec("F32", (4,)))
    for index in (-1, 3):
        with pytest.raises(ConversionError, match=r"\[3, 4\] has no part"):
            stack.part(index)
