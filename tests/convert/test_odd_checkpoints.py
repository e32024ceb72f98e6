"""Legal checkpoints that are rare: each is converted, and what is left out is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_adapter.convert import commands
from mcore_adapter.convert.check import check
from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.errors import ConversionError
from mcore_adapter.load import shards
from mcore_adapter.local_tensors import Held, Ranks
from mcore_adapter.models import FAMILIES as KNOWN
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.hf_classes import config_of
from tests.convert.hf_classes import model_of as new_model
from tests.convert.random_models import write_files
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

SPARSE = [name for name, values in FAMILIES.items() if "num_experts_per_tok" in values]
ONE_OF_EACH = {str(values["model_type"]): name for name, values in FAMILIES.items()}
CUT = ParallelSizes(tp=2, pp=2, ep=2, etp=1)


def model_of(**values: Any) -> Any:
    values = {**COMMON, **values}
    model = new_model(config_of(values.pop("model_type"), values))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_()
    return model


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    src = by_transformers(tmp_path / "src", "llama")
    others: dict[str, Tensor] = {name: t + 1 for name, t in contents(src).items()}
    write_files(src, others, 2)
    loaded = AutoModelForCausalLM.from_pretrained(src).state_dict()
    notes: list[str] = []
    commands.to_mcore(
        src, tmp_path / "mcore", ParallelSizes(), Settings(workers=1, note=notes.append)
    )
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    for name, tensor in contents(tmp_path / "back").items():
        assert torch.equal(tensor, loaded[name]), name
    expected = (
        "model.safetensors is read, as Hugging Face does; model.safetensors.index.json beside"
    )
    assert [note[: len(expected)] for note in notes] == [expected]
    assert check(src).notes == tuple(notes)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_a_sparse_family_without_experts_is_dense(kind: str, tmp_path: Path) -> None:
    model = model_of(**{**FAMILIES[kind], "num_experts": 0})
    model.save_pretrained(tmp_path / "src")
    back = there_and_back(tmp_path / "src", tmp_path, ParallelSizes(tp=2, pp=2))
    assert_same(tmp_path / "src", back)


@pytest.mark.parametrize("rank", [None, 12])
def test_biases_of_latent_attention_are_kept(rank: int | None, tmp_path: Path) -> None:
    values = {**FAMILIES["deepseek_v3"], "q_lora_rank": rank, "attention_bias": True}
    model_of(**values).save_pretrained(tmp_path / "src")
    assert any(name.endswith("o_proj.bias") for name in contents(tmp_path / "src"))
    assert_same(tmp_path / "src", there_and_back(tmp_path / "src", tmp_path, CUT))


@pytest.mark.parametrize(
    "family", sorted({str(v["model_type"]): k for k, v in FAMILIES.items()}.values())
)
def test_frequencies_that_old_versions_saved_are_left_out_by_name(
    family: str, tmp_path: Path
) -> None:
    bare = by_transformers(tmp_path / "bare", family)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    rewrite(
        bare,
        tmp_path / "src",
        {**contents(bare), **old, "model.rotary_emb.inv_freq": torch.ones(4)},
    )
    notes: list[str] = []
    how = Settings(workers=1, note=notes.append)
    commands.to_mcore(tmp_path / "src", tmp_path / "mcore", ParallelSizes(), how)
    (note,) = notes
    assert "rotary_emb.inv_freq and 4 more like it: a buffer that models compute" in note
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    assert_same(bare, tmp_path / "back")


def test_all_families_are_among_them() -> None:
    assert {values["model_type"] for values in FAMILIES.values()} == set(KNOWN)


@pytest.mark.parametrize("family", SPARSE)
def test_experts_as_transformers_5_holds_them_are_the_same_experts(
    family: str, tmp_path: Path
) -> None:
    """The same layout whichever format it is made of; and back in the format that came."""
    model = model_of(**FAMILIES[family])
    model.save_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = list(contents(tmp_path / "fused"))
    assert any(name.endswith("layers.3.mlp.experts.gate_up_proj") for name in names)
    for name in ("original", "fused"):
        commands.to_mcore(tmp_path / name, tmp_path / name / "cut", CUT, ALONE)
        commands.to_mcore(
            tmp_path / name / "cut", tmp_path / name / "moved", ParallelSizes(ep=2), ALONE
        )
        commands.to_hf(tmp_path / name / "moved", tmp_path / name / "back", ALONE)
        assert_same(tmp_path / name, tmp_path / name / "back")
    assert_same(tmp_path / "original" / "cut", tmp_path / "fused" / "cut")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_a_model_is_filled_with_fused_experts(family: str, tmp_path: Path) -> None:
    model = model_of(**FAMILIES[family])
    model.save_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    table = table_of(json.loads((tmp_path / "fused" / "config.json").read_text()))
    rank, sizes = Ranks(tp=0, pp=0, ep=0, etp=0), ParallelSizes()
    planned = [t for t in tasks(table, sizes) if t.param.of_expert and not t.param.optional]
    found = []
    for name in ("original", "fused"):
        read: dict[str, Tensor] = {}
        for task in planned:
            shape = (32, 32) if "fc1" in task.name else (32, 16)
            shape = (96, 32) if family == "mixtral" and "fc1" in task.name else shape
            shape = (32, 48) if family == "mixtral" and "fc2" in task.name else shape
            held = Held(task, torch.empty(shape))
            ((_, tensor),) = shards(tmp_path / name, [held], table, sizes, rank)
            read[task.name] = tensor
        found.append(read)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize(
    ("value", "to", "match"),
    [
        (65520.0, "fp16", r"has 65520, and F16 ends at 65504; choose another --dtype"),
        (-1e30, "fp16", r"has 1e\+30, and F16 ends at 65504"),
        (3.4e38, "bf16", r"has 3\.4e\+38, and BF16 ends at"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_finite_number_never_becomes_infinite(
    value: float, to: str, match: str, workers: int, tmp_path: Path
) -> None:
    bare = by_transformers(tmp_path / "bare", "llama")
    tensors = contents(bare)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    src = rewrite(bare, tmp_path / "src", tensors)
    with pytest.raises(ConversionError, match=rf"{name} {match}"):
        commands.to_mcore(src, tmp_path / "mcore", ParallelSizes(), Settings(to, workers=workers))
    assert not (tmp_path / "mcore").exists()


def test_what_is_infinite_already_stays_and_what_rounds_down_fits(tmp_path: Path) -> None:
    bare = by_transformers(tmp_path / "bare", "llama")
    tensors = contents(bare)
    name = "model.norm.weight"
    tensors[name][:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 65519.0])
    src = rewrite(bare, tmp_path / "src", tensors)
    commands.to_mcore(src, tmp_path / "mcore", ParallelSizes(), Settings("fp16", workers=1))
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    found = contents(tmp_path / "back")[name]
    assert torch.equal(found[:2], torch.tensor([float("inf"), float("-inf")]).half())
    assert found[2].isnan()
    assert found[3] == 65504


def test_folders_beside_the_weights_are_kept_but_for_other_models(tmp_path: Path) -> None:
    src = by_transformers(tmp_path / "src", "llama")
    kept = ("tokenizer/vocab.json", "chat_templates/tool/use.jinja", "notes.txt", "empty/.keep")
    left = (
        "original/params.json",
        "original/consolidated.00.pth",
        "checkpoint-5/deep/optimizer.pt",
    )
    for name in (*kept, *left):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(name)
    (src / "loop").symlink_to(".")
    (src / "chat_templates" / "up").symlink_to("../chat_templates")
    (src / "lost").symlink_to("nowhere")
    (tmp_path / "blob").write_text("from elsewhere")
    (src / "merges.txt").symlink_to(tmp_path / "blob")
    notes: list[str] = []
    how = Settings(workers=1, note=notes.append)
    commands.to_mcore(src, tmp_path / "mcore", ParallelSizes(), how)
    commands.to_hf(tmp_path / "mcore", tmp_path / "back", ALONE)
    back = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*")}
    for name in kept[:3]:
        assert (tmp_path / "back" / name).read_text() == name
    assert (tmp_path / "back" / "merges.txt").read_text() == "from elsewhere"
    assert not (tmp_path / "back" / "merges.txt").is_symlink()
    assert not {path.split("/")[0] for path in back} & {"original", "checkpoint-5", "loop", "lost"}
    told = " ".join(notes)
    assert all(
        f"left out {src / name}: " in told for name in ("original", "checkpoint-5", "loop", "lost")
    )
    assert f"left out {src / 'chat_templates' / 'up'}: a link to a folder that it lies in" in told


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ({"global_head_dim": 8}, {}),
        ({"global_head_dim": 6}, {"head_dim": 6}),
        (
            {"global_head_dim": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
            {"num_key_value_heads": 2},
        ),
    ],
    ids=str,
)
def test_heads_of_gemma4_may_differ_in_one_thing_or_in_none(
    heads: dict[str, Any], told: dict[str, int], tmp_path: Path
) -> None:
    """transformers writes what differs, and nothing else."""
    base = {**FAMILIES["gemma4_text"], "head_dim": 8, "num_key_value_heads": 4}
    model = model_of(**{**base, "attention_k_eq_v": False, **heads})
    model.save_pretrained(tmp_path / "src")
    written = json.loads((tmp_path / "src" / "config.json").read_text())["per_layer_config"]
    wide = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert (written or {}) == ({str(i): told for i in wide} if told else {})
    assert_same(tmp_path / "src", there_and_back(tmp_path / "src", tmp_path, ParallelSizes(tp=2)))


@pytest.mark.parametrize("spaces", range(1, 8))
def test_tensors_that_begin_anywhere_are_read_rightly(spaces: int, tmp_path: Path) -> None:
    """Headers of some writers are not padded, and so tensors are not aligned."""
    src = by_transformers(tmp_path / "src", "llama")
    file = src / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:end].rstrip() + b" " * spaces
    file.write_bytes(len(header).to_bytes(8, "little") + header + whole[end:])
    assert_same(src, there_and_back(src, tmp_path, ParallelSizes(tp=2, pp=2)))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama", "num_hidden_layers": 0},
        {**FAMILIES["deepseek_v3"], "n_shared_experts": 0},
        {
            **FAMILIES["deepseek_v3"],
            "n_routed_experts": 0,
            "n_group": 1,
            "first_k_dense_replace": 4,
        },
        {**FAMILIES["qwen2_moe"], "shared_expert_intermediate_size": 0},
        {**FAMILIES["qwen3_moe"], "num_experts": 1, "num_experts_per_tok": 1},
    ],
    ids=str,
)
def test_models_without_some_of_it_come_back(values: dict[str, Any], tmp_path: Path) -> None:
    model_of(**values).save_pretrained(tmp_path / "src")
    assert_same(tmp_path / "src", there_and_back(tmp_path / "src", tmp_path, ParallelSizes(tp=2)))
