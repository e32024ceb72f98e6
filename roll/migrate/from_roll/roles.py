"""Roles of ROLL: devices, model, optimizer, batches."""

from __future__ import annotations

import math

from roll.config.sections.placement import check_variables
from roll.migrate.devices import devices_of
from roll.migrate.from_roll.strategies import score_strategy, train_strategy
from roll.migrate.job import Job, packs
from roll.migrate.optimizers import put_kind

ATTENTION = {
    "fa2": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "auto": "sdpa",
    "eager": "eager",
    "disabled": "eager",
}
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "fp16": "bfloat16",
    "float16": "bfloat16",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse_sqrt",
}
MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Layers of a checkpoint by the names that Megatron-Core has for them together."""
_FREEZES = {"vis": "vision", "merger": "projector", "proj": "projector", "lang": "language"}


def devices(job: Job, role: str) -> tuple[int, ...] | None:
    """Return the devices of a role; None if it names none, or they cannot be read."""
    key = f"{role}.device_mapping"
    value = job.keys.raw(key)
    if value is None:
        return None
    try:
        found = devices_of(value)
    except ValueError as error:
        job.keys.refuse(key, str(error))
        return None
    job.keys.use(key)
    return found


def put_pool(job: Job, role: str, target: str, wish: str, other: str | None = None) -> int:
    """Write the pool of a role; return its number of devices.

    Args:
        other: role whose devices it has if it names none of its own.
    """
    key = f"{role}.device_mapping"
    found = devices(job, role)
    note = ""
    if found is None and other is not None:
        key, found, note = f"{other}.device_mapping", devices(job, other), "the same devices"
    if found is None:
        found = tuple(range(_least_devices(job, role)))
        note = f"no devices are named; {len(found)} by the parallel sizes"
        job.ask(f"{target}.pool: {role} names no devices that can be read; correct its pool")
    job.put(f"{target}.pool", job.pool(found, wish), key, note=note)
    _put_variables(job, role, target)
    return len(found)


def _least_devices(job: Job, role: str) -> int:
    """Return how many devices the parallel sizes of a role need at least."""
    config = f"{role}.strategy_args.strategy_config"

    def size(name: str) -> int:
        return max(1, job.keys.whole(name) or 1)

    experts = size(f"{config}.expert_model_parallel_size") * size(
        f"{config}.expert_tensor_parallel_size"
    )
    dense = size(f"{config}.tensor_model_parallel_size") * size(f"{config}.context_parallel_size")
    shared = math.lcm(dense, experts)
    staged = shared * size(f"{config}.pipeline_model_parallel_size")
    engine = size(f"{config}.tensor_parallel_size") * size(f"{config}.pipeline_parallel_size")
    return staged * engine * size(f"{role}.model_args.ulysses_size")


def _put_variables(job: Job, role: str, target: str) -> None:
    """Write the environment variables of a role; name those that a role may not have."""
    for name in job.keys.names(f"{role}.system_envs"):
        key = f"{role}.system_envs.{name}"
        value = job.keys.text(key)
        try:
            check_variables({name: value or ""})
        except ValueError as error:
            job.why(key, str(error))
        else:
            if value is not None:
                job.put(f"{target}.env.{name}", value, key)


def put_model(job: Job, role: str, target: str, *paths: str, full: bool = True) -> None:
    """Write the model of a role.

    Args:
        role: key of the role in ROLL's file.
        target: key of the model here.
        paths: keys of the path, the first that is set counts.
        full: write kernel, dtype and adapter of the role, too.
    """
    args = f"{role}.model_args"
    keys = (f"{args}.model_name_or_path", *paths)
    found = next((key for key in keys if job.keys.text(key)), None)
    if found is None:
        job.put(f"{target}.path", "NAME/THE-MODEL", note="the file names no model")
        job.ask(f"{target}.path: name the model")
    else:
        job.put(f"{target}.path", job.keys.text(found), found)
    for key in keys:
        if job.keys.text(key) and job.keys.text(key) == job.draft.get(f"{target}.path"):
            job.keys.use(key)
    if not full:
        return
    _put_dtype(job, args, target)
    _put_attention(job, role, target)
    _put_adapter(job, role, target)
    frozen = job.keys.texts(f"{args}.freeze_module_prefix")
    parts = [part for mark, part in _FREEZES.items() if any(mark in text for text in frozen)]
    if parts and job.draft.get(f"{target}.lora") is None:
        job.put(f"{target}.freeze", list(dict.fromkeys(parts)), f"{args}.freeze_module_prefix")
    elif frozen:
        job.why(f"{args}.freeze_module_prefix", "write patterns of parameter names into `freeze`")


def _put_dtype(job: Job, args: str, target: str) -> None:
    """Write the dtype; ROLL's default is bfloat16."""
    key = f"{args}.dtype"
    if job.keys.has(key):
        told = job.choose(key, f"{target}.dtype", DTYPES)
        if told is not None:
            if job.keys.text(key) in ("fp16", "float16"):
                job.ask(f"{target}.dtype: bfloat16 in place of float16, which does not exist here")
            return
    job.put(f"{target}.dtype", "bfloat16")


def _put_attention(job: Job, role: str, target: str) -> None:
    """Write the attention kernel, where the role's backend can have this one."""
    args, name = f"{role}.model_args", job.keys.text(f"{role}.strategy_args.strategy_name") or ""
    sharers = job.keys.whole(f"{args}.ulysses_size") or 1
    for key in (f"{args}.attn_implementation", f"{args}.flash_attn"):
        if not job.keys.has(key):
            continue
        if "megatron" in name:
            job.why(key, "Megatron-Core has a kernel of its own")
        elif sharers > 1:
            job.why(key, "with `ulysses` the kernel is sdpa")
        elif job.draft.get(f"{target}.attention") is None:
            job.choose(key, f"{target}.attention", ATTENTION)
        else:
            job.why(key, "attn_implementation says it already")


def _put_adapter(job: Job, role: str, target: str) -> None:
    """Write the LoRA adapter of a role, if it has one."""
    args = f"{role}.model_args"
    if not (job.keys.has(f"{args}.lora_rank") or job.keys.has(f"{args}.lora_target")):
        return
    rank = job.keys.whole(f"{args}.lora_rank") or 8
    job.put(f"{target}.lora.rank", rank, f"{args}.lora_rank")
    alpha = job.keys.number(f"{args}.lora_alpha")
    job.put(f"{target}.lora.alpha", float(alpha or 2 * rank), f"{args}.lora_alpha")
    key = f"{args}.lora_target"
    names = [part.strip() for text in job.keys.texts(key) for part in text.split(",")]
    names = [each for name in names if name for each in MEGATRON_LAYERS.get(name, (name,))]
    if not names or any(name in ("all", "all-linear", "all-router") for name in names):
        job.put(f"{target}.lora.targets", "all-linear", key)
    else:
        job.put(f"{target}.lora.targets", list(dict.fromkeys(names)), key)
    if job.keys.number(f"{args}.lora_dropout") is not None:
        if job.draft.get("pipeline") in ("rlvr", "agentic"):
            why = "the ratio of two passes must not depend on chance; there is no dropout"
            job.why(f"{args}.lora_dropout", why)
        else:
            job.move(f"{args}.lora_dropout", f"{target}.lora.dropout", "number", float)


def put_optimizer(job: Job, role: str, target: str, rl: bool = True) -> None:
    """Write the optimizer of a role that trains; defaults are those of Hugging Face's training
    arguments, which ROLL has."""
    args, out = f"{role}.training_args", f"{target}.optimizer"
    if job.move(f"{args}.learning_rate", f"{out}.lr", "number", _positive) is None:
        job.put(f"{out}.lr", 5.0e-5)
    job.move(f"{args}.weight_decay", f"{out}.weight_decay", "number", _not_negative)
    betas = (job.keys.number(f"{args}.adam_beta1"), job.keys.number(f"{args}.adam_beta2"))
    values = [float(0.9 if betas[0] is None else betas[0])]
    values.append(float(0.999 if betas[1] is None else betas[1]))
    job.put(f"{out}.betas", values, f"{args}.adam_beta1", f"{args}.adam_beta2")
    job.move(f"{args}.adam_epsilon", f"{out}.eps", "number", _positive)
    norm = f"{args}.max_grad_norm"
    norm = norm if job.keys.has(norm) else "max_grad_norm"
    if job.keys.number(norm) == 0:
        job.put(f"{out}.max_grad_norm", 1.0e9, norm, note="0 clips nothing")
    else:
        job.move(norm, f"{out}.max_grad_norm", "number", _positive)
    chosen = None
    if job.keys.has(f"{args}.lr_scheduler_type"):
        chosen = job.choose(f"{args}.lr_scheduler_type", f"{out}.schedule", SCHEDULES)
        if chosen is None:
            job.ask(f"{out}.schedule: constant in place of a schedule that does not exist here")
    else:
        job.put(f"{out}.schedule", "linear")
    warmup = job.count(f"{args}.warmup_steps", f"{out}.warmup_steps", low=0)
    if not warmup and job.keys.number(f"{args}.warmup_ratio"):
        job.move(f"{args}.warmup_ratio", f"{out}.warmup_ratio", "number", _share)
    else:
        job.why(f"{args}.warmup_ratio", "0, or warmup_steps says it already")
    put_kind(job, f"{args}.optim", target)
    if rl:
        job.why(f"{args}.num_train_epochs", "the run is as long as `max_steps`")


def put_batches(job: Job, role: str, target: str, devices: int, row_tokens: int) -> None:
    """Write samples per optimizer step and tokens per micro-batch of a role that trains.

    Args:
        devices: number of its devices.
        row_tokens: largest number of tokens of a row.
    """
    args = f"{role}.training_args"
    each = job.keys.whole(f"{args}.per_device_train_batch_size") or 1
    times = job.keys.whole(f"{args}.gradient_accumulation_steps") or 1
    ranks = max(1, devices // _sharers(job, role))
    job.put(
        f"{target}.samples_per_update",
        each * times * ranks,
        f"{args}.per_device_train_batch_size",
        f"{args}.gradient_accumulation_steps",
        note=f"{each} rows x {times} times x {ranks} data-parallel ranks",
    )
    put_microbatch(job, role, target, each, row_tokens, f"{args}.per_device_train_batch_size")


def put_microbatch(
    job: Job, role: str, target: str, rows: int, row_tokens: int, key: str, end: str = "train"
) -> None:
    """Write tokens per micro-batch and packing of a role.

    Args:
        rows: rows per micro-batch, which the key `key` says.
        row_tokens: largest number of tokens of a row.
        end: ending of the keys of dynamic batches, `train` or `infer`.
    """
    out = f"{target}.max_tokens_per_microbatch"
    tokens = f"{role}.max_tokens_per_microbatch_in_{end}"
    if job.keys.flag(f"{role}.use_dynamic_batching_in_{end}") and job.keys.whole(tokens):
        job.put(out, job.keys.whole(tokens), tokens, f"{role}.use_dynamic_batching_in_{end}")
    else:
        note = f"{rows} row(s) of at most {row_tokens} tokens"
        job.put(out, rows * row_tokens, key, note=note)
        job.why(tokens, f"use_dynamic_batching_in_{end} is off")
        job.why(f"{role}.use_dynamic_batching_in_{end}", "off; limits are in tokens in any case")
    key = f"{role}.use_sequence_packing"
    if not job.keys.flag(key):
        job.why(key, "off")
    elif packs(job, target):
        job.put(f"{target}.packing", True, key)
    else:
        job.why(key, "the backend pads its micro-batches")


def _sharers(job: Job, role: str) -> int:
    """Return the number of devices that share the rows of a role in ROLL."""
    config = f"{role}.strategy_args.strategy_config"
    sizes = [
        f"{config}.tensor_model_parallel_size",
        f"{config}.pipeline_model_parallel_size",
        f"{config}.context_parallel_size",
        f"{role}.model_args.ulysses_size",
    ]
    return math.prod(job.keys.whole(key) or 1 for key in sizes)


def put_trainer(job: Job, role: str, target: str, row_tokens: int, other: str | None = None) -> int:
    """Write pool, strategy, optimizer and batches of a role that trains on samples; return its
    number of devices."""
    number = put_pool(job, role, target, "critic" if target == "critic" else "train", other)
    train_strategy(job, role, target, number)
    put_optimizer(job, role, target)
    put_batches(job, role, target, number, row_tokens)
    return number


def put_scorer(job: Job, role: str, target: str, wish: str, tokens: int, other: str) -> None:
    """Write pool, strategy and micro-batches of a role that only computes log-probs.

    Args:
        wish: name of its pool if its devices are those of no other role.
        tokens: largest number of tokens of a row.
        other: role whose devices it has if it names none.
    """
    number = put_pool(job, role, target, wish, other)
    score_strategy(job, role, target, number)
    rows = job.keys.whole(f"{role}.infer_batch_size") or 1
    key = f"{role}.infer_batch_size"
    put_microbatch(job, role, target, rows, tokens, key, end="infer")


def _positive(value: float) -> float | None:
    return float(value) if value > 0 else None


def _not_negative(value: float) -> float | None:
    return float(value) if value >= 0 else None


def _share(value: float) -> float | None:
    return float(value) if 0 <= value < 1 else None
