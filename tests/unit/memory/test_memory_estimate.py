"""The memory that `roll check` tells, against numbers worked by hand and transformers' models."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from roll.commands.memory.formula import copied_states, scored, trained
from roll.commands.memory.needs import Needs, Passes, activations
from roll.commands.memory.plan import Devices, RoleMemory, check_fit, of_devices, of_roles
from roll.commands.memory.report import COLUMNS, report, table
from roll.commands.memory.sizes import Learned, ModelSizes, count, learned, sizes_of
from roll.config import load_config
from roll.config.run import RunConfig
from roll.config.sections.lifecycle import CheckpointConfig
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.kinds import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.core.errors import ConfigError
from roll.platform.machine import GIB
from tests.families import FAMILIES, SIZES, save
from tests.tiny import tiny_qwen3

SMALL = ModelSizes(
    total=1000,
    experts=0,
    layer=300,
    root=400,
    head=200,
    layers=2,
    hidden=10,
    queries=8,
    keys=4,
    heads=2,
    feed_forward=20,
    vocab=20,
    head_norms=False,
)
WHOLE = Learned(1000, head=True)
PASSES = Passes(tokens=100, chunk_tokens=50, ranks=4, width=4)

PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen2.5-7B": (
        {"hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064,
         "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944},
        7.62e9,
    ),
    "Qwen3-4B": (
        {"hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 9728, "tie_word_embeddings": True},
        4.02e9,
    ),
    "Qwen3-8B": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 12288},
        8.19e9,
    ),
    "GLM-4.5-Air": (
        {"hidden_size": 4096, "num_hidden_layers": 46, "vocab_size": 151552,
         "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
         "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 8},
        106e9,
    ),
    "Qwen3-32B": (
        {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 151936,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 25600},
        32.8e9,
    ),
    "Qwen3-30B-A3B": (
        {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8},
        30.5e9,
    ),
    "Qwen3-235B-A22B": (
        {"hidden_size": 4096, "num_hidden_layers": 94, "vocab_size": 151936,
         "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
         "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
         "num_experts_per_tok": 8},
        235.1e9,
    ),
}  # fmt: skip
"""Configs of published models, and the number of parameters that their cards give."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_counted(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert count(config).total == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_tied"])
def test_parameters_are_those_of_transformers(name: str) -> None:
    settings = {**SIZES, **FAMILIES[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = count(config.to_dict())
    assert counted.total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert counted.head == model.get_output_embeddings().weight.numel()


def test_the_files_say_the_total(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    sizes = sizes_of(ModelConfig(path=str(tmp_path)))
    assert sizes is not None
    assert sizes.total == sum(p.numel() for p in model.parameters())


def test_models_that_are_not_here_or_of_other_kinds_are_not_estimated(tmp_path: Path) -> None:
    assert sizes_of(ModelConfig(path="nobody/has-this-model")) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "n_embd": 3}))
    assert sizes_of(ModelConfig(path=str(tmp_path))) is None


def test_fsdp2_divides_all_that_stays() -> None:
    needs = trained(SMALL, Fsdp2Config(), PASSES, WHOLE)
    assert (needs.weights, needs.moments) == (1000, 2000)
    assert needs.gradients == 1000
    copies = trained(SMALL, Fsdp2Config(replicas=2), PASSES, WHOLE)
    assert (copies.weights, copies.gradients, copies.moments) == (2000, 2000, 4000)
    moved = trained(SMALL, Fsdp2Config(cpu_offload=True), PASSES, WHOLE)
    assert moved.resident == 0
    assert moved.activations > 0


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        # One moment of the matrices inside the layers, two of embedding, head and last norm.
        (MuonConfig(), 4 * 600 + 8 * 400),
        # Rows and columns of matrices 10 wide.
        (AdafactorConfig(lr=0.01), 8 * 1000 // 10),
        # Two bytes of each, and two factors of a block of 256.
        (AdamW8bitConfig(), 2 * 1000 + 2 * 4 * 1000 // 256),
        (SgdConfig(lr=0.01), 0),
        (SgdConfig(lr=0.01, momentum=0.9), 4 * 1000),
    ],
)
def test_moments_are_those_of_the_optimizer(optimizer: OptimizerConfig, moments: int) -> None:
    assert trained(SMALL, Fsdp2Config(), PASSES, WHOLE, optimizer).moments == moments // 4
    frozen = Learned(600, head=False)
    if isinstance(optimizer, MuonConfig):
        assert trained(SMALL, Fsdp2Config(), PASSES, frozen, optimizer).moments == 4 * 600 // 4


def test_the_copy_of_a_checkpoint_is_of_weights_and_moments_and_counts_without_gpus(
    tmp_path: Path,
) -> None:
    assert copied_states(SMALL, Fsdp2Config(), 4, WHOLE, AdamWConfig()) == 12 * 1000 // 4
    assert copied_states(SMALL, Fsdp2Config(replicas=2), 4, WHOLE, None) == 4 * 1000 // 2
    assert copied_states(SMALL, DeepspeedConfig(stage=0), 4, WHOLE, None) == 4 * 1000
    config = recipe(tmp_path, "Qwen3-4B")
    roles = [RoleMemory("actor_train", (0,), Needs(weights=5, copied=7))]
    assert of_devices(config, roles, "cpu") == {0: {"actor_train": 12}}
    assert of_devices(config, roles, "cuda")[0]["actor_train"] == 5
    beside = CheckpointConfig(asynchronous=True)
    lines = report(config.model_copy(update={"checkpoint": beside}), CUDA)[1]
    assert any("actor_train: while a checkpoint is written" in line for line in lines)


def test_steps_on_whole_parameters_need_the_largest_one() -> None:
    least = replace(PASSES, tokens=0, chunk_tokens=0)
    few = replace(SMALL, root=0, layer=0)
    plain = trained(few, Fsdp2Config(), least, WHOLE).buffers
    largest = 10 * 20  # hidden size and feed-forward part; the head is as large
    assert trained(few, Fsdp2Config(), least, WHOLE, MuonConfig()).buffers == 16 * largest > plain
    adafactor = AdafactorConfig(lr=0.01)
    assert trained(few, Fsdp2Config(), least, WHOLE, adafactor).buffers == 12 * largest > plain


def test_an_adapter_has_moments_and_gradients_of_its_own_only() -> None:
    lora = LoraConfig(rank=2)
    elements = SMALL.adapter(lora)
    # Two layers of seven matrices: q, k, v, o of widths 8, 4, 4, 8; gate, up, down of 20.
    by_hand = 2 * 2 * ((10 + 8) + 2 * (10 + 4) + (8 + 10) + 3 * (10 + 20))
    assert elements == by_hand
    needs = trained(SMALL, Fsdp2Config(), PASSES, Learned(elements, head=elements == SMALL.total))
    assert needs.weights == 1000
    assert needs.moments == 2 * elements


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "moments"),
    [
        (0, 4000, 4000, 8000),
        (1, 4000 + 1000, 4000, 2000),
        (2, 4000 + 1000, 1000, 2000),
        (3, 1000 + 1000, 1000, 2000),
    ],
)
def test_each_stage_of_zero_divides_more(
    stage: Any, weights: int, gradients: int, moments: int
) -> None:
    needs = trained(SMALL, DeepspeedConfig(stage=stage), PASSES, WHOLE)
    assert (needs.weights, needs.gradients, needs.moments) == (weights, gradients, moments)


def test_megatron_divides_matrices_stages_and_experts() -> None:
    experts = ModelSizes(
        total=1000, experts=800, layer=300, root=40, head=20, layers=2, hidden=10, queries=8,
        keys=4, heads=2, feed_forward=20, vocab=2, head_norms=False,
    )  # fmt: skip
    low = Passes(tokens=100, chunk_tokens=50, ranks=4, width=2)
    needs = trained(experts, MegatronConfig(tp=2, ep=4, etp=1), low, WHOLE)
    own = 200 // 2 + 800 // 4
    assert needs.weights == 2 * own + 4 * own
    assert needs.gradients == 4 * own
    parts = MegatronConfig(tp=2, ep=4, etp=1, distributed_optimizer=True)
    # Two ranks have the same matrices; every expert has one copy.
    assert trained(experts, parts, low, WHOLE).moments == 8 * (200 // 2 // 2 + 800 // 4)


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_of_fsdp2_that_share_experts_gather_their_own_and_exchange_tokens(
    reshard: bool,
) -> None:
    experts = replace(SMALL, experts=400, layer_experts=200, choices=2)
    alone, shared = (
        trained(experts, Fsdp2Config(ep=ep, reshard_after_forward=reshard), PASSES, WHOLE)
        for ep in (1, 2)
    )
    # Two layers at once, or all: of each 200 elements in experts. Tokens go and come, each to two
    # experts, with ten numbers.
    assert alone.buffers - shared.buffers == 4 * 2 * 100 - 2 * 4 * 100 * 2 * 10
    assert replace(alone, buffers=0) == replace(shared, buffers=0)
    frozen = [scored(experts, Fsdp2Config(ep=ep), PASSES).buffers for ep in (1, 2)]
    assert frozen[0] - frozen[1] == alone.buffers - shared.buffers


def test_experts_of_a_layer_are_counted() -> None:
    counted = count(PUBLISHED["Qwen3-30B-A3B"][0])
    assert counted.layer_experts == 128 * 3 * 2048 * 768
    assert counted.experts == 48 * counted.layer_experts
    assert counted.choices == 8
    assert count(PUBLISHED["Qwen3-8B"][0]).layer_experts == 0


def test_recomputed_layers_keep_their_inputs_and_one_layer() -> None:
    kept = activations(SMALL, 1, 4, recomputed=False)
    recomputed = activations(SMALL, 1, 4, recomputed=True)
    # A layer: two norms of three float32 each, queries, their result, keys, values, the log-sum-exp
    # of two heads, and four tensors of the feed-forward part.
    layer = 4 * (2 * 3 * 10 + 2 * 8 + 2 * 4 + 2 + 4 * 20)
    ends = 4 * 4 * 10
    assert kept == 2 * layer + ends
    assert recomputed == 2 * 4 * 10 + layer + ends


@pytest.mark.parametrize("kind", [Fsdp2Config, DeepspeedConfig])
def test_inputs_of_layers_in_host_memory_are_not_on_the_gpu(
    tmp_path: Path, kind: type[Fsdp2Config] | type[DeepspeedConfig]
) -> None:
    deep = replace(SMALL, layers=20)
    stayed = trained(deep, kind(activation_checkpointing=True), PASSES, WHOLE)
    away = kind(activation_checkpointing=True, offload_activations=True)
    moved = trained(deep, away, PASSES, WHOLE)
    # A hundred tokens of ten float32, of all layers but four; pinned, 4000 bytes take 4096.
    assert stayed.activations - moved.activations == 16 * 4000
    assert (stayed.hosted, moved.hosted) == (0, 20 * 4096)
    assert moved.total < stayed.total
    strategy = f"{{kind: {away.kind}, activation_checkpointing: true, offload_activations: true}}"
    config = recipe(tmp_path, "Qwen3-8B", f"actor_train.strategy={strategy}")
    lines = report(config, CUDA)[1]
    assert any("actor_train: each rank keeps about" in line for line in lines)
    # Without GPUs inputs stay where they are.
    ours = of_roles(config, replace(CUDA, platform="cpu"))[0][0].needs
    assert ours.hosted == 0
    assert ours.activations > of_roles(config, CUDA)[0][0].needs.activations


CUDA = Devices("cuda", 80 * GIB, per_node=8)
RECIPES = sorted(Path("examples/recipes").glob("*.yaml"))


def recipe(tmp_path: Path, name: str, *overrides: str) -> RunConfig:
    """The example of GSM8K with the config of a published model."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | PUBLISHED[name][0]))
    own = (f"model.path={folder}", *overrides)
    return load_config(Path("examples/rlvr_gsm8k/run.yaml"), own).config


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_large_models_are_estimated(tmp_path: Path, name: str) -> None:
    config = recipe(tmp_path, name)
    rows, lines = report(config, CUDA)
    assert [row[0] for row in rows] == ["actor_train", "actor_infer", "reference"]
    assert all(len(row) == len(COLUMNS) for row in rows)
    beginnings = ("0-3: at most about ", "4-7: at most about ", "0-3: taking turns moves about ")
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"device {beginning}")
    roles, _ = of_roles(config, CUDA)
    # Masters and moments, 12 bytes, over four ranks.
    assert roles[0].needs.resident == pytest.approx(12 * PUBLISHED[name][1] / 4, rel=0.01)


def test_a_reference_that_follows_the_policy_is_counted_with_it(tmp_path: Path) -> None:
    roles, _ = of_roles(recipe(tmp_path, "Qwen3-8B", "reference={follow: {every: 2}}"), CUDA)
    assert [each.role for each in roles] == ["actor_train", "actor_infer"]
    # Masters and their copy, 8 bytes, over four ranks.
    assert roles[0].needs.weights == pytest.approx(8 * PUBLISHED["Qwen3-8B"][1] / 4, rel=0.01)


def test_the_table_fits_80_columns() -> None:
    out = io.StringIO()
    roles = ["actor_train", "actor_infer", "teachers.math"]
    Console(file=out, width=80).print(table([(role, "1024", *["1234.5"] * 7) for role in roles]))
    text = out.getvalue()
    assert "\u2026" not in text
    assert [line.split() for line in text.splitlines() if "1234.5" in line] == [
        [role, "1024", *["1234.5"] * 7] for role in roles
    ]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_fits_gpus_of_80_gb(tmp_path: Path, file: Path) -> None:
    name = Path(load_config(file).config.train_model.path).name.removesuffix("-Base")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | PUBLISHED[name][0]))
    config = load_config(file, (f"model.path={tmp_path}",)).config
    roles, _ = of_roles(config, CUDA)
    assert "actor_train" in [each.role for each in roles]
    assert CUDA.memory is not None
    for moment in of_devices(config, roles, "cuda").values():
        assert sum(moment.values()) <= CUDA.memory


def test_a_device_that_is_too_small_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, "Qwen3-32B")
    with pytest.raises(ConfigError, match=r"device 0 needs about \d+ GiB \(actor_train .*has 80"):
        check_fit(config, CUDA)
    need = max(
        sum(each.values())
        for each in of_devices(config, of_roles(config, CUDA)[0], "cuda").values()
    )
    tight = Devices("cuda", 0.9 * need, per_node=8)
    check_fit(config, tight)  # the estimate may be off by more
    assert "which may not be enough" in report(config, tight)[1][0]
    check_fit(config, Devices("cuda", None, per_node=8))
    check_fit(config, Devices("cuda", 1000 * GIB, per_node=8))


def test_roles_take_turns_on_gpus_and_are_together_on_cpus(tmp_path: Path) -> None:
    config = recipe(tmp_path, "Qwen2.5-7B", "actor_infer.pool=train")
    roles, _ = of_roles(config, CUDA)
    needs = {each.role: each.needs for each in roles}
    on_gpus = of_devices(config, roles, "cuda")[0]
    push = needs["actor_train"].resident + needs["actor_infer"].weights + 2 * 32 * 2**20
    assert sum(on_gpus.values()) == max([push, *(each.total for each in needs.values())])
    on_cpus = of_devices(config, roles, "cpu")[0]
    assert sum(on_cpus.values()) == sum(each.total for each in needs.values())


def test_what_is_frozen_has_no_gradients_and_no_moments(tmp_path: Path) -> None:
    """Elements of a real folder, against those of the module."""
    model = tiny_qwen3(tied=False)
    model.save_pretrained(tmp_path)
    sizes = sizes_of(ModelConfig(path=str(tmp_path)))
    assert sizes is not None
    layers = sum(p.numel() for n, p in model.named_parameters() if n.startswith("model.layers."))
    found = learned(ModelConfig(path=str(tmp_path), freeze=("model.layers.*",)), sizes)
    assert found == Learned(sizes.total - layers, head=True)
    assert not learned(ModelConfig(path=str(tmp_path), freeze=("lm_head.*",)), sizes).head
    assert learned(ModelConfig(path=str(tmp_path)), sizes) == Learned(sizes.total, head=True)
