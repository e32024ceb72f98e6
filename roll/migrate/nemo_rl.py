"""Translation of run files of NeMo RL: GRPO, SFT, DPO and reward models, with the common keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.config.errors import ConfigError
from roll.migrate.job import MEGATRON_SIZES, Job, needs_reference, packs
from roll.migrate.optimizers import put_kind
from roll.migrate.stand_ins import put_stand_in

PIPELINES = {"grpo": "rlvr", "sft": "sft", "dpo": "dpo", "rm": "reward_model"}
DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "bf16": "bfloat16"}
REASONS = {
    "cluster.num_nodes": "follows from the devices in `pools`",
    "logger": "trackers: `track`; metrics.jsonl has all metrics",
    "checkpointing": "see `checkpoint`",
    "policy.make_sequence_length_divisible_by": "rows are not padded to a multiple",
    "policy.logprob_batch_size": "micro-batches are made by tokens",
    "policy.dynamic_batching": "micro-batches are always made by tokens",
    "policy.sequence_packing": "see `packing`",
    "policy.tokenizer": "the tokenizer and its template are the model's",
    "policy.dtensor_cfg": "off, or a setting that fsdp2 does not have",
    "policy.megatron_cfg": "off, or a setting that megatron does not have",
    "policy.generation": "a setting that the engine does not have",
    "policy.optimizer": "a setting that optimizers do not have here",
    "policy.scheduler": "schedules: constant, linear, cosine, inverse_sqrt, wsd, with a warm-up",
    "policy.reward_model_cfg": "the head of a model follows from the pipeline",
    "env": "environments of NeMo RL: rewards here, or pipeline: agentic (docs/agents.md)",
    "data": "a setting that sources do not have",
    "grpo": "has no counterpart here",
    "loss_fn": "has no counterpart here, or is off",
}
"""Why keys have no counterpart, by the key or the mapping around it."""


def translate_nemo_rl(job: Job) -> None:
    """Translate a run file of NeMo RL; ConfigError if it is of a kind that is not translated."""
    section = next((name for name in PIPELINES if job.keys.has(name)), None)
    if section is None:
        raise ConfigError(
            f"{job.keys.source.path}: has none of the sections {', '.join(PIPELINES)}; other "
            "algorithms of NeMo RL are not translated"
        )
    job.draft.put("pipeline", PIPELINES[section])
    _put_run(job, section)
    devices = max(1, (job.keys.whole("cluster.num_nodes") or 1) * _per_node(job))
    pool = job.pool(tuple(range(devices)), "all")
    length = job.keys.whole("policy.max_total_sequence_length") or 1024
    _put_model(job)
    if section == "grpo":
        _put_grpo(job, pool, devices, length)
    else:
        _put_rows(job, section, length)
    _put_trainer(job, pool, devices, length, rl=section == "grpo")
    if section == "dpo" or (section == "grpo" and needs_reference(job)):
        job.put("reference.pool", pool, note="all roles share the devices")
        job.put("reference.strategy.kind", "hf", note="a copy of the model on each device")
        job.put("reference.model.path", job.draft.get("model.path"), "policy.model_name")
        job.put("reference.model.dtype", job.draft.get("model.dtype"), "policy.precision")
    job.put_pools(_per_node(job), ["cluster.gpus_per_node"])
    job.why_all(REASONS)


def _per_node(job: Job) -> int:
    return max(1, job.keys.whole("cluster.gpus_per_node") or 1)


def _put_run(job: Job, section: str) -> None:
    """Write what concerns the run as a whole; `section` is that of the algorithm."""
    key = "checkpointing.checkpoint_dir"
    job.put("output_dir", job.keys.text(key) or "results", key)
    job.count(f"{section}.seed", "seed", low=0)
    if job.count(f"{section}.max_num_steps", "max_steps") is None and section == "grpo":
        job.put("max_steps", 1000, note="NeMo RL counts epochs; set it")
        job.ask("max_steps: set it; a run from samples has no epochs")
    if section != "grpo":
        epochs = job.keys.number(f"{section}.max_num_epochs")
        if epochs and epochs > 0:
            job.put("epochs", float(epochs), f"{section}.max_num_epochs")
        elif job.draft.get("max_steps") is None:
            job.put("epochs", 1.0)
    job.why(f"{section}.max_num_epochs", "a run from samples is as long as `max_steps`")
    if job.keys.flag("checkpointing.enabled") is not False:
        job.count("checkpointing.save_period", "checkpoint.every")
        job.count("checkpointing.ft_keep_latest_k", "checkpoint.keep_last")
    job.move("logger.tensorboard_enabled", "track.tensorboard", "flag")
    if job.keys.flag("logger.wandb_enabled"):
        told = ("logger.wandb_enabled", "logger.wandb.project")
        job.put_services(["wandb"], job.keys.text("logger.wandb.project") or "nemo-rl", *told)


def _put_model(job: Job) -> None:
    """Write the model."""
    if job.move("policy.model_name", "model.path", "text") is None:
        job.put("model.path", "NAME/THE-MODEL")
        job.ask("model.path: name the model")
    if job.choose("policy.precision", "model.dtype", DTYPES) is None:
        job.put("model.dtype", "bfloat16")


def _put_grpo(job: Job, pool: str, devices: int, length: int) -> None:
    """Write data, engines, rewards and algorithm of a GRPO run.

    Args:
        length: largest number of tokens of prompt and response together.
    """
    at = "policy.generation"
    if job.count("grpo.num_prompts_per_step", "data.prompts_per_step", note="prompts") is None:
        job.put("data.prompts_per_step", 32)
    if job.count("grpo.num_generations_per_prompt", "data.samples_per_prompt") is None:
        job.put("data.samples_per_prompt", 16)
    prompt = job.keys.whole("data.max_input_seq_length") or length
    job.put("data.max_prompt_tokens", prompt, "data.max_input_seq_length")
    new = job.keys.whole(f"{at}.max_new_tokens") or length
    job.put("sampling.max_new_tokens", new, f"{at}.max_new_tokens")
    for name, read in (("temperature", float), ("top_p", float), ("top_k", int)):
        value = job.keys.number(f"{at}.{name}")
        if value is not None and value > 0:
            job.put(f"sampling.{name}", read(value), f"{at}.{name}")
    if job.keys.texts(f"{at}.stop_strings"):
        job.put("sampling.stop", job.keys.texts(f"{at}.stop_strings"), f"{at}.stop_strings")
    if job.keys.wholes(f"{at}.stop_token_ids"):
        stops = job.keys.wholes(f"{at}.stop_token_ids")
        job.put("sampling.stop_token_ids", stops, f"{at}.stop_token_ids")
    _put_sources(job, {"prompt": "prompt", "answer": "answer"}, "grpo")
    job.put("actor_infer.pool", pool, note="all roles share the devices")
    kinds = {"vllm": "vllm", "sglang": "sglang"}
    kind = job.choose(f"{at}.backend", "actor_infer.strategy.kind", kinds) or "vllm"
    if not job.draft.get("actor_infer.strategy.kind"):
        job.put("actor_infer.strategy.kind", "vllm", note="stands in for another engine")
    if kind == "vllm":
        key, out = f"{at}.vllm_cfg", "actor_infer.strategy"
        tp = job.keys.whole(f"{key}.tensor_parallel_size") or 1
        job.put(f"{out}.tp", tp if devices % tp == 0 else 1, f"{key}.tensor_parallel_size")
        share = job.keys.number(f"{key}.gpu_memory_utilization")
        told = f"{key}.gpu_memory_utilization"
        job.put(f"{out}.gpu_memory_utilization", float(share) if share else 0.6, told)
        job.move(f"{key}.enforce_eager", f"{out}.enforce_eager", "flag")
        if (job.keys.whole(f"{key}.max_model_len") or 0) >= prompt + new:
            job.count(f"{key}.max_model_len", f"{out}.max_model_len")
    _put_advantage(job)
    _put_loss(job)
    if any("math" in name for name in job.keys.names("env")):
        job.put("rewards.math.fn", "math", "data.default.env_name", note="the environment math")
    else:
        put_stand_in(job, "environment", "default", None, "data.default.env_name")
    if job.keys.flag("grpo.async_grpo.enabled"):
        age = job.keys.whole("grpo.async_grpo.max_trajectory_age_steps") or 1
        at = "grpo.async_grpo"
        names = (f"{at}.enabled", f"{at}.max_trajectory_age_steps")
        job.put("rollout.max_staleness", age, *names)


def _put_advantage(job: Job) -> None:
    """Write the advantage and the filters of groups."""
    loo, normed = (
        job.keys.flag(f"grpo.{key}") for key in ("use_leave_one_out_baseline", "normalize_rewards")
    )
    value = {
        "kind": "grpo",
        "baseline": "mean" if loo is False else "leave_one_out",
        "std": "none" if normed is False else "group",
    }
    told = ("grpo.use_leave_one_out_baseline", "grpo.normalize_rewards")
    note = "" if loo is False else "NeMo RL leaves the sample out of the std, too"
    job.put("algorithm.advantage", value, *told, note=note)
    if job.keys.flag("grpo.use_dynamic_sampling"):
        job.put("rollout.filters", [{"kind": "equal_rewards"}], "grpo.use_dynamic_sampling")
    if job.keys.flag("grpo.overlong_filtering"):
        job.put("algorithm.masks", [{"kind": "overlong"}], "grpo.overlong_filtering")


def _put_loss(job: Job) -> None:
    """Write the loss terms."""
    at = "loss_fn"
    low, high = (job.keys.number(f"{at}.ratio_clip_{end}") for end in ("min", "max"))
    keys = [f"{at}.ratio_clip_min", f"{at}.ratio_clip_max"]
    term: dict[str, Any] = {"kind": "ppo_clip"}
    term["clip_low"] = float(low) if low and 0 < low < 1 else 0.2
    term["clip_high"] = float(high) if high and high > 0 else 0.2
    if job.keys.flag(f"{at}.disable_ppo_ratio"):
        term, keys = {"kind": "pg"}, [f"{at}.disable_ppo_ratio"]
    elif job.keys.flag(f"{at}.use_cispo"):
        term["kind"] = "cispo"
        keys.append(f"{at}.use_cispo")
    elif job.keys.flag(f"{at}.sequence_level_importance_ratios"):
        term["kind"] = "gspo"
        keys.append(f"{at}.sequence_level_importance_ratios")
    else:
        bound = job.keys.number(f"{at}.ratio_clip_c")
        if bound and bound > 1:
            term["dual_clip"] = float(bound)
            keys.append(f"{at}.ratio_clip_c")
    loss = [term]
    coef = job.keys.number(f"{at}.reference_policy_kl_penalty")
    coef = 0.01 if coef is None else coef
    keys.append(f"{at}.reference_policy_kl_penalty")
    if coef > 0:
        kind = job.keys.text(f"{at}.reference_policy_kl_type") or "k3"
        estimator = kind if kind in ("k1", "k2", "k3") else "k3"
        loss.append({"kind": "kl", "coef": float(coef), "estimator": estimator})
        keys.append(f"{at}.reference_policy_kl_type")
    job.put("algorithm.loss", loss, *keys)
    token = job.keys.flag(f"{at}.token_level_loss")
    job.put(
        "algorithm.aggregation",
        "sequence_mean" if token is False else "token_mean",
        f"{at}.token_level_loss",
    )
    if job.keys.flag(f"{at}.use_importance_sampling_correction"):
        bound = job.keys.number(f"{at}.truncated_importance_sampling_ratio")
        level = "sequence" if term["kind"] == "gspo" else "token"
        upper = float(bound) if bound and bound >= 1 else 1e6
        told = [
            f"{at}.use_importance_sampling_correction",
            f"{at}.truncated_importance_sampling_ratio",
        ]
        job.put("algorithm.correction.weight", {"level": level, "upper": upper}, *told)


def _put_rows(job: Job, section: str, length: int) -> None:
    """Write the data and the loss of a run on rows."""
    job.put("data.max_tokens", length, "policy.max_total_sequence_length")
    rows = job.keys.whole("policy.train_global_batch_size") or 128
    job.put("data.rows_per_step", rows, "policy.train_global_batch_size")
    if section == "sft":
        _put_sources(job, {"messages": "messages"}, section)
        return
    _put_sources(job, {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, section)
    if section == "dpo":
        beta = job.keys.number("dpo.reference_policy_kl_penalty")
        loss: dict[str, Any] = {"kind": "sigmoid", "beta": float(beta) if beta else 0.05}
        sft = job.keys.number("dpo.sft_loss_weight")
        if sft is not None and sft >= 0:
            loss["sft_coef"] = float(sft)
        flag = job.keys.flag("dpo.preference_average_log_probs")
        if flag is not None:
            loss["average_logprobs"] = flag
        told = ("reference_policy_kl_penalty", "sft_loss_weight", "preference_average_log_probs")
        job.put("loss", loss, *(f"dpo.{name}" for name in told))
        job.why("dpo", "the preference loss has the weight 1, and no other settings")


def _put_sources(job: Job, columns: dict[str, Any], section: str) -> None:
    """Write sources and validation sets."""
    told = _first(
        job,
        (
            "data.train.data_path",
            "data.train.dataset_name",
            "data.train_data_path",
            "data.dataset_name",
        ),
    )
    path = job.keys.text(told) if told else None
    sources = [{"path": path or "NAME/THE-DATA", "columns": columns}]
    job.put("data.sources", sources, *([told] if told else []))
    job.ask("data.sources: name the file or hub dataset, and its columns")
    held = _first(
        job, ("data.validation.data_path", "data.validation.dataset_name", "data.val_data_path")
    )
    if held:
        sets = {"held_out": {"path": job.keys.text(held), "columns": columns}}
        job.put("validation.sets", sets, held)
        job.count(f"{section}.val_period", "validation.every")
        job.move(f"{section}.val_at_start", "validation.at_start", "flag")
    job.move("data.shuffle", "data.shuffle", "flag")


def _first(job: Job, keys: Sequence[str]) -> str | None:
    """Return the first of these keys that the file has."""
    return next((key for key in keys if job.keys.text(key)), None)


def _put_trainer(job: Job, pool: str, devices: int, length: int, *, rl: bool) -> None:
    """Write the role that trains; `length` is the largest number of tokens of a row."""
    job.put("actor_train.pool", pool, note="all roles share the devices")
    out = "actor_train.strategy"
    if job.keys.flag("policy.megatron_cfg.enabled"):
        job.put(f"{out}.kind", "megatron", "policy.megatron_cfg.enabled")
        for key, ours in MEGATRON_SIZES.items():
            job.count(f"policy.megatron_cfg.{key}", f"{out}.{ours}")
        overlap = "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce"
        job.move(overlap, f"{out}.overlap_grad_reduce", "flag")
    else:
        at = "policy.dtensor_cfg"
        job.put(f"{out}.kind", "fsdp2", f"{at}.enabled")
        tp = job.keys.whole(f"{at}.tensor_parallel_size") or 1
        if devices % tp == 0:
            job.put(f"{out}.tp", tp, f"{at}.tensor_parallel_size")
        cp = job.keys.whole(f"{at}.context_parallel_size") or 1
        if devices % (tp * cp) == 0:
            note = "by Ulysses, not ring attention" if cp > 1 else ""
            job.put(f"{out}.ulysses", cp, f"{at}.context_parallel_size", note=note)
        job.move(f"{at}.cpu_offload", f"{out}.cpu_offload", "flag")
        job.move(f"{at}.activation_checkpointing", f"{out}.activation_checkpointing", "flag")
    if job.keys.flag("policy.sequence_packing.enabled") and packs(job, "actor_train"):
        job.put("actor_train.packing", True, "policy.sequence_packing.enabled")
    at = "policy.optimizer.kwargs"
    rate = job.keys.number(f"{at}.lr")
    job.put("actor_train.optimizer.lr", float(rate) if rate else 5e-6, f"{at}.lr")
    job.move(f"{at}.weight_decay", "actor_train.optimizer.weight_decay", "number", float)
    betas = job.keys.raw(f"{at}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        job.put("actor_train.optimizer.betas", betas, f"{at}.betas")
    job.move(f"{at}.eps", "actor_train.optimizer.eps", "number", float)
    job.move("policy.max_grad_norm", "actor_train.optimizer.max_grad_norm", "number", float)
    put_kind(job, "policy.optimizer.name", "actor_train")
    if rl:
        rows = job.keys.whole("policy.train_global_batch_size") or 512
        job.put("actor_train.samples_per_update", rows, "policy.train_global_batch_size")
    micro = job.keys.whole("policy.train_micro_batch_size") or 1
    key = "policy.train_micro_batch_size"
    note = f"{micro} row(s) of at most {length} tokens"
    job.put("actor_train.max_tokens_per_microbatch", micro * length, key, note=note)
