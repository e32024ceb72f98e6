"""Parts of the estimate of memory that depend on the kind of the run: what is on a device at once,
quantised checkpoints, latent attention, stages of Megatron, and rows that stay together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.commands.memory.engines import Requests, served
from roll.commands.memory.formula import scored, trained
from roll.commands.memory.needs import Needs, Passes, layer_activations
from roll.commands.memory.plan import (
    Devices,
    RoleMemory,
    check_fit,
    devices_of,
    of_devices,
    of_roles,
)
from roll.commands.memory.sizes import Learned, count, sizes_of
from roll.commands.memory.weight_files import SINGLE
from roll.config import load_config
from roll.config.run import RunConfig
from roll.config.sections.engines import HfEngineConfig, SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, MegatronConfig
from roll.core.errors import ConfigError
from roll.models.parts.further import is_copy
from roll.platform.machine import GIB
from tests.convert.further_by_hand import save_further
from tests.runs import write_rows_task, write_task
from tests.tiny import char_tokenizer, tiny_qwen3
from tests.unit.memory.test_memory_estimate import CUDA, PUBLISHED, SMALL, WHOLE, recipe


def test_a_score_head_counts_instead_of_the_output_layer(tmp_path: Path) -> None:
    for tied in (True, False):
        model, folder = tiny_qwen3(tied=tied), tmp_path / str(tied)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        output = model.lm_head.weight.numel()
        hidden = config["hidden_size"]
        whole = count(config)
        scores = whole.with_score_head()
        assert (scores.head, scores.vocab) == (hidden, 1)
        assert scores.total == whole.total + hidden - (0 if tied else output)
        assert scores.root == output + 2 * hidden  # embedding, last norm, head
        stored = sizes_of(ModelConfig(path=str(folder)), scores=True)
        body = sum(parameter.numel() for parameter in model.model.parameters())
        assert stored == replace(scores, total=body)


@pytest.mark.parametrize("strategy", [MegatronConfig(tp=2), Fsdp2Config()])
def test_a_critic_needs_no_memory_for_logits(
    tmp_path: Path, strategy: MegatronConfig | Fsdp2Config
) -> None:
    kind = strategy.kind
    config = recipe(
        tmp_path,
        "Qwen3-8B",
        f"critic={{pool: train, strategy: {{kind: {kind}}}}}",
        "actor_train.strategy={kind: " + kind + "}",
        "algorithm.advantage={kind: gae}",
    )
    needs = {one.role: one.needs for one in of_roles(config, CUDA)[0]}
    actor, critic = needs["actor_train"], needs["critic"]
    output = 151936 * 4096  # elements, cut over no ranks of megatron, over all of fsdp2
    ranks = config.num_devices("critic") if kind == "fsdp2" else 1
    assert actor.moments - critic.moments == pytest.approx(2 * 4 * output / ranks, rel=1e-4)
    assert critic.buffers < actor.buffers - 4 * output / 8


JOINED = {"RAY_ADDRESS": "10.0.0.1:6379"}


@pytest.mark.parametrize("platform", ["auto", "cuda"])
def test_the_memory_told_of_a_joined_cluster_is_that_of_a_gpu(
    tmp_path: Path, platform: str
) -> None:
    cluster = f"cluster={{platform: {platform}, nodes: 2, devices_per_node: 8, memory_gb: 80}}"
    config = recipe(tmp_path, "Qwen3-8B", cluster, "pools={train: 0-15, infer: 0-15}")
    devices = devices_of(config, JOINED)
    assert devices == Devices("cuda", 80 * GIB, per_node=8)
    check_fit(config, devices)
    of_cpus = config.cluster.model_copy(update={"platform": "cpu"})
    joined = config.model_copy(update={"cluster": of_cpus})
    with pytest.raises(ConfigError, match="machine 0 needs"):
        check_fit(joined, devices_of(joined, JOINED))


GAME = "kwargs: {game: tic_tac_toe}, seats: 2, trained_seats: one"


def moment_of(config: RunConfig, platform: str = "cuda") -> dict[str, int]:
    """What is on the last device of a run at the worst moment."""
    roles, _ = of_roles(config, CUDA)
    moments = of_devices(config, roles, platform)
    return moments[max(moments)]


def test_judges_and_reward_models_are_there_while_engines_generate(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    engine = "strategy: {kind: vllm, gpu_memory_utilization: 0.85}"
    judged = recipe(
        tmp_path,
        "Qwen3-8B",
        f"judges={{own: {{pool: infer, model: {{path: {folder}}}, {engine}}}}}",
        "rewards={good: {judge: {by: own, template: '{{ response }}'}, tags: [gsm8k]}}",
    )
    found = moment_of(judged)
    assert found.keys() == {"actor_infer", "judges.own"}
    assert sum(found.values()) > 1.69 * 80 * GIB
    with pytest.raises(ConfigError, match=r"judges\.own"):
        check_fit(judged, CUDA)
    scored_by = f"rewards={{liked: {{model: {{path: {folder}}}, tags: [gsm8k]}}}}"
    rewarded = recipe(tmp_path, "Qwen3-8B", scored_by)
    found = moment_of(rewarded)
    assert found.keys() == {"actor_infer", "rewards.liked"}
    assert found["rewards.liked"] >= 2 * 8.19e9 * 0.99
    assert "rewards.liked" in moment_of(rewarded, "cpu")
    (tmp_path / "none").mkdir()
    absent = recipe(tmp_path, "Qwen3-8B", scored_by.replace(str(folder), str(tmp_path / "none")))
    assert of_roles(absent, CUDA)[1] == [str(tmp_path / "none")]


def test_encoders_and_opponents_are_there_while_engines_generate(tmp_path: Path) -> None:
    tiny_qwen3(tied=False).save_pretrained(tmp_path / "tiny")
    path = tmp_path / "tiny"
    own = "pool: all, strategy: {kind: hf}"
    config = load_config(
        Path("examples/agentic_self_play/run.yaml"),
        (
            f"model.path={path}",
            "actor_infer.strategy={kind: hf}",
            "pools={all: '0', other: '1'}",
            f"corpora={{wiki: {{path: w.jsonl, pool: other, model: {{path: {path}}}}}}}",
            f"opponents={{old: {{{own}, every: 2}}, fixed: {{{own}, model: {{path: {path}}}}}}}",
            *(f"environments.game.{key}" for key in ("trained_seats=one", "opponent=old")),
            f"environments.perfect={{env: self_play, {GAME}, opponent: fixed, tags: [perfect]}}",
        ),
    ).config
    assert moment_of(config).keys() == {"corpora.wiki"}
    of_engines = Needs(weights=10**9, kv_cache=10**9)
    engines = ("actor_infer", "opponents.old", "opponents.fixed")
    roles = [RoleMemory(name, (0,), of_engines) for name in engines]
    assert of_devices(config, roles, "cuda")[0] == dict.fromkeys(engines, 2 * 10**9)
    trainer = RoleMemory("actor_train", (0,), Needs(weights=10**10))
    pushed = of_devices(config, [trainer, *roles], "cuda")[0]
    assert {"actor_train", "actor_infer", "opponents.old"} < pushed.keys()
    assert "opponents.fixed" not in pushed


def quantised(folder: Path) -> ModelConfig:
    """A model whose matrices are packed, two elements in a byte, with factors beside them."""
    folder.mkdir()
    told = {"model_type": "qwen3"} | PUBLISHED["Qwen3-4B"][0]
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(told | packed))
    tensors = {
        "model.layers.0.mlp.blocks": torch.zeros(100, dtype=torch.uint8),
        "model.norm.weight": torch.zeros(10, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    return ModelConfig(path=str(folder))


def test_a_quantised_checkpoint_takes_the_bytes_of_its_files_in_an_engine(tmp_path: Path) -> None:
    model = quantised(tmp_path / "packed")
    sizes = sizes_of(model)
    assert sizes is not None
    assert sizes.total == pytest.approx(4.02e9, rel=0.01)
    requests = Requests(tokens=10, width=2)
    assert served(sizes, VllmConfig(tp=2), requests, None).weights == (100 + 20) // 2
    assert served(sizes, SglangConfig(), requests, None).weights == 100 + 20
    (tmp_path / "packed" / "model.safetensors").unlink()
    assert sizes_of(model) is None, "its bytes are not known"


def test_engines_keep_latent_vectors_where_hf_keeps_whole_keys() -> None:
    latent = {
        "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 100, "num_attention_heads": 4,
        "intermediate_size": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
        "v_head_dim": 24,
    }  # fmt: skip
    sizes = count(latent)
    requests = Requests(tokens=10, width=2)
    token = 2 * 3 * (16 + 8)
    assert served(sizes, VllmConfig(), requests, 0).kv_cache == 10 * token
    # Ranks of tensor parallelism have all of it, stages that of their layers.
    assert served(sizes, VllmConfig(tp=2), requests, 0).kv_cache == 10 * token
    assert served(sizes, VllmConfig(tp=2, pp=3), requests, 0).kv_cache == 10 * token // 3
    assert served(sizes, SglangConfig(kv_cache_tokens=7), requests, 0).kv_cache == 7 * token
    whole = served(sizes, HfEngineConfig(max_num_seqs=1), requests, None).kv_cache
    assert whole == 10 * 2 * 2 * 3 * 4 * (24 + 8)


def test_the_last_stage_of_megatron_has_the_logits_of_a_whole_micro_batch() -> None:
    wide = replace(SMALL, vocab=100_000)
    passes = Passes(tokens=100, chunk_tokens=10, ranks=4, width=2)
    found = trained(wide, MegatronConfig(), passes, WHOLE).buffers
    # Logits, those of the needed tokens, and a gradient.
    assert found >= 3 * 2 * 100 * 100_000
    shared = trained(wide, MegatronConfig(tp=2, cp=2), passes, WHOLE).buffers
    assert shared == pytest.approx(3 * 2 * 100 * 100_000 / 4 + (8 + 2) * 10 * 100_000 / 2, rel=0.01)
    again = trained(wide, MegatronConfig(recompute="full"), passes, WHOLE).buffers
    assert again == found - 100 * layer_activations(wide, 2), "that layer comes later"
    frozen = scored(wide, MegatronConfig(), passes).buffers
    assert frozen == pytest.approx(2 * 2 * 100 * 100_000 + 2 * 4 * 10 * 100_000, rel=0.01)
    teacher = scored(wide, MegatronConfig(), replace(passes, tells_states=True)).buffers
    assert teacher == 2 * 2 * 100 * 10 + 2 * 4 * 10 * 100_000, "hidden states, not logits"


def test_a_teacher_on_megatron_has_no_logits_of_a_whole_micro_batch(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    columns = {"messages": None, "prompt": "prompt", "completion": "completion"}
    model = {"path": str(tmp_path / "model")}
    teacher = {"pool": "all", "model": model, "strategy": {"kind": "megatron"}}
    path = write_rows_task(
        tmp_path, "distill", {"train": [row] * 8}, teachers={"t": teacher}, columns=columns
    )
    roles, _ = of_roles(load_config(path, ("teachers.t.logprob_chunk_tokens=1",)).config, CUDA)
    (needs,) = (each.needs for each in roles if each.role == "teachers.t")
    # 4 rows of 64 tokens, 64 numbers of 4 bytes each; and logits of one token.
    assert needs.buffers == 2 * 4 * (4 * 64) * 64 + 2 * 4 * len(char_tokenizer())


def test_layers_that_predict_further_tokens_count_only_where_they_are_trained(
    tmp_path: Path,
) -> None:
    folder, model = save_further(tmp_path, "deepseek_v3")
    stored = {name: tensor.numel() for name, tensor in load_file(folder / SINGLE).items()}
    sizes = sizes_of(ModelConfig(path=str(folder)))
    assert sizes is not None
    further = sizes.further
    own = sum(
        p.numel()
        for part in (model.layers, model.norms, model.projections)
        for p in part.parameters()
    )
    buffers = sum(n for name, n in stored.items() if name.endswith("e_score_correction_bias"))
    assert further.layers == 2
    assert further.elements == pytest.approx(own, abs=buffers)
    copies = sum(n for name, n in stored.items() if is_copy(name) and ".layers." in name)
    assert sizes.total == sum(stored.values()) - further.elements - copies
    counted = count(json.loads((folder / "config.json").read_text())).further
    assert counted.elements == pytest.approx(further.elements, rel=0.02)
    assert counted.experts == further.experts
    without, trains = MegatronConfig(), MegatronConfig(mtp_loss_weight=0.1)
    passes = Passes(tokens=100, chunk_tokens=10, ranks=1, width=2)
    whole = Learned(sizes.total, head=True)
    before, after = (trained(sizes, each, passes, whole) for each in (without, trains))
    assert after.weights - before.weights == (2 + 4) * further.elements
    assert after.gradients - before.gradients == 4 * further.elements
    assert after.moments - before.moments == 8 * further.elements
    assert after.buffers - before.buffers == 2 * 3 * 2 * 100 * sizes.vocab
    # The last of two stages has them whole, and a copy of the embedding.
    staged = [
        trained(replace(sizes, layers=0), each, passes, whole).gradients
        for each in (MegatronConfig(pp=2), MegatronConfig(pp=2, mtp_loss_weight=0.1))
    ]
    assert staged[1] - staged[0] == 4 * (further.elements + sizes.head)


def test_megatron_divides_norms_only_with_sequence_parallelism() -> None:
    passes = Passes(tokens=100, chunk_tokens=10, ranks=2, width=4)
    layer, ends = layer_activations(SMALL, 4), 4 * 4 * 10
    divided = trained(SMALL, MegatronConfig(tp=2, sequence_parallel=True), passes, WHOLE)
    assert divided.activations == 100 * (2 * layer + ends) // 2
    whole = trained(SMALL, MegatronConfig(tp=2), passes, WHOLE)
    norms = 2 * 3 * 4 * 10
    assert whole.activations == 100 * (2 * (norms + (layer - norms) // 2) + ends)
    kept = trained(SMALL, MegatronConfig(tp=2, recompute="full"), passes, WHOLE)
    assert kept.activations == 100 * (2 * 4 * 10 + norms + (layer - norms) // 2 + ends)
    experts = replace(SMALL, experts=800)
    assert (
        trained(experts, MegatronConfig(tp=2), passes, WHOLE).activations == divided.activations
    ), "it is on by default where there are experts"


def test_the_first_stage_of_megatron_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    small = replace(SMALL, layers=8, vocab=1, head=0, root=0)
    passes = Passes(tokens=100, chunk_tokens=10, ranks=4, width=4, micro_batches=16)
    own = 100 * 8 * layer_activations(small, 4)
    four = trained(small, MegatronConfig(pp=4), passes, WHOLE)
    assert four.activations == own  # four micro-batches of a fourth of the layers
    few = trained(small, MegatronConfig(pp=4), replace(passes, micro_batches=2), WHOLE)
    assert few.activations == own // 2
    # Chunks that take turns: 2 * 3 + 1 * 4 + 1 of eighths of the layers.
    turns = trained(small, MegatronConfig(pp=4, vpp=2), passes, WHOLE)
    assert turns.activations == own * 11 // 8


def test_a_push_has_the_buffers_of_gradients_there_that_are_never_freed(tmp_path: Path) -> None:
    def pushed(strategy: str) -> int:
        config = recipe(tmp_path, "Qwen3-4B", "actor_infer.pool=train", strategy)
        trainer, engine = Needs(10**12, 10**12, 10**12), Needs(10**12)
        roles = [RoleMemory("actor_train", (0,), trainer), RoleMemory("actor_infer", (0,), engine)]
        return sum(of_devices(config, roles, "cuda")[0].values()) // 10**12

    assert pushed("actor_train.strategy={kind: fsdp2}") == 3
    assert pushed("actor_train.strategy={kind: megatron}") == 4
    for stage, parts in ((1, 4), (2, 3), (3, 4)):  # in bfloat16, stage 1 sums in float32
        assert pushed(f"actor_train.strategy={{kind: deepspeed, stage: {stage}}}") == parts


def activations_of(config: RunConfig) -> int:
    """Bytes of the activations of `actor_train`."""
    roles, _ = of_roles(config, CUDA)
    [needs] = [each.needs for each in roles if each.role == "actor_train"]
    return needs.activations


def test_a_micro_batch_has_at_least_a_whole_pair(tmp_path: Path) -> None:
    pairs = [{"prompt": "1", "chosen": "2", "rejected": "3"}] * 8
    path = write_rows_task(tmp_path, "dpo", {"train": pairs}, reference={"pool": "all"})
    one_row = load_config(
        path, ("loss={kind: kto}", "actor_train.max_tokens_per_microbatch=64")
    ).config
    row = activations_of(one_row)
    assert row > 0
    narrow = load_config(path, ("actor_train.max_tokens_per_microbatch=64",)).config
    assert activations_of(narrow) == 2 * row
    many = load_config(path, ("actor_train.max_tokens_per_microbatch=10000",)).config
    assert activations_of(many) == 4 * 2 * row, "four pairs of a step"


@pytest.mark.parametrize(("preset", "rows"), [("spin", 32), ("online_dpo", 8)])
def test_losses_on_pairs_train_on_the_rows_of_pairs(tmp_path: Path, preset: str, rows: int) -> None:
    path = write_task(tmp_path, validation={})
    wide, narrow = (f"actor_train.max_tokens_per_microbatch={n}" for n in (100_000, 1))
    row = activations_of(load_config(path, (wide,)).config) // 16
    paired = [f"algorithm={{preset: {preset}}}"] + ["reference=null"] * (preset == "spin")
    assert activations_of(load_config(path, (wide, *paired)).config) == rows * row
    assert activations_of(load_config(path, (narrow, *paired)).config) == 2 * row


def test_fsdp2_with_tp_gathers_its_share_of_the_layers() -> None:
    few = Passes(tokens=0, chunk_tokens=0, ranks=4, width=4)
    free = replace(WHOLE, head=False)
    assert trained(SMALL, Fsdp2Config(tp=2), few, free).buffers == 4 * (400 + 2 * 300 // 2)
    kept = Fsdp2Config(tp=2, reshard_after_forward=False)
    assert trained(SMALL, kept, few, free).buffers == 4 * (400 + 600 // 2)
    assert scored(SMALL, Fsdp2Config(tp=2), few).buffers == 4 * (400 + 2 * 300 // 2)


@pytest.mark.parametrize(
    ("width", "config", "copies"),
    [
        (2, Fsdp2Config(), True),
        (4, Fsdp2Config(), False),
        (4, Fsdp2Config(reduce_dtype="bfloat16"), True),
        (4, Fsdp2Config(cpu_offload=True), True),
    ],
)
def test_one_rank_of_fsdp2_copies_the_weights_that_it_converts_or_moves(
    width: int, config: Fsdp2Config, copies: bool
) -> None:
    """PyTorch copies the weights of one rank, too, but no layer before its turn."""
    few = Passes(tokens=0, chunk_tokens=0, ranks=1, width=width)
    free = replace(WHOLE, head=False)
    layers = 700 * copies
    assert trained(SMALL, config, few, free).buffers == width * layers
    kept = config.model_copy(update={"reshard_after_forward": False})
    assert trained(SMALL, kept, few, free).buffers == width * 1000 * copies
    frozen = scored(SMALL, config, few).buffers
    assert frozen == (width * layers if config.cpu_offload else 0)
    twice, two = config.model_copy(update={"replicas": 2}), replace(few, ranks=2)
    assert trained(SMALL, twice, two, free).buffers == width * (400 + 300)


def test_zero_3_has_the_gradients_where_the_masters_are() -> None:
    passes = Passes(tokens=0, chunk_tokens=0, ranks=1, width=2)
    here, moved = (
        trained(SMALL, DeepspeedConfig(stage=3, offload_optimizer=there), passes, WHOLE)
        for there in (False, True)
    )
    assert (here.weights, here.gradients, here.moments) == (2000 + 4000, 4000, 8000)
    assert (moved.weights, moved.gradients, moved.moments) == (2000, 0, 0)
    away = DeepspeedConfig(stage=3, offload_parameters=True)
    gathered = 2 * (400 + 2 * 300)
    assert trained(SMALL, away, passes, WHOLE).buffers == here.buffers + gathered
    assert scored(SMALL, away, passes).buffers == gathered


@pytest.mark.parametrize(
    "strategy",
    [
        "{kind: fsdp2, cpu_offload: true}",
        "{kind: deepspeed, stage: 3, offload_parameters: true, offload_optimizer: true}",
    ],
)
def test_what_is_offloaded_counts_where_the_machine_is_the_device(
    tmp_path: Path, strategy: str
) -> None:
    config = recipe(tmp_path, "Qwen3-4B", f"actor_train.strategy={strategy}")

    def resident(platform: str) -> int:
        return of_roles(config, Devices(platform, 80 * GIB, per_node=8))[0][0].needs.resident

    assert resident("cuda") == 0
    assert resident("cpu") >= 12 * 4.02e9 / 4 * 0.99


def test_a_rank_of_an_engine_caches_a_whole_head_of_keys_at_least() -> None:
    """Two heads of keys of width 16; with more ranks than heads, each head is there several
    times."""
    sizes = count({
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32,
    })  # fmt: skip
    requests = Requests(tokens=10, width=2)
    token = 2 * 2 * 4 * 16
    for tp, pp, share in ((1, 1, 2), (2, 1, 1), (4, 1, 1), (4, 2, 0.5)):
        needs = served(sizes, VllmConfig(tp=tp, pp=pp), requests, 0)
        assert needs.kv_cache == 10 * token * share, (tp, pp)
        assert needs.weights == 2 * sizes.total // (tp * pp)
