"""Parts of `roll migrate`: device lists, `${...}`, and random sets of keys."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll.config import load_config
from roll.migrate.devices import as_text, devices_of
from roll.migrate.from_roll.reasons import LAST_PARTS, WHOLE_KEYS
from roll.migrate.interpolation import Interpolation, Unresolved
from roll.migrate.translate import migrate


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("list(range(0,4))", (0, 1, 2, 3)),
        ("list(range(0, 2)) + list(range(6,8)) + [9]", (0, 1, 6, 7, 9)),
        ("list(range(0, 2 * 4, 2))", (0, 2, 4, 6)),
        ("[i for i in range(3)]", (0, 1, 2)),
        ("[i + 8 for i in range(2)]", (8, 9)),
        ([3, 4], (3, 4)),
        ("[0]", (0,)),
        (5, (5,)),
    ],
)
def test_device_lists(value: Any, devices: tuple[int, ...]) -> None:
    assert devices_of(value) == devices


@pytest.mark.parametrize(
    "value",
    [
        "open('/etc/passwd')",
        "list(range(10**9))",
        "range.__class__",
        "[0, 0]",
        "[-1]",
        "",
        "[]",
        "list(range(0, 8)",
        "9 // 0",
        "[x for x in y]",
        "list(range(9**9**9))",
        None,
        1.5,
        ["a"],
        "lambda: 0",
        "[True]",
    ],
)
def test_other_expressions_are_refused_and_not_executed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        devices_of(value)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_devices_are_written_as_pools_read_them(devices: set[int]) -> None:
    from roll.config.sections.placement import parse_devices

    chosen = tuple(sorted(devices))
    assert parse_devices(as_text(chosen)) == chosen


def test_interpolations() -> None:
    tree = {
        "a": 2,
        "name": "x",
        "b": {"c": "${a}", "d": "${.c}", "e": "${..a}-${name}"},
        "whole": "${b}",
        "inner": "${b.${key}}",
        "key": "c",
        "env": "${oc.env:HOME_OF_NOBODY,7}",
        "product": "${mul:${a}, 3}",
        "gone": "${nowhere.b}",
        "loop": "${loop}",
        "there": "${hydra:runtime.cwd}",
        "through": "${whole.c}",
    }
    found = Interpolation(tree).resolved()
    assert found["b"] == {"c": 2, "d": 2, "e": "2-x"}
    assert found["whole"] == found["b"]
    assert (found["inner"], found["env"], found["product"], found["through"]) == (2, 7, 6, 2)
    for key in ("gone", "loop", "there"):
        assert isinstance(found[key], Unresolved), key


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(-1, 2, allow_nan=False),
    st.sampled_from(["bf16", "vllm", "grpo", "group", "data/a.jsonl", "list(range(0,8))", "1e-6"]),
    st.lists(st.sampled_from(["a", "b"]), max_size=2),
)
TOP = [
    "rollout_batch_size", "prompt_length", "response_length", "sequence_length", "max_steps",
    "num_return_sequences_in_group", "adv_estimator", "gamma", "lambd", "norm_mean_type",
    "norm_std_type", "whiten_advantages", "advantage_clip", "reward_clip", "add_token_level_kl",
    "init_kl_coef", "target_kl", "kl_horizon", "kl_penalty", "use_kl_loss", "kl_loss_coef",
    "entropy_loss_coef", "rl_loss_coef", "loss_agg_mode", "pg_clip", "use_pg_clip_range",
    "pg_clip_low", "pg_clip_high", "dual_clip_loss", "value_clip", "ppo_epochs", "critic_warmup",
    "max_len_mask", "difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold",
    "difficulty_loss_weight", "length_loss_weight", "importance_sampling", "ratio_type",
    "async_generation_ratio", "is_use_additional_prompts", "max_additional_running_prompts",
    "is_num_return_sequences_expand", "model_update_buffer_size_mb", "track_with", "exp_name",
    "output_dir", "seed", "rpc_timeout", "save_steps", "eval_steps", "max_ckpt_to_keep",
    "resume_from_checkpoint", "num_gpus_per_node", "pretrain", "reward_pretrain", "is_pure_opd",
    "pg_variant", "my_own_variable", "router_args.router_name", "train_infer_correction.filters",
    "train_infer_correction.is_weight.enabled", "train_infer_correction.is_weight.weight_type",
    "reward_normalization.method", "validation.data_args.file_name",
    "validation.generating_args.temperature", "validation.generating_args.num_return_sequences",
    "rewards.math_rule.tag_included", "rewards.math_rule.query_filter_config.type",
    "rewards.other.worker_cls", "rewards.llm_judge.judge_model_type", "ipo", "beta", "logits_topk",
    "kd_objective", "question_key", "chosen_key", "train_env_manager.group_size",
    "train_env_manager.tags", "custom_envs.a.env_type", "custom_envs.a.max_steps",
    *(key for key in WHOLE_KEYS),
]  # fmt: skip
ROLE = [
    "device_mapping", "infer_batch_size", "strategy_args.strategy_name", "pg_variant",
    "strategy_args.strategy_config.tensor_model_parallel_size", "use_sequence_packing",
    "strategy_args.strategy_config.fsdp_size", "strategy_args.strategy_config.sleep_level",
    "strategy_args.strategy_config.gpu_memory_utilization", "num_gpus_per_worker",
    "model_args.model_name_or_path", "model_args.dtype", "model_args.attn_implementation",
    "model_args.lora_rank", "model_args.lora_target", "model_args.lora_alpha",
    "model_args.ulysses_size", "model_args.freeze_module_prefix", "data_args.file_name",
    "data_args.messages", "data_args.domain_interleave_probs", "generating_args.temperature",
    "generating_args.top_p", "generating_args.top_k", "generating_args.stop_strings",
    "generating_args.max_new_tokens", "training_args.learning_rate", "training_args.warmup_ratio",
    "training_args.per_device_train_batch_size", "training_args.gradient_accumulation_steps",
    "training_args.lr_scheduler_type", "training_args.num_train_epochs", *LAST_PARTS,
]  # fmt: skip
ROLES = ["actor_train", "actor_infer", "reference", "critic", "sft_train", "student", "teacher"]
KEYS = TOP + [f"{role}.{key}" for role in ROLES for key in ROLE]


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=25))
def test_every_key_of_a_random_file_is_translated_or_named(keys: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"actor_train": {}}
    set_keys: list[str] = []
    for key, value in keys.items():
        if put(tree, key.split("."), value):
            set_keys.append(key)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        made = migrate(path)
    for key in set_keys:
        assert key in made.text, made.text
    assert isinstance(yaml.safe_load(made.text), dict)


def put(tree: dict[str, Any], parts: list[str], value: Any) -> bool:
    """Set a key; return False, and set nothing, if a value stands where a mapping is needed."""
    node = tree
    for part in parts[:-1]:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            return False
        node = inner
    if parts[-1] in node:
        return False
    node[parts[-1]] = value
    return True


CHOICES: dict[str, list[Any]] = {
    "rollout_batch_size": [16, 64, 100],
    "num_return_sequences_in_group": [1, 4, 8],
    "adv_estimator": ["gae", "grpo", "reinforce", "step_reinforce"],
    "norm_mean_type": [None, "batch", "group", "running"],
    "norm_std_type": [None, "batch", "group"],
    "reward_clip": [None, 10],
    "add_token_level_kl": [True, False],
    "init_kl_coef": [0.0, 0.2],
    "target_kl": [None, 6.0],
    "kl_penalty": ["kl", "mse", "full"],
    "use_kl_loss": [True, False],
    "loss_agg_mode": ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    "importance_sampling": ["token", "seq"],
    "pg_variant": [None, "topr", "tis"],
    "async_generation_ratio": [0, 0.5, 2],
    "max_steps": [5, 500],
    "critic_warmup": [0, 5],
    "track_with": ["tensorboard", "wandb", "swanlab"],
    "is_num_return_sequences_expand": [True, False],
    "train_infer_correction": [None, {"is_weight": {"enabled": True, "weight_type": "token"}}],
    "actor_train.device_mapping": ["list(range(0,8))", "list(range(0,32))"],
    "actor_infer.device_mapping": ["list(range(0,8))", "list(range(8,16))"],
    "actor_train.strategy_args.strategy_name": ["megatron_train", "fsdp2_train", "deepspeed_train"],
    "actor_train.strategy_args.strategy_config": [
        {},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"fsdp_size": 4, "ep_size": 2},
        {"expert_model_parallel_size": 8, "tensor_model_parallel_size": 4},
        "${deepspeed_zero3}",
    ],
    "actor_train.model_args.lora_rank": [None, 24],
    "actor_train.model_args.attn_implementation": ["fa2", "sdpa"],
    "actor_train.training_args.gradient_accumulation_steps": [1, 7, 64],
    "actor_train.training_args.warmup_steps": [0, 20],
    "actor_train.use_sequence_packing": [True, False],
    "actor_infer.strategy_args.strategy_name": ["vllm", "sglang", "hf_infer"],
    "actor_infer.strategy_args.strategy_config": [
        {},
        {"tensor_parallel_size": 4},
        {"sleep_level": 2, "quantization": "fp8"},
    ],
    "actor_infer.generating_args.temperature": [0.6, 1.0],
    "reference.strategy_args.strategy_name": ["hf_infer", "megatron_infer", "fsdp2_infer"],
    "validation.data_args.file_name": [None, "a.jsonl", ["a.jsonl", "b.jsonl"]],
    "validation.generating_args.temperature": [0, 0.6],
    "validation.generating_args.num_return_sequences": [1, 4],
    "rewards.math_rule.query_filter_config.type": ["no_filter", "mean_filter", "std_filter"],
    "rewards.llm_judge.judge_model_type": ["api", "inference"],
}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@example(
    {
        "actor_train.strategy_args.strategy_name": "megatron_train",
        "actor_train.strategy_args.strategy_config": {"pipeline_model_parallel_size": 2},
    }
)
@example(  # a judge, which gets no pushes
    {
        "rewards.llm_judge.judge_model_type": "inference",
        "rewards.llm_judge.strategy_args.strategy_name": "vllm",
        "rewards.llm_judge.strategy_args.strategy_config": {"sleep_level": 2},
    }
)
@given(st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in CHOICES.items()}))
def test_files_whose_values_roll_takes_give_valid_files(keys: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"pretrain": "org/model", "rewards": {"math_rule": {"world_size": 1}}}
    for key, value in keys.items():
        put(tree, key.split("."), value)
    tree["rewards"].setdefault("llm_judge", {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        ours = Path(folder) / "ours.yaml"
        ours.write_text(migrate(path).text)
        assert load_config(ours).config.pipeline == "rlvr"
