"""Composition, validation and error messages of run files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.config import RlvrConfig, load_config
from roll.config.algorithm.losses import PpoClipConfig
from roll.config.errors import ConfigError
from roll.config.sections.placement import parse_devices
from roll.config.step_plan import BatchPlan
from tests.rlvr_file import RUN, error, loaded
from tests.runs import write_task


def test_a_kernel_that_one_role_of_a_model_takes_may_be_set(run_file: Path) -> None:
    """Though another is of kind megatron, which has its own."""
    changes = ["model.attention=eager", "actor_train.strategy={kind: megatron}"]
    assert load_config(run_file, changes).config.model.attention == "eager"
    alone = [*changes, "reference=null", "algorithm={}"]
    load_config(run_file, [*alone, "actor_infer.strategy={kind: hf}"])
    assert "attention: eager is a kernel" in error(run_file, *alone)


def test_a_resolved_config_reloads_to_an_equal_one(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file, ["seed=7", "actor_infer.strategy.kind=hf"]).config
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


def test_numbers_written_with_an_exponent_are_numbers(run_file: Path) -> None:
    assert loaded(run_file).actor_train.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor_infer.strategy.tpp=2", ["actor_infer.strategy.tpp = 2", "did you mean 'tp'?"]),
        ("max_stepss=3", ["max_stepss = 3", "unknown key", "did you mean 'max_steps'?"]),
        ("lr=3", ["lr = 3", "exists at actor_train.optimizer.lr"]),
        ("actor_train.optimizer.lr=-1", ["actor_train.optimizer.lr = -1", "greater than 0"]),
        ("seed=abc", ["seed = 'abc'", "integer"]),
        ("max_steps=true", ["max_steps = True", "integer"]),
        ("pools.all=3-1", ["pools.all", "runs backwards"]),
        ("pools.all=0-1000000000000", ["pools.all", "1000000000000 is too large a number"]),
        ("seed=-1", ["seed = -1", "greater than or equal to 0"]),
        ("seed=4294967296", ["seed = 4294967296", "less than 4294967296"]),
        ("actor_train.optimizer.lr='1e-3'", ["lr = '1e-3': a number without quotes is wanted"]),
        ("stop_at=18:00", ["in base 60, as 1080", "such as 2030-01-31 18:00"]),
        ("stop_at='18:00'", ["stop_at = '18:00'", "such as 2030-01-31 18:00"]),
        ("stop_at=2030-01-31", ["stop_at", "must be a date with a time"]),
        ("rewards.sort.tags=sort", ["tags = 'sort': must be a list, such as [a, b]"]),
        ("pools=all", ["pools = 'all': must be a mapping of keys to values"]),
        ("profile={steps: [999]}", ["profile.steps: no step 999"]),
        ("profile={steps: [0], roles: [actor_infer]}", ["no role 'actor_infer' trains or scores"]),
        ("actor_train.env={ROLL_X: a}", ["actor_train.env", "'ROLL_X' is set by the run itself"]),
        ("actor_infer.env={CUDA_VISIBLE_DEVICES: 0}", ["actor_infer.env", "devices: by `pools`"]),
        ("actor_train.env={RANK: 0}", ["'RANK' is set by the run itself (process groups get"]),
        ("actor_train.env={A-B: a}", ["actor_train.env", "'A-B' is no name"]),
        ("actor_train.env={A: true}", ["actor_train.env.A", "valid string"]),
        ("actor_train.pool=al", ["no pool 'al'", "did you mean 'all'?"]),
        ("actor_infer.strategy.kind=vlm", ["'vlm'", "did you mean 'vllm'?"]),
        ("algorithm.advantage={kind: gpro}", ["'gpro'", "did you mean 'grpo'?"]),
        ("data.sources.0.columns.promt=x", ["data.sources.0.columns.promt", "'prompt'"]),
        ("data.sources.0.tag=srt", ["no reward takes the tag 'srt'", "'sort'"]),
        ("rewards.sort.tags=[sorted]", ["no reward takes the tag 'sort'"]),
        ("data.samples_per_prompt=1", ["grpo", "at least 2"]),
        ("sampling.temperature=0", ["sampling.temperature", "equal"]),
        ("sampling.top_k=1", ["sampling.top_k: 1", "equal"]),
        ("algorithm.loss=[{kind: kl}, {kind: kl}]", ["listed twice: kl"]),
        ("rewards.sort.fn=null", ["exactly one of `fn`"]),
        ("output_dir=${nope}", ["output_dir", "nope"]),
        ("cluster.devices_per_node=1|pools.all=0-3", ["names device 3", "has 1 devices"]),
        ("checkpoint.best_metric=val/x/mean@1", ["no validation makes"]),
        (
            "validation.stop={metric: val/x/mean@1, patience: 2}",
            ["validation.stop.metric: no validation makes 'val/x/mean@1'"],
        ),
        (
            "reference=null|algorithm.loss=[{kind: kl}]",
            ["needs a `reference` role; add `reference: {pool: all}`"],
        ),
        (
            "rewards.sort={fn: null, worker: 'a:B', tags: [sort], in_process: false}",
            ["works for a function (`fn`) only"],
        ),
        ("rewards.sort.tags=[]", ["rewards.sort.tags", "at least 1"]),
        ("actor_train.optimizer.betas=[0.9, 1.0]", ["betas.1 = 1.0", "less than 1"]),
        ("output_dir=''", ["output_dir", "at least 1 character"]),
        ("pools.all=-1", ["pools.all = -1", "valid string"]),
        ("algorithm.loss=[{kind: entropy}]", ["algorithm.loss.0.coef: missing"]),
        (
            "actor_train.optimizer={schedule: cosine, warmup_steps: 10}",
            ["warmup_steps: 10 steps of warm-up", "10 optimizer steps", "at most 9"],
        ),
        (
            "actor_train.optimizer={warmup_steps: 2, warmup_ratio: 0.1}",
            ["warmup_ratio: the warm-up has a number of steps already", "warmup_steps: 2"],
        ),
        (
            "actor_train.optimizer={schedule: wsd, warmup_steps: 5, decay_ratio: 0.5}",
            ["decay_ratio: 5 steps of decay after 5 of warm-up do not fit into the run's 10"],
        ),
        (
            "actor_train.optimizer={schedule: linear, decay_ratio: 0.5}",
            ["decay_ratio: concerns schedule=wsd, and this is linear"],
        ),
        (
            "actor_train.optimizer={min_lr_ratio: 0.5}",
            ["min_lr_ratio: schedule=constant does not decay"],
        ),
        (
            "cluster={nodes: 2, devices_per_node: 3}|pools.all=0-3|actor_infer.strategy.tp=2",
            ["actor_infer.strategy.tp: devices 2, 3", "several nodes of 3"],
        ),
        (
            "cluster={nodes: 3, devices_per_node: 2}|pools.all=1-4|actor_infer.strategy.tp=4",
            ["tp: devices 1, 2, 3, 4 make one engine", "takes whole nodes", "such as 0-3"],
        ),
        (
            "cluster={nodes: 2, devices_per_node: 2}|pools.all=0-2|actor_infer.strategy.tp=3",
            ["tp: devices 0, 1, 2 make one engine", "tp * pp be a multiple of 2"],
        ),
        (
            "cluster={nodes: 2, devices_per_node: 2}|pools.all=0-3"
            "|actor_infer.strategy={kind: sglang, tp: 4}",
            ["tp: devices 0, 1, 2, 3 make one engine", "this engine lies on one node", "vllm"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-5|actor_infer.strategy={tp: 2, pp: 2}",
            ["actor_infer.strategy.tp: a replica's 4 devices do not divide the 6"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-5|actor_infer.strategy={kind: sglang, tp: 4}",
            ["actor_infer.strategy.tp: a replica's 4 devices do not divide the 6"],
        ),
        (
            "actor_infer.strategy={kind: sglang}|data.sources.0.columns.images=images",
            ["data.sources.0.columns.images: with actor_infer.strategy.kind = sglang"],
        ),
        (
            "actor_infer.strategy={kind: sglang, max_model_len: 9}",
            ["actor_infer.strategy.max_model_len: 9 is less than"],
        ),
        (
            "actor_infer.strategy.speculation={kind: ngram}|sampling.temperature=0.7",
            ["actor_infer.strategy.speculation: vLLM then reports log-probs", "temperature"],
        ),
        (
            "actor_infer.strategy.speculation={kind: ngram, min_match: 5}",
            ["speculation.min_match: 5 is more than max_match = 4"],
        ),
        (
            "actor_infer.strategy={max_lora_rank: 8, endpoint: {port: 8000}}",
            ["actor_infer.strategy.endpoint", "without the adapter"],
        ),
        (
            "actor_infer.strategy.quantization=fp8_per_channel",
            ["track.verify_weights", "'never'", "actor_infer.dtype: vLLM quantises"],
        ),
        (
            "actor_infer.strategy.max_lora_rank=8|model.lora.rank=4",
            ["actor_infer.strategy.max_lora_rank: no adapter is pushed", "serve: adapter"],
        ),
        (
            "model.lora={rank: 20, serve: adapter}|actor_infer.strategy.max_lora_rank=16",
            ["max_lora_rank: 16 does not hold adapters of model.lora.rank = 20", "set it to 32"],
        ),
        (
            "model.lora={rank: 600, serve: adapter}",
            ["model.lora.rank: 600 is more than the 512 that vllm serves"],
        ),
        (
            "model.lora.serve=adapter|actor_infer.strategy={kind: sglang}",
            ["model.lora.serve: only vllm takes an adapter as it is"],
        ),
        (
            "critic={pool: all, model: {path: x, lora: {rank: 4, serve: adapter}}}|"
            "algorithm.advantage={kind: gae}",
            ["critic.model.lora.serve: no engine is pushed a critic; drop it"],
        ),
        (
            "model.lora.serve=adapter|actor_infer.strategy={kind: hf}",
            ["model.lora.serve: only vllm takes an adapter as it is"],
        ),
        (
            "model.lora.serve=adapter|actor_infer.strategy={max_lora_rank: 16, pp: 2}",
            ["actor_infer.strategy.pp: a stage refuses", "model.lora.serve to merged"],
        ),
        (
            "model.lora.rank=4|actor_infer.strategy.sleep_level=2",
            ["actor_infer.strategy.sleep_level: 2 drops the weights", "use 1 with model.lora"],
        ),
        (
            "model.freeze=[vision]|actor_infer.strategy.sleep_level=2",
            ["actor_infer.strategy.sleep_level: 2 drops the weights", "model.freeze"],
        ),
        (
            "model.freeze=[eyes]",
            ["model.freeze", "no part of a model (vision, projector", "pattern of"],
        ),
        (
            "model.freeze=[vision]|model.lora.rank=4",
            ["model.freeze: an adapter (model.lora) leaves all weights as they are"],
        ),
        (
            "model.lora={rank: 4, parts: [projector]}|actor_train.strategy={kind: megatron}",
            ["model.lora.parts: megatron adapts the language model only"],
        ),
        ("model.lora.dropout=0.1", ["model.lora.dropout", "must not depend on chance"]),
        ("actor_infer.strategy.max_lora_rank=3", ["actor_infer.strategy.max_lora_rank = 3"]),
        (
            "reference.strategy={kind: fsdp2, activation_checkpointing: true}",
            ["reference.strategy.activation_checkpointing", "backward pass"],
        ),
        (
            "reference.strategy={kind: fsdp2, reduce_dtype: bfloat16}",
            ["reference.strategy.reduce_dtype", "backward pass"],
        ),
        (
            "reference.strategy={kind: deepspeed, offload_optimizer: true}",
            ["reference.strategy.offload_optimizer", "backward pass"],
        ),
        (
            "actor_train.strategy={kind: deepspeed, stage: 0, offload_optimizer: true}",
            ["offload_optimizer needs stage 1 or above"],
        ),
        (
            "actor_train.strategy={kind: deepspeed, offload_parameters: true}",
            ["offload_parameters needs stage 3, stage is 2"],
        ),
        ("actor_train.strategy={kind: deepspeed, stage: 4}", ["actor_train.strategy", "stage"]),
        (
            "reference.strategy={kind: megatron, recompute: full}",
            ["reference.strategy.recompute", "backward pass"],
        ),
        (
            "reference.strategy={kind: megatron, distributed_optimizer: true}",
            ["reference.strategy.distributed_optimizer", "backward pass"],
        ),
        (
            "actor_train.strategy={kind: fsdp2, offload_activations: true}",
            ["offload_activations", "set activation_checkpointing: true"],
        ),
        (
            "actor_train.strategy={kind: deepspeed, offload_activations: true}",
            ["offload_activations", "set activation_checkpointing: true"],
        ),
        (
            "actor_train.strategy={kind: megatron, overlap_param_gather: true, "
            "overlap_grad_reduce: true}",
            ["overlap_param_gather", "set distributed_optimizer: true"],
        ),
        (
            "actor_train.strategy={kind: megatron, overlap_param_gather: true}",
            ["set distributed_optimizer and overlap_grad_reduce: true"],
        ),
        (
            "reference.strategy={kind: megatron, overlap_grad_reduce: true}",
            ["reference.strategy.overlap_grad_reduce", "backward pass"],
        ),
        (
            "actor_train.strategy={kind: megatron, mtp_loss_weight: 1, overlap_grad_reduce: true}",
            ["mtp_loss_weight", "for which overlap_grad_reduce would wait"],
        ),
        (
            "reference.strategy={kind: megatron, mtp_loss_weight: 0.1}",
            ["reference.strategy.mtp_loss_weight", "backward pass"],
        ),
        (
            "model.lora.rank=4|actor_train.strategy={kind: megatron, mtp_loss_weight: 0.1}",
            ["actor_train.strategy.mtp_loss_weight: an adapter (model.lora) leaves all weights"],
        ),
        (
            "actor_train.strategy={kind: megatron, mtp_loss_weight: 0.1, cp: 2}",
            ["mtp_loss_weight is for ranks with whole rows, and cp is 2"],
        ),
        (
            "actor_train.strategy={kind: megatron, mtp_loss_weight: 0.1, aux_loss_coef: 0.1}",
            ["mtp_loss_weight", "cannot leave padding out of the loss that balances experts"],
        ),
        (
            "actor_train.strategy={kind: megatron, mtp_detached: false}",
            ["mtp_detached is false, and without mtp_loss_weight no layer predicts"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-2|actor_train.strategy={kind: fsdp2, "
            "ulysses: 2}",
            ["actor_train.strategy: ulysses * tp = 2 does not divide the 3 devices of pool 'all'"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-5|actor_train.strategy={kind: fsdp2, "
            "tp: 2, replicas: 2}",
            ["actor_train.strategy: replicas * tp = 4 does not divide the 6 devices of pool 'all'"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-5|actor_train.strategy={kind: fsdp2, "
            "ep: 2, replicas: 2}",
            ["actor_train.strategy: replicas * ep = 4 does not divide the 6 devices of pool 'all'"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-1|actor_train.strategy={kind: fsdp2, "
            "ep: 2, tp: 2}",
            ["actor_train.strategy", "ep is 2 and tp is 2", "leave one of them out"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-1|model.compile=true|"
            "actor_train.strategy={kind: fsdp2, ep: 2}",
            ["model.compile: with actor_train.strategy.ep ranks exchange tokens"],
        ),
        (
            "model.lora={rank: 4}|cluster.devices_per_node=8|pools.all=0-1|"
            "actor_train.strategy={kind: fsdp2, tp: 2}",
            ["actor_train.strategy.tp: adapters (model.lora) are not cut"],
        ),
        (
            "cluster.devices_per_node=8|pools.all=0-1|model.attention=flash_attention_2|"
            "actor_train.strategy={kind: fsdp2, ulysses: 2}",
            [
                "model.attention: flash_attention_2 takes no rows such as actor_train.strategy."
                "ulysses makes"
            ],
        ),
        (
            "model.attention=eager|actor_train.packing=true",
            ["model.attention: eager takes no rows such as actor_train.packing makes; use sdpa"],
        ),
        (
            "actor_train.strategy={kind: megatron, vpp: 2}",
            ["vpp is 2 but pp is 1"],
        ),
        (
            "actor_train.strategy={kind: megatron, pp: 2, layers: [3]}",
            ["layers names 1 chunks, expected pp * vpp = 2"],
        ),
        (
            "actor_train.strategy={kind: megatron, cp: 2, tp: 2}",
            ["actor_train.strategy: tp * cp * pp = 4 does not divide the"],
        ),
        (
            "actor_train.strategy={kind: megatron, sequence_parallel: true}",
            ["sequence_parallel needs tp above 1"],
        ),
        (
            "pools.all=0-2|actor_train.strategy={kind: megatron, tp: 2}",
            ["actor_train.strategy: tp * pp = 2 does not divide the 3 devices of pool 'all'"],
        ),
        (
            "pools.all=0-1|actor_train.strategy={kind: megatron, tp: 2, ep: 2}",
            ["actor_train.strategy: etp * ep * pp = 4 does not divide the 2 devices"],
        ),
        (
            "algorithm.advantage={kind: distill}",
            ["at least one; add `teachers: {NAME: {pool: all, model: {path: FOLDER}}}`"],
        ),
        ("algorithm.advantage={kind: gae}", ["a `critic` role; add `critic: {pool: all}`"]),
        ("critic={pool: all}", ["nothing uses its values"]),
        (
            "algorithm.advantage={kind: prime}",
            ["a `process_reward` role; add `process_reward: {pool: all}`"],
        ),
        ("process_reward={pool: all}", ["nothing uses its rewards"]),
        (
            "process_reward={pool: all}|algorithm.advantage={kind: prime}|reference=null",
            ["reference: prime needs a `reference` role"],
        ),
        (
            "critic={pool: all, warmup_steps: 10}|algorithm.advantage={kind: gae}",
            ["critic.warmup_steps: 10 leaves the policy none of the 10 steps"],
        ),
        ("algorithm.preset=grp", ["algorithm.preset = 'grp'", "did you mean 'grpo'"]),
        (
            "algorithm={advantage: {kind: gdpo}, reward_shaping: [{kind: clip, low: 0}]}",
            ["algorithm.reward_shaping: gdpo normalises each reward by itself"],
        ),
        ("algorithm.aggregation_tokens=8", ["only `constant` aggregation", "token_mean"]),
        ("algorithm.advantage={kind: pass_k, k: 8}", ["algorithm.advantage.k: 8 of 8 samples"]),
        (
            "algorithm.advantage={kind: reinforce_pp, baseline: group}|data.samples_per_prompt=1",
            ["reinforce_pp compares", "at least 2"],
        ),
    ],
)
def test_a_mistake_is_named_with_key_value_and_advice(
    run_file: Path, override: str, parts: list[str]
) -> None:
    message = error(run_file, *override.split("|"))
    assert all(part in message for part in parts), message


def test_a_mistake_in_a_file_is_named_with_its_line(run_file: Path) -> None:
    run_file.write_text(RUN.replace("max_steps: 10", "max_step: 10"))
    message = error(run_file)
    assert f"{run_file}:3: max_step = 10: unknown key; did you mean 'max_steps'?" in message
    assert "max_steps: missing" in message


def test_a_batch_that_does_not_divide_names_the_nearest_that_do(run_file: Path) -> None:
    message = error(run_file, "actor_train.samples_per_update=100")
    assert "100 does not divide the 256 samples" in message
    assert "64 and 128" in message


def test_ranks_that_do_not_divide_an_update_are_refused(run_file: Path) -> None:
    message = error(run_file, "pools.all=0-2")
    assert "data.prompts_per_step: the 256 samples of a step" in message
    assert "do not divide over the 3 devices" in message
    assert "nearest that do: 30 and 33" in message


def test_defaults_merge_left_to_right_and_the_file_wins(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_steps: 1\nsampling: {top_p: 0.5}\n")
    (tmp_path / "more.yaml").write_text("seed: 2\nsampling: {temperature: 0.7}\n")
    run_file.write_text("defaults: [base.yaml, more.yaml]\n" + RUN)
    config = loaded(run_file)
    assert (config.seed, config.max_steps) == (2, 10)
    assert (config.sampling.top_p, config.sampling.temperature) == (0.5, 0.7)


def test_a_reference_that_is_no_mapping_is_told_to_be_one(run_file: Path) -> None:
    for value in ("train", "3", "[1]"):
        assert ": must be a mapping with the keys " in error(run_file, f"reference={value}")


def test_a_file_that_two_defaults_name_undoes_nothing(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_steps: 1\nsampling: {top_p: 0.5}\n")
    (tmp_path / "one.yaml").write_text("defaults: [base.yaml]\nseed: 2\n")
    (tmp_path / "two.yaml").write_text("defaults: [./base.yaml]\nsampling: {top_p: 0.7}\n")
    run_file.write_text("defaults: [one.yaml, two.yaml]\n" + RUN)
    config = loaded(run_file)
    assert (config.seed, config.sampling.top_p) == (2, 0.7)


def test_a_cycle_of_defaults_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n")
    message = error(tmp_path / "a.yaml")
    assert "cycle" in message
    assert "a.yaml -> " in message


def test_a_changed_kind_inherits_nothing(tmp_path: Path, run_file: Path) -> None:
    config = loaded(run_file, "actor_infer.strategy.kind=hf")
    assert config.actor_infer.strategy.kind == "hf"
    over = tmp_path / "over.yaml"
    over.write_text("defaults: [run.yaml]\nactor_infer: {strategy: {kind: hf}}\n")
    assert loaded(over).actor_infer.strategy.kind == "hf"


@pytest.mark.parametrize(
    ("written", "value"),
    [("1_000", 1000), ("0x10", 16), ("0b11", 3), ("007", 7), ("100", 100)],
)
def test_numbers_that_show_their_base_are_taken(
    tmp_path: Path, run_file: Path, written: str, value: int
) -> None:
    over = tmp_path / "over.yaml"
    over.write_text(f"defaults: [run.yaml]\nmax_steps: {written}\n")
    assert loaded(over).max_steps == value


def test_broken_yaml_and_missing_files_are_one_line(tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    assert "bad.yaml:2: not valid YAML" in error(tmp_path / "bad.yaml")
    (tmp_path / "odd.yaml").write_text("seed: 1\nresume: a\x1bb\n")
    (tmp_path / "over.yaml").write_text("defaults: [odd.yaml]\n")
    for name in ("odd.yaml", "over.yaml"):
        assert "odd.yaml:2: not valid YAML: the character U+001B" in error(tmp_path / name)
    assert "did you mean 'run.yaml'?" in error(tmp_path / "rn.yaml")
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    assert "set twice" in error(tmp_path / "twice.yaml")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("resume: !!binary aGk=", "resume: `!!binary` is no kind of value that a run file"),
        ("resume: !!set {a, b}", "resume: `!!set` is no kind of value"),
        ("resume: !mine a", "resume: `!mine` is no kind of value"),
        ("seed: !!int abc", "seed: 'abc' cannot be read as `int`"),
        ("cluster: {nodes: !!bool abc}", "cluster.nodes: 'abc' cannot be read as `bool`"),
        ("stop_at: !!timestamp abc", "stop_at: `!!timestamp` is no kind of value"),
        (f"seed: {'9' * 5000}", f"seed: '{'9' * 56}... cannot be read as `int`"),
        ("rewards: {on: {fn: exact}}", "rewards.on: YAML reads the key `on` as true or false"),
        ('resume: "a\\0b"', "resume: 'a\\x00b' holds the character U+0000"),
        ("null: 1", "null: YAML reads the key `null` as null; put it in quotes"),
        ("resume: '${seed'", "resume: no viable alternative"),
        ("max_steps: 010", "max_steps: YAML reads 010 in base 8, as 8; write 8 if that is meant"),
        ("max_steps: -0_17", "max_steps: YAML reads -0_17 in base 8, as -15"),
        ("stop_at: 12:30", "stop_at: YAML reads 12:30 in base 60, as 750"),
        ("max_hours: 1:30.5", "max_hours: YAML reads 1:30.5 in base 60, as 90.5"),
    ],
)
def test_a_value_that_yaml_reads_as_no_json_is_named_with_its_line(
    tmp_path: Path, run_file: Path, line: str, told: str
) -> None:
    over = tmp_path / "over.yaml"
    over.write_text(f"defaults: [run.yaml]\n{line}\n")
    assert f"over.yaml:2: {told}" in error(over)


def test_a_file_that_is_no_text_or_no_mapping_is_told_with_its_line(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_bytes("seed: 1\nresume: für\n".encode("latin-1"))
    assert "over.yaml:2: the byte 0xFC is no UTF-8; save the file as UTF-8" in error(over)
    for text, told in (("a text\n", "single value"), ("# first\n- a\n", "list")):
        over.write_text(text)
        assert f": must be a mapping of keys to values, is a {told}" in error(over)
    over.write_text(f"judges: {'{a: ' * 2000}1{'}' * 2000}\n")
    assert "hundreds of levels deep" in error(over)


def test_keys_that_come_from_a_merge_have_a_line(tmp_path: Path, run_file: Path) -> None:
    over = tmp_path / "over.yaml"
    text = "defaults: [run.yaml]\nalgorithm:\n  <<: &base\n    preset: {}\n  {}\n"
    over.write_text(text.format("gspo", "advantage: {whiten: no}"))
    assert "over.yaml:5: algorithm.advantage" in error(over)
    over.write_text(text.format("gspoo", "advantage: {}"))
    assert "over.yaml:4: algorithm.preset = 'gspoo': unknown; did you mean 'gspo'?" in error(over)


def test_names_that_are_no_text_and_aliases_of_themselves_are_one_line(
    tmp_path: Path, run_file: Path
) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("defaults: [run.yaml]\npipeline: [rlvr]\n")
    assert "pipeline = ['rlvr']: unknown" in error(over)
    over.write_text("defaults: [run.yaml]\nalgorithm: {preset: [gspo]}\n")
    assert "algorithm.preset = ['gspo']: unknown" in error(over)
    over.write_text("defaults: [run.yaml]\nmodel: &m {a: *m}\n")
    assert "over.yaml: an alias (`*name`) stands inside of its own anchor" in error(over)


def test_a_config_never_changes(run_file: Path) -> None:
    config = load_config(run_file).config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
def test_device_lists_are_read_as_written(devices: list[int]) -> None:
    assert parse_devices(",".join(map(str, devices))) == tuple(devices)


def test_the_batch_plan_is_the_arithmetic_of_the_config(run_file: Path) -> None:
    config = loaded(
        run_file, "pools.all=0-1", "actor_train.samples_per_update=64", "actor_train.epochs=2"
    )
    plan = BatchPlan.of(config)
    assert (plan.samples, plan.updates, plan.samples_per_update_and_rank) == (256, 8, 32)
    assert plan.replicas == 2


def test_the_batch_plan_counts_the_rows_of_pairs(tmp_path: Path) -> None:
    path = write_task(tmp_path, reference=None)
    narrow = "actor_train.max_tokens_per_microbatch=1"
    for preset, passes in (("reinforce_pp", 16), ("spin", 16), ("online_dpo", 4)):
        more = ["reference={pool: all}"] if preset == "online_dpo" else []
        config = load_config(path, [narrow, f"algorithm={{preset: {preset}}}", *more]).config
        assert isinstance(config, RlvrConfig)
        assert BatchPlan.of(config).max_microbatches_per_update == passes


def test_an_engine_may_have_all_devices_of_several_nodes(run_file: Path) -> None:
    nodes = ["cluster={nodes: 3, devices_per_node: 2}", "pools={train: 0-1, infer: 2-5}"]
    engine = ["actor_infer={pool: infer, strategy: {tp: 2, pp: 2}}", "actor_train.pool=train"]
    config = load_config(run_file, [*nodes, *engine, "reference=null"]).config
    assert isinstance(config, RlvrConfig)
    first = BatchPlan.of(config).lines()[0]
    assert first.endswith("generated by 1 engine(s), each over 2 machines")


HELD_OUT = "validation.sets={test: {path: b.jsonl, tag: sort}}"


@pytest.mark.parametrize(
    "kind", ["mean@1", "mean@6", "pass@1", "pass@2", "pass@4", "pass@6", "maj@6"]
)
def test_every_metric_of_a_validation_can_choose_the_best_checkpoint(
    run_file: Path, kind: str
) -> None:
    many = [HELD_OUT, "validation.samples_per_prompt=6"]
    best = [f"checkpoint.best_metric=val/test/{kind}", "checkpoint.keep_best=1"]
    assert load_config(run_file, [*many, *best]).config.checkpoint.keep_best == 1
    message = error(run_file, *many, "checkpoint.best_metric=val/test/pass@3")
    assert "no validation makes 'val/test/pass@3'; did you mean" in message


def test_checkpoints_that_no_validation_meets_cannot_be_best(run_file: Path) -> None:
    best = ["checkpoint.keep_best=1", "checkpoint.best_metric=val/test/mean@1", HELD_OUT]
    message = error(run_file, *best, "checkpoint.every=4", "validation.every=3")
    assert "checkpoint.keep_best" in message
    assert "meet first at step 12" in message
    load_config(run_file, [*best, "checkpoint.every=4", "validation.every=2"])


@pytest.mark.parametrize(("value", "devices"), [("0", (0,)), ("3", (3,)), ("0-1,4", (0, 1, 4))])
def test_a_pool_of_one_device_can_be_named_by_its_number(
    run_file: Path, value: str, devices: tuple[int, ...]
) -> None:
    config = load_config(run_file, [f"pools.all={value}", "data.prompts_per_step=30"]).config
    assert parse_devices(config.pools["all"]) == devices


@given(
    prompts=st.integers(1, 40),
    samples=st.integers(2, 12),
    update=st.none() | st.integers(1, 60),
    ranks=st.integers(1, 7),
)
def test_what_a_refused_batch_suggests_is_accepted(
    prompts: int, samples: int, update: int | None, ranks: int
) -> None:
    batch = {"prompts_per_step": prompts, "samples_per_prompt": samples}
    found = batch_problem(batch, update, ranks)
    if found is None:
        return
    key, suggested = found
    for number in suggested:
        if key == "data.prompts_per_step":
            again = batch_problem(batch | {"prompts_per_step": number}, None, ranks)
        else:
            again = batch_problem(batch, number, ranks)
        assert again is None, (key, number)


def batch_problem(
    batch: dict[str, int], update: int | None, ranks: int
) -> tuple[str, list[int]] | None:
    """The key that is refused and the values suggested for it, if the batch does not divide."""
    run = yaml.safe_load(RUN)
    del run["reference"]
    run["pools"] = {"all": f"0-{ranks - 1}"}
    run["data"] |= batch
    run["actor_train"] = {"pool": "all", "samples_per_update": update}
    try:
        RlvrConfig.model_validate_json(json.dumps(run))
    except ValidationError as caught:
        (line,) = str(caught.errors()[0]["ctx"]["error"]).splitlines()
        numbers = [int(n) for n in line.rpartition("nearest that do: ")[2].split(" and ")]
        return line.split(":")[0], numbers
    return None


def test_a_preset_lies_under_everything_else(run_file: Path) -> None:
    preset = "algorithm={preset: dapo}"
    (term,) = loaded(run_file, preset).algorithm.loss
    assert isinstance(term, PpoClipConfig)
    assert term.clip_high == 0.28
    algorithm = loaded(run_file, preset, "algorithm.loss.0.clip_high=0.3").algorithm
    (term,) = algorithm.loss
    assert isinstance(term, PpoClipConfig)
    assert (algorithm.preset, term.clip_high) == ("dapo", 0.3)


def test_null_drops_an_inherited_reward_and_a_worker_replaces_a_function(run_file: Path) -> None:
    child = run_file.parent / "child.yaml"
    child.write_text(
        f"defaults: [{run_file.name}]\n"
        "rewards:\n  sort: null\n  mine: {worker: 'mine:Mine', tags: [sort]}\n"
    )
    assert list(loaded(child).rewards) == ["mine"]
    child.write_text(
        f"defaults: [{run_file.name}]\nrewards:\n  sort: {{worker: 'mine:Mine', tags: [sort]}}\n"
    )
    reward = loaded(child).rewards["sort"]
    assert (reward.fn, reward.worker) == (None, "mine:Mine")


@pytest.mark.parametrize("nothing", ["validation: null", "validation:", "validation: {sets: null}"])
def test_null_stands_for_no_validation(run_file: Path, nothing: str) -> None:
    parent = run_file.parent / "parent.yaml"
    sets = "validation: {sets: {test: {path: b.jsonl, tag: sort}}}"
    parent.write_text(f"defaults: [{run_file.name}]\n{sets}\n")
    assert loaded(parent).validation.sets
    child = run_file.parent / "child.yaml"
    child.write_text(f"defaults: [{parent.name}]\n{nothing}\njudges: null\n")
    assert loaded(child).validation.sets == {}
    assert loaded(parent, "validation=null").validation.sets == {}


def test_without_rewards_nothing_may_ask_for_them(run_file: Path) -> None:
    terms = "algorithm.loss=[{kind: pg},{kind: entropy,coef: 0.1}]"
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, ["rewards.sort=null", terms])
    told = str(caught.value)
    assert "the loss term pg follows the advantage grpo" in told
    assert "the loss term entropy" not in told


def test_what_changes_advantages_is_refused_where_nothing_reads_them(run_file: Path) -> None:
    shaped = "algorithm.advantage_shaping=[{kind: clip, limit: 1.0}]"
    with pytest.raises(ConfigError, match=r"advantage_shaping: changes advantages, which entropy"):
        load_config(run_file, ["algorithm.loss=[{kind: entropy,coef: 0.1}]", shaped])
    for changes, key in (
        (["algorithm.advantage.kind=rloo"], "algorithm.advantage"),
        (["rewards.own={fn: 'a:b', tags: [sort], process: true}"], "rewards.own.process"),
    ):
        told = error(run_file, "algorithm.loss=[{kind: entropy,coef: 0.1}]", *changes)
        assert f"{key}: changes advantages, which entropy does not read" in told
        pairs = ["algorithm.preset=online_dpo", *changes]
        if key == "algorithm.advantage":
            assert f"{key}: changes advantages, which preference" in error(run_file, *pairs)
        else:  # pairs are chosen by all rewards
            load_config(run_file, pairs)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("algorithm.kl_in_reward", "algorithm.kl_in_reward={}"),
        ("algorithm.reward_shaping", "algorithm.reward_shaping=[{kind: clip, low: 0}]"),
        ("rewards.own.process", "rewards.own={fn: 'a:b', tags: [sort], process: true}"),
    ],
)
def test_what_changes_rewards_is_refused_where_only_teachers_judge(
    run_file: Path, key: str, change: str
) -> None:
    teacher = "teachers={t: {pool: all, model: {path: model}, tags: [sort]}}"
    for where in ("algorithm", "domains.sort"):
        distill = f"{where}.advantage={{kind: distill}}"
        told = error(run_file, teacher, distill, change)
        assert f"{key}: distill with mix = 0 learns from teachers alone" in told
        load_config(run_file, [teacher, distill, f"{where}.advantage.mix=0.5", change])


def test_a_model_that_no_role_loads_is_refused_with_its_settings(run_file: Path) -> None:
    own = "actor_train.model.path=own"
    load_config(run_file, [own])
    for name, value in (
        ("lora", "{rank: 4}"),
        ("freeze", "[language]"),
        ("dtype", "bfloat16"),
        ("tokenizer", "other"),
    ):
        told = error(run_file, own, f"model.{name}={value}")
        assert f"model.{name}: every role loads actor_train.model or a model of its own" in told
        load_config(run_file, [f"actor_train.model={{path: own, {name}: {value}}}"])


def test_parts_are_those_of_the_model_that_is_trained(run_file: Path) -> None:
    own = "actor_train.model={path: own, lora: {parts: [vision]}}"
    beside = "process_reward={pool: all, strategy: {kind: megatron, mtp_loss_weight: 0.1}}"
    told = error(run_file, own, beside, "algorithm.advantage={kind: prime}")
    assert "actor_train.model.lora.parts: megatron adapts the language model only" in told
    assert "process_reward.strategy.mtp_loss_weight: trains layers for engines" in told


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("reference.model", ["reference.model.path=x"]),
        ("teachers.t.model", ["teachers={t: {pool: all, tags: [sort], model: {path: x}}}"]),
        ("rewards.m.model", ["rewards.m={model: {path: x}, tags: [sort]}"]),
        ("judges.j.model", ["judges.j={pool: all, model: {path: x}}"]),
    ],
)
def test_parts_of_a_model_that_is_not_trained_are_not_frozen(
    run_file: Path, key: str, changes: list[str]
) -> None:
    told = error(run_file, *changes, f"{key}.freeze=[vision]")
    assert f"{key}.freeze: nothing of this model is trained" in told


JUDGE = (
    "judges={j: {pool: all, model: {path: judge}, max_question_tokens: 50, strategy: {kind: vllm}}}"
)
JUDGED = "rewards.asked={judge: {by: j, template: x, max_new_tokens: 20}, tags: [sort]}"


@pytest.mark.parametrize(
    ("overlap", "changes"),
    [
        (False, []),
        (True, ["rollout.max_staleness=1"]),
        (True, ["rewards.m={model: {path: x}, tags: [sort]}"]),
        (True, [JUDGE, JUDGED]),
    ],
)
def test_roles_overlap_where_others_compute_while_engines_generate(
    run_file: Path, overlap: bool, changes: list[str]
) -> None:
    assert load_config(run_file, changes).config.roles_overlap is overlap


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (
            "rollout={in_flight: restart, max_staleness: 1, loop: {kind: 'tests.own_parts:Plain'}}",
            "rollout.in_flight: restart begins a request anew",
        ),
        (
            "validation.sets.v={path: b.jsonl, tag: sort, weight: 2.0}",
            "validation.sets.v.weight: all rows of each set are validated",
        ),
        (
            "critic={pool: all, logprob_chunk_tokens: 8}|algorithm.advantage={kind: gae}",
            "critic.logprob_chunk_tokens: a critic has values and no logits",
        ),
        (
            "rewards.sort.max_tokens_per_microbatch=8",
            "`max_tokens_per_microbatch` concerns the passes of a `model`",
        ),
        (
            "actor_train.strategy={kind: deepspeed, stage: 2, whole_below_elements: 5}",
            "whole_below_elements: stage 2 divides no parameters",
        ),
        (
            "judges.j.strategy={kind: vllm, max_model_len: 69}",
            "judges.j.strategy.max_model_len: 69 is less th",
        ),
        (
            "judges.j.strategy={kind: sglang, max_model_len: 69}",
            "69 is less than the 70 tokens of max_question_tokens + max_new_tokens",
        ),
        (
            "judges.j.strategy={kind: vllm, max_lora_rank: 8}",
            "judges.j.strategy.max_lora_rank: no adapter is",
        ),
        (
            "judges.j.strategy={kind: vllm, speculation: {kind: ngram, min_match: 5}}",
            "judges.j.strategy.speculation.min_match: 5 is more than max_match = 4",
        ),
        (
            "judges.j.strategy={kind: vllm, quantization: fp8_per_channel}",
            "judges.j.dtype: vLLM quantises weights of bfloat16 only",
        ),
        (
            "track={rollouts_every: null, rollouts_samples: 8}",
            "rollouts_samples: with rollouts_every: null nothing is dumped",
        ),
        ("checkpoint.higher_is_better=true", "checkpoint.higher_is_better: is for best_metric"),
        (
            "data={chat_template: false, chat_template_kwargs: {enable_thinking: false}}",
            "chat_template_kwargs: are for the tokenizer's own template",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(run_file: Path, override: str, part: str) -> None:
    judges = (JUDGE, JUDGED) if override.startswith("judges") else ()
    assert part in error(run_file, *judges, *override.split("|"))


def test_engines_of_judges_hold_a_question_and_its_answer(run_file: Path) -> None:
    load_config(run_file, [JUDGE, JUDGED, "judges.j.strategy={kind: vllm, max_model_len: 70}"])
