"""Training and scoring backends of ROLL."""

from __future__ import annotations

from typing import Any

from roll.config.errors import nearest
from roll.migrate.from_roll.reasons import MTP
from roll.migrate.interpolation import Unresolved
from roll.migrate.job import MEGATRON_SIZES, Job

_BACKENDS = ("megatron", "deepspeed", "fsdp", "hf")
MTP_WEIGHT = 0.3
"""Factor of the loss of further tokens that ROLL's documentation names as the usual one."""
_SIZES = {**MEGATRON_SIZES, "virtual_pipeline_model_parallel_size": "vpp"}


def train_strategy(job: Job, role: str, target: str, devices: int) -> None:
    """Write the backend of a role that trains, on this number of devices."""
    _strategy(job, role, target, devices, trains=True)


def score_strategy(job: Job, role: str, target: str, devices: int) -> None:
    """Write the backend of a role that only scores, on this number of devices."""
    _strategy(job, role, target, devices, trains=False)


def _strategy(job: Job, role: str, target: str, devices: int, *, trains: bool) -> None:
    """Write the backend of a role, by ROLL's name of it."""
    out, key = f"{target}.strategy", f"{role}.strategy_args.strategy_name"
    name = job.keys.text(key) or ""
    kind = next((each for each in _BACKENDS if each in name.lower()), None)
    if kind is None or (kind == "hf" and trains):
        kind = "fsdp" if trains else "hf"
        if name:
            job.why(key, f"there is no backend {name}{nearest(name, _BACKENDS)}; {kind} stands in")
            job.ask(f"{out}: {name} does not exist here, and {kind} stands in for it")
    job.put(f"{out}.kind", {"fsdp": "fsdp2"}.get(kind, kind), key)
    if kind == "megatron":
        _megatron(job, role, out, devices, trains)
    elif kind == "deepspeed":
        _deepspeed(job, role, out, trains)
    elif kind == "fsdp":
        _fsdp2(job, role, out, devices, trains)
    _finish(job, role, out, trains)


def _finish(job: Job, role: str, out: str, trains: bool) -> None:
    """Write what backends have in common: recomputed activations."""
    key = f"{role}.model_args.disable_gradient_checkpointing"
    if trains and job.draft.get(f"{out}.kind") in ("fsdp2", "deepspeed"):
        job.put(f"{out}.activation_checkpointing", not job.keys.flag(key), key)
    elif trains:
        job.why(key, "see `recompute` of the strategy")
    else:
        job.why(key, "concerns the backward pass, which this role does not have")
    aux = f"{role}.model_args.moe_aux_loss_coef"
    if job.draft.get(f"{out}.mtp_loss_weight") is not None:
        job.why(aux, "not together with layers that predict further tokens (mtp_loss_weight)")
    elif trains and job.draft.get(f"{out}.kind") == "megatron":
        job.move(aux, f"{out}.aux_loss_coef", "number", lambda v: float(v) if v >= 0 else None)
    else:
        job.why(aux, "only megatron, where it trains, has this loss")


def _megatron(job: Job, role: str, out: str, devices: int, trains: bool) -> None:
    """Write the sizes of Megatron-Core, as far as they fit the devices."""
    config = f"{role}.strategy_args.strategy_config"
    sizes = {ours: job.keys.whole(f"{config}.{key}") for key, ours in _SIZES.items()}
    tp, pp, cp, ep = (sizes[each] or 1 for each in ("tp", "pp", "cp", "ep"))
    if pp == 1 and (sizes["vpp"] or 1) > 1:
        job.why(f"{config}.virtual_pipeline_model_parallel_size", "needs several stages")
        sizes["vpp"] = None
    if devices % (tp * cp * pp):
        product = f"tp * cp * pp = {tp * cp * pp}"
        job.ask(f"{out}: {product} does not divide {devices} devices; correct it")
    for key, ours in _SIZES.items():
        size = sizes[ours]
        if size is not None and size >= 1:
            job.put(f"{out}.{ours}", size, f"{config}.{key}")
    if ep > 1 and sizes["etp"] is None:
        job.put(f"{out}.etp", 1)
    key = f"{config}.sequence_parallel"
    if tp > 1:
        job.move(key, f"{out}.sequence_parallel", "flag")
    else:
        job.why(key, "needs tp above 1")
    if not trains:
        why = "concerns the backward pass, which this role does not have"
        job.why(f"{config}.use_distributed_optimizer", why)
        job.why(f"{config}.recompute_granularity", why)
        job.why(f"{config}.overlap_grad_reduce", why)
        job.why(f"{config}.overlap_param_gather", why)
        return
    job.move(f"{config}.use_distributed_optimizer", f"{out}.distributed_optimizer", "flag")
    _further_layers(job, role, out)
    overlap = f"{config}.overlap_grad_reduce"
    if job.draft.get(f"{out}.mtp_loss_weight") is None:
        job.move(overlap, f"{out}.overlap_grad_reduce", "flag")
    else:
        job.why(overlap, "not with layers that predict further tokens (mtp_loss_weight)")
    gather = f"{config}.overlap_param_gather"
    if all(
        job.draft.get(f"{out}.{key}") for key in ("distributed_optimizer", "overlap_grad_reduce")
    ):
        job.move(gather, f"{out}.overlap_param_gather", "flag")
    job.why(gather, "needs use_distributed_optimizer and overlap_grad_reduce")
    levels = {"full": "full", "selective": "attention", "none": "none"}
    job.choose(f"{config}.recompute_granularity", f"{out}.recompute", levels)


def _further_layers(job: Job, role: str, out: str) -> None:
    """Write how layers that predict further tokens (MTP) are trained beside the policy."""
    mode, config = f"{role}.mtp_training_mode", f"{role}.strategy_args.strategy_config"
    told = (job.keys.text(mode) or "disabled").lower()
    if told not in ("standalone", "joint"):
        why = {"mtp_only": "freeze the other weights (`model.freeze`), with `mtp_loss_weight`"}
        job.why(mode, why.get(told, MTP))
        return
    prevents = (
        job.draft.get("pipeline") == "dpo",
        job.draft.get("model.lora") is not None,
        int(job.draft.get(f"{out}.cp") or 1) > 1,
        not out.startswith("actor_train."),
    )
    if any(prevents):
        job.why(mode, "only of the policy, and not with pairs, adapters or context parallelism")
        return
    factors = [f"{at}.mtp_loss_scaling_factor" for at in (role, config)]
    given = [key for key in factors if (job.keys.number(key) or 0) > 0]
    weight = float(job.keys.number(given[0]) or 0) if given else MTP_WEIGHT
    job.put(f"{out}.mtp_loss_weight", weight, mode, *given[:1])
    if told == "joint":
        job.put(f"{out}.mtp_detached", False, mode)
    job.why(f"{config}.mtp_num_layers", "all such layers of the model are trained")


def _fsdp2(job: Job, role: str, out: str, devices: int, trains: bool) -> None:
    """Write the settings of FSDP2."""
    config = f"{role}.strategy_args.strategy_config"
    size, shards = job.keys.whole(f"{config}.fsdp_size"), devices
    if size is not None and 1 <= size < devices and devices % size == 0:
        note, shards = f"{devices} devices in shards of {size}", size
        job.put(f"{out}.replicas", devices // size, f"{config}.fsdp_size", note=note)
    else:
        job.why(f"{config}.fsdp_size", "the model is sharded over all devices")
    key = f"{role}.model_args.ulysses_size"
    size = job.keys.whole(key)
    if size is not None and size >= 1 and devices % size == 0:
        job.put(f"{out}.ulysses", size, key)
    else:
        job.why(key, f"does not divide the {devices} devices")
    resharding = f"{config}.reshard_after_forward"
    if isinstance(job.keys.raw(resharding), bool):
        job.move(resharding, f"{out}.reshard_after_forward", "flag")
    job.why(resharding, "parameters are freed after the forward pass, or kept; there is no size")
    offload = f"{config}.offload_policy"
    value = job.keys.raw(offload)
    if value is not None:
        job.put(f"{out}.cpu_offload", bool(value), offload)
    reduce = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
    if trains:
        job.choose(f"{config}.reduce_dtype", f"{out}.reduce_dtype", reduce)
    key = f"{config}.ep_size"
    size = job.keys.whole(key)
    if size is not None and size >= 1 and shards % size == 0:
        job.put(f"{out}.ep", size, key)
    else:
        job.why(key, f"does not divide the {shards} devices that share the model")
    job.why(f"{config}.efsdp_size", "follows from `ep` and the devices")
    job.why(f"{config}.param_dtype", "see `dtype` of the model")


def _deepspeed(job: Job, role: str, out: str, trains: bool) -> None:
    """Write stage and offload of ZeRO; where the mapping of the stage is in a file that was not
    found, they follow from its name."""
    config = f"{role}.strategy_args.strategy_config"
    value: Any = job.keys.raw(config)
    if isinstance(value, Unresolved):
        name = value.text
        stage = next((n for n in (3, 2, 1, 0) if f"zero{n}" in name), 2)
        job.put(f"{out}.stage", stage, config, note=f"by the name {name}")
        offload = "offload" in name
        device = {"offload_optimizer": "cpu" if offload else "none", "offload_param": "none"}
        if offload and stage == 3:
            device["offload_param"] = "cpu"
    else:
        zero = f"{config}.zero_optimization"
        found = job.keys.whole(f"{zero}.stage")
        stage = found if found in (0, 1, 2, 3) else 2
        job.put(f"{out}.stage", stage, f"{zero}.stage")
        device = {}
        for name in ("offload_optimizer", "offload_param"):
            device[name] = job.keys.text(f"{zero}.{name}.device") or "none"
        job.keys.explain(config, "ROLL's own figures for DeepSpeed; see `bucket_elements`")
    keys = {name: f"{config}.zero_optimization.{name}.device" for name in device}
    if trains and device["offload_optimizer"] != "none" and stage > 0:
        job.put(f"{out}.offload_optimizer", True, keys["offload_optimizer"])
    if device["offload_param"] != "none" and stage == 3:
        job.put(f"{out}.offload_parameters", True, keys["offload_param"])
