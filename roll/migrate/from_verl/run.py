"""Translation of run files of verl: the keys of its PPO trainer that runs commonly set."""

from __future__ import annotations

from typing import Any

from roll.migrate.from_verl.algorithm import put_algorithm
from roll.migrate.job import MEGATRON_SIZES, Job, needs_reference
from roll.migrate.optimizers import put_kind
from roll.migrate.stand_ins import put_stand_in

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
REF = "actor_rollout_ref.ref"
REASONS = {
    "data.filter_overlong_prompts": "longer prompts are always left out, and counted",
    "data.truncation": "prompts are never cut; longer ones are left out, and counted",
    "data.reward_fn_key": "rewards are chosen by the tag of a row",
    "data.return_raw_chat": "prompts are rendered with the chat template",
    "data.custom_cls": "rows are mapped by `columns`",
    "trainer.balance_batch": "rows are always balanced over ranks",
    "trainer.log_val_generations": "rollouts are in `output_dir`/rollouts",
    "trainer.rollout_data_dir": "rollouts are in `output_dir`/rollouts",
    "trainer.validation_data_dir": "rollouts are in `output_dir`/rollouts",
    "trainer.device": "see cluster.platform",
    "trainer.experiment_name": "see output_dir",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "see max_tokens_per_microbatch",
    f"{ROLLOUT}.log_prob_micro_batch_size": "see max_tokens_per_microbatch",
    f"{ROLLOUT}.mode": "engines always serve single requests",
    f"{ROLLOUT}.load_format": "engines load the checkpoint, and then get the trainer's weights",
    f"{ACTOR}.calculate_sum_pi_squared": "computed where the advantage needs it",
    f"{ROLLOUT}.calculate_log_probs": "log-probs of all tokens are always kept",
    f"{ROLLOUT}.free_cache_engine": "roles that share devices always take turns",
    f"{ROLLOUT}.multi_turn": "several turns: pipeline: agentic (docs/agents.md)",
    f"{ROLLOUT}.agent": "several turns: pipeline: agentic (docs/agents.md)",
    f"{MODEL}.use_remove_padding": "see `packing` of the roles",
    f"{MODEL}.external_lib": "no modules are imported for a model",
    f"{ACTOR}.ppo_micro_batch_size": "micro-batches are made by tokens",
    "ray_kwargs": "see `cluster`",
    "ray_init": "see `cluster`",
    "global_profiler": "name the steps to record: `profile` (docs/profiling.md)",
    "reward_model": "a reward model is one of `rewards` (`model`), or a judge",
    "custom_reward_function": "see rewards",
}
"""Why keys have no counterpart, by the key or the mapping around it."""
WITHOUT_ROLE = {
    "critic": ("critic", "only the advantage gae has a critic"),
    REF: ("reference", "nothing in the algorithm compares with it; there is no such role"),
}
"""Mapping of a role in verl's file -> the role here, and why there may be none."""


def translate_verl(job: Job) -> None:
    """Translate a run file of verl."""
    job.draft.put("pipeline", "rlvr")
    _put_run(job)
    devices = _devices(job)
    pool = job.pool(tuple(range(devices)), "all")
    _put_data(job)
    _put_model(job)
    put_algorithm(job)
    _put_trainer(job, "actor_train", ACTOR, pool, devices)
    _put_engine(job, pool, devices)
    if needs_reference(job) and job.draft.get("model.lora") is None:
        job.put("reference.pool", pool, note="the same devices")
        _put_strategy(job, "reference", REF if job.keys.has(REF) else ACTOR, False, devices)
    if job.draft.get("algorithm.advantage.kind") == "gae":
        _put_trainer(job, "critic", "critic", pool, devices)
        _put_critic(job)
    _put_rewards(job)
    job.put_pools(job.keys.whole("trainer.n_gpus_per_node"), ["trainer.n_gpus_per_node"])
    job.why_all(REASONS)
    for at, (role, reason) in WITHOUT_ROLE.items():
        has_it = job.draft.get(role) is not None
        job.why(at, f"the role `{role}` has no counterpart of it" if has_it else reason)


def _put_run(job: Job) -> None:
    """Write what concerns the run as a whole."""
    keys = job.keys
    names = [keys.text(f"trainer.{each}_name") for each in ("project", "experiment")]
    folder = "/".join(["outputs", *(name for name in names if name)])
    told = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
    job.put("output_dir", keys.text("trainer.default_local_dir") or folder, *told)
    if job.count("trainer.total_training_steps", "max_steps") is None:
        job.put("max_steps", 1000, note="verl counts epochs; set it")
        job.ask("max_steps: rows / data.train_batch_size steps are an epoch of verl; set it")
        job.why("trainer.total_epochs", "a run from samples is as long as `max_steps`")
    modes = {"auto": "auto", "disable": "never"}
    job.choose("trainer.resume_mode", "resume", modes, "checkpoints of verl are not read")
    job.count("trainer.save_freq", "checkpoint.every")
    job.count("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last")
    loggers = keys.texts("trainer.logger")
    job.put("track.tensorboard", "tensorboard" in loggers, "trainer.logger")
    job.put_services(loggers, names[0] or "verl", "trainer.project_name")


def _devices(job: Job) -> int:
    """Return the number of devices of the run, all of which all roles share."""
    nodes = job.keys.whole("trainer.nnodes") or 1
    job.why("trainer.nnodes", "follows from the devices in `pools`")
    return max(1, nodes * (job.keys.whole("trainer.n_gpus_per_node") or 8))


def _put_data(job: Job) -> None:
    """Write sources, sizes of a step, sampling and validation."""
    column = job.keys.text("data.prompt_key") or "prompt"
    columns = {"prompt": None, "messages": column, "answer": "answer"}
    targets = {"data.train_files": "data.sources", "data.val_files": "validation.sets"}
    for key, target in targets.items():
        files = job.keys.texts(key)
        rows = [{"path": file, "columns": columns} for file in files]
        if target == "data.sources":
            rows = rows or [{"path": "NAME/THE-DATA", "columns": columns}]
            job.put(target, rows, key, "data.prompt_key")
        elif rows:
            sets = {f"held_out_{i}": row for i, row in enumerate(rows)}
            job.put(target, sets, key)
            job.count("trainer.test_freq", "validation.every")
            job.move("trainer.val_before_train", "validation.at_start", "flag")
            _put_sampling(job, f"{ROLLOUT}.val_kwargs", "validation.sampling")
    job.ask(
        "data.sources: verl keeps the right answer in reward_model.ground_truth of a row; copy it "
        "to a column `answer`"
    )
    if job.count("data.train_batch_size", "data.prompts_per_step", note="prompts") is None:
        job.put("data.prompts_per_step", 1024)
    if job.count(f"{ROLLOUT}.n", "data.samples_per_prompt") is None:
        job.put("data.samples_per_prompt", 1)
    if job.count("data.max_prompt_length", "data.max_prompt_tokens") is None:
        job.put("data.max_prompt_tokens", 512)
    job.move("data.shuffle", "data.shuffle", "flag")
    job.count("data.seed", "seed", low=0)
    if job.keys.has("data.image_key"):
        job.why("data.image_key", "name the column in `columns.images` (docs/pictures.md)")
    _put_sampling(job, ROLLOUT, "sampling")


def _put_sampling(job: Job, at: str, target: str) -> None:
    """Write a sampling."""
    for name, read in (("temperature", float), ("top_p", float), ("top_k", int)):
        value = job.keys.number(f"{at}.{name}")
        if value is None or (name == "top_p" and not 0 < value <= 1) or value < -1:
            job.why(f"{at}.{name}", "out of range")
        else:
            value = -1 if name == "top_k" and value == 0 else value
            job.put(
                f"{target}.{name}",
                read(max(value, 0) if name == "temperature" else value),
                f"{at}.{name}",
            )
    if target != "sampling":
        if job.keys.flag(f"{at}.do_sample") is False:
            job.put(f"{target}.temperature", 0.0, f"{at}.do_sample", note="greedy")
        elif job.draft.get(f"{target}.temperature") is None:
            job.put(f"{target}.temperature", 0.0, note="greedy")
    job.why(f"{at}.do_sample", "follows from the temperature")
    key = "data.max_response_length"
    job.put(f"{target}.max_new_tokens", job.keys.whole(key) or 512, key)
    if target != "sampling" and job.draft.get(f"{target}.temperature"):
        job.count(f"{at}.n", "validation.samples_per_prompt")
    elif target != "sampling":
        job.why(f"{at}.n", "at temperature 0 all responses to a prompt are equal")


def _put_model(job: Job) -> None:
    """Write the model and its adapter."""
    key = f"{MODEL}.path"
    if job.move(key, "model.path", "text") is None:
        job.put("model.path", "NAME/THE-MODEL")
        job.ask("model.path: name the model")
    job.put("model.dtype", "bfloat16")
    job.move(f"{MODEL}.trust_remote_code", "model.trust_remote_code", "flag")
    rank = job.keys.whole(f"{MODEL}.lora_rank")
    if rank:
        job.put("model.lora.rank", rank, f"{MODEL}.lora_rank")
        alpha = job.keys.number(f"{MODEL}.lora_alpha")
        job.put("model.lora.alpha", float(alpha or 16), f"{MODEL}.lora_alpha")
        names = job.keys.texts(f"{MODEL}.target_modules") or ["all-linear"]
        told: Any = "all-linear" if names == ["all-linear"] else names
        job.put("model.lora.targets", told, f"{MODEL}.target_modules")
    for name in ("lora_rank", "lora_alpha", "target_modules"):
        job.why(f"{MODEL}.{name}", "no adapter is trained")


def _put_strategy(job: Job, target: str, at: str, trains: bool, devices: int) -> None:
    """Write the backend of a role."""
    name = job.keys.text(f"{at}.strategy") or job.keys.text(f"{ACTOR}.strategy") or "fsdp"
    out = f"{target}.strategy"
    if name == "megatron":
        job.put(f"{out}.kind", "megatron", f"{at}.strategy")
        for key, ours in MEGATRON_SIZES.items():
            job.count(f"{at}.megatron.{key}", f"{out}.{ours}")
        overlap = f"{at}.megatron.override_ddp_config.overlap_grad_reduce"
        if trains:
            job.move(overlap, f"{out}.overlap_grad_reduce", "flag")
        job.why(overlap, "concerns the backward pass, which this role does not have")
        return
    job.put(f"{out}.kind", "fsdp2", f"{at}.strategy")
    job.move(f"{at}.fsdp_config.param_offload", f"{out}.cpu_offload", "flag")
    size = job.keys.whole(f"{at}.ulysses_sequence_parallel_size")
    if size and devices % size == 0:
        job.put(f"{out}.ulysses", size, f"{at}.ulysses_sequence_parallel_size")
    size = job.keys.whole(f"{at}.fsdp_config.fsdp_size")
    if size and 0 < size < devices and devices % size == 0:
        job.put(f"{out}.replicas", devices // size, f"{at}.fsdp_config.fsdp_size")
    job.why(f"{at}.fsdp_config.fsdp_size", "the model is sharded over all devices")
    checkpointing = "critic.model" if target == "critic" else MODEL
    if trains:
        key = f"{checkpointing}.enable_gradient_checkpointing"
        flag = job.keys.flag(key)
        job.put(f"{out}.activation_checkpointing", True if flag is None else flag, key)
        away = f"{checkpointing}.enable_activation_offload"
        if flag is not False:
            job.move(away, f"{out}.offload_activations", "flag")
        job.why(away, "needs enable_gradient_checkpointing")


def _put_trainer(job: Job, target: str, at: str, pool: str, devices: int) -> None:
    """Write a role that trains; `at` is its key in verl's file."""
    job.put(f"{target}.pool", pool, note="all roles share the devices")
    _put_strategy(job, target, at, True, devices)
    out = f"{target}.optimizer"
    if job.move(f"{at}.optim.lr", f"{out}.lr", "number", lambda v: float(v) or None) is None:
        job.put(f"{out}.lr", 1e-6 if target == "actor_train" else 1e-5)
    decay = job.move(f"{at}.optim.weight_decay", f"{out}.weight_decay", "number", float)
    if decay is None:
        job.put(f"{out}.weight_decay", 0.01)
    betas = job.keys.raw(f"{at}.optim.betas")
    fits = isinstance(betas, list) and len(betas) == 2
    job.put(f"{out}.betas", betas if fits else [0.9, 0.999], *([f"{at}.optim.betas"] * fits))
    job.move(f"{at}.grad_clip", f"{out}.max_grad_norm", "number", lambda v: float(v) or None)
    kinds = {"constant": "constant", "cosine": "cosine"}
    for key in (f"{at}.optim.lr_scheduler_type", f"{at}.optim.warmup_style"):
        if job.keys.has(key):
            job.choose(key, f"{out}.schedule", kinds)
    if job.draft.get(f"{out}.schedule") == "cosine":
        job.move(f"{at}.optim.min_lr_ratio", f"{out}.min_lr_ratio", "number", float)
    job.why(f"{at}.optim.min_lr_ratio", "nothing decays")
    steps, ratio = f"{at}.optim.lr_warmup_steps", f"{at}.optim.lr_warmup_steps_ratio"
    if (job.keys.whole(steps) or -1) >= 0:
        job.count(steps, f"{out}.warmup_steps", low=0)
    elif job.keys.number(ratio):
        job.move(ratio, f"{out}.warmup_ratio", "number", lambda v: float(v) if v < 1 else None)
    for key in (steps, ratio, f"{at}.optim.total_training_steps"):
        job.why(key, "there is no warm-up, or another key says it")
    put_kind(job, f"{at}.optim.optimizer", target)
    group = job.draft.get("data.samples_per_prompt")
    prompts = job.keys.whole(f"{at}.ppo_mini_batch_size") or 256
    note = f"{prompts} prompts x {group} samples"
    job.put(f"{target}.samples_per_update", prompts * group, f"{at}.ppo_mini_batch_size", note=note)
    job.count(f"{at}.ppo_epochs", f"{target}.epochs")
    _put_microbatch(job, target, at)


def _put_microbatch(job: Job, target: str, at: str) -> None:
    """Write the tokens of a micro-batch."""
    out = f"{target}.max_tokens_per_microbatch"
    if job.keys.flag(f"{at}.use_dynamic_bsz"):
        told = (f"{at}.ppo_max_token_len_per_gpu", f"{at}.use_dynamic_bsz")
        job.put(out, job.keys.whole(told[0]) or 16384, *told)
        return
    key = f"{at}.ppo_micro_batch_size_per_gpu"
    row = job.draft.get("data.max_prompt_tokens") + job.draft.get("sampling.max_new_tokens")
    rows = job.keys.whole(key) or 1
    job.put(out, rows * row, key, note=f"{rows} row(s) of at most {row} tokens")
    for name in ("ppo_max_token_len_per_gpu", "use_dynamic_bsz"):
        job.why(f"{at}.{name}", "use_dynamic_bsz is off")


def _put_critic(job: Job) -> None:
    """Write what only the critic has."""
    job.move("critic.model.path", "critic.model.path", "text")
    if job.draft.get("critic.model.path"):
        job.put("critic.model.dtype", "bfloat16")
    clip = job.keys.number("critic.cliprange_value")
    job.put("critic.loss.clip", float(clip) if clip else 0.5, "critic.cliprange_value")
    if (job.keys.whole("trainer.critic_warmup") or 0) < job.draft.get("max_steps"):
        job.count("trainer.critic_warmup", "critic.warmup_steps", low=0)


def _put_engine(job: Job, pool: str, devices: int) -> None:
    """Write the engine."""
    job.put("actor_infer.pool", pool, note="all roles share the devices")
    out = "actor_infer.strategy"
    kinds = {"vllm": "vllm", "sglang": "sglang", "hf": "hf"}
    kind = job.choose(f"{ROLLOUT}.name", f"{out}.kind", kinds)
    if kind is None:
        job.put(f"{out}.kind", "vllm")
    if kind == "hf":
        return
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    tp = job.keys.whole(key) or 2
    job.put(f"{out}.tp", tp if devices % tp == 0 else 1, key)
    key = f"{ROLLOUT}.gpu_memory_utilization"
    share = job.keys.number(key)
    job.put(f"{out}.gpu_memory_utilization", float(share) if share else 0.5, key)
    job.move(f"{ROLLOUT}.enforce_eager", f"{out}.enforce_eager", "flag")
    row = job.draft.get("data.max_prompt_tokens") + job.draft.get("sampling.max_new_tokens")
    if (job.keys.whole(f"{ROLLOUT}.max_model_len") or 0) >= row:
        job.count(f"{ROLLOUT}.max_model_len", f"{out}.max_model_len")
    job.why(f"{ROLLOUT}.max_model_len", f"less than the {row} tokens of prompt and response")
    if job.count(f"{ROLLOUT}.max_num_seqs", f"{out}.max_num_seqs") is None:
        job.put(f"{out}.max_num_seqs", 1024)
    if kind != "sglang":
        tokens = f"{ROLLOUT}.max_num_batched_tokens"
        job.count(tokens, f"{out}.engine_args.max_num_batched_tokens")


def _put_rewards(job: Job) -> None:
    """Write the reward: `math`, or a server for a function of the user's."""
    for at in ("custom_reward_function", "reward.custom_reward_function"):
        if job.keys.text(f"{at}.path"):
            put_stand_in(job, "custom", "default", None, f"{at}.path", f"{at}.name")
            return
    job.put("rewards.math.fn", "math", note="verl chooses by data_source; see docs/rewards.md")
    job.ask("rewards: verl chooses a reward by the column data_source; `math` stands for all rows")
