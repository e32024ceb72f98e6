"""Engines and sampling of ROLL."""

from __future__ import annotations

from typing import get_args

from roll.config.sections.engines import LoraRank
from roll.migrate.from_roll.roles import DTYPES
from roll.migrate.job import Job

PASSED_ON = {
    "vllm": ("block_size", "max_num_batched_tokens", "enable_chunked_prefill", "kv_cache_dtype"),
    "sglang": ("attention_backend", "chunked_prefill_size", "page_size", "kv_cache_dtype"),
}
"""Options of engines that are passed on under their own names."""
_RENAMED = {
    "vllm": {"max_num_seqs": "max_num_seqs", "max_model_len": "max_model_len"},
    "sglang": {"max_running_requests": "max_num_seqs", "context_length": "max_model_len"},
}
_MEMORY = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
_SIZES = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size"),
    "sglang": ("tp_size", "pp_size"),
}


def put_engine(job: Job, role: str, target: str, devices: tuple[int, ...], tokens: int) -> None:
    """Write the engine of a role that generates.

    Args:
        devices: its devices.
        tokens: largest number of tokens of prompt and response together.
    """
    key = f"{role}.strategy_args.strategy_name"
    name = (job.keys.text(key) or "vllm").lower()
    kind = next((each for each in ("vllm", "sglang", "hf") if each in name), None)
    if kind is None:
        job.ask(f"{target}.strategy: vllm in place of {name}, which is no engine here")
        kind = "vllm"
    job.put(f"{target}.strategy.kind", kind, key)
    job.choose(f"{role}.model_args.dtype", f"{target}.dtype", DTYPES)
    for attention in ("attn_implementation", "flash_attn"):
        job.why(f"{role}.model_args.{attention}", "the engine chooses its kernel")
    if kind == "hf":
        return
    config, out = f"{role}.strategy_args.strategy_config", f"{target}.strategy"
    _put_sizes(job, role, out, kind, devices)
    memory = f"{config}.{_MEMORY[kind]}"
    share = job.keys.number(memory)
    if share is not None and 0 < share < 1:
        job.put(f"{out}.gpu_memory_utilization", float(share), memory)
    for theirs, ours in _RENAMED[kind].items():
        value = job.keys.whole(f"{config}.{theirs}")
        if value is not None and ours == "max_model_len" and value < tokens:
            job.why(f"{config}.{theirs}", f"less than the {tokens} tokens of prompt and response")
        elif value is not None and value >= 1:
            job.put(f"{out}.{ours}", value, f"{config}.{theirs}")
    for option in PASSED_ON[kind]:
        value = job.keys.raw(f"{config}.{option}")
        if isinstance(value, str | int | float | bool):
            job.put(f"{out}.engine_args.{option}", value, f"{config}.{option}")
    if kind == "vllm":
        _put_vllm(job, config, target)
    else:
        job.move(f"{config}.disable_cuda_graph", f"{out}.enforce_eager", "flag")
        job.move(f"{config}.disable_radix_cache", f"{out}.prefix_caching", "flag", lambda v: not v)
        job.move(f"{config}.max_total_tokens", f"{out}.kv_cache_tokens", "whole", _positive)
        job.why(f"{config}.quantization", "sglang gets the weights in the dtype of the engine")


def _put_sizes(job: Job, role: str, out: str, kind: str, devices: tuple[int, ...]) -> None:
    """Write the parallel sizes of an engine, which lies on one machine here."""
    config = f"{role}.strategy_args.strategy_config"
    tp_key, pp_key = (f"{config}.{each}" for each in _SIZES[kind])
    pp = job.keys.whole(pp_key) or 1
    group = f"{role}.num_gpus_per_worker"
    tp, key = job.keys.whole(tp_key), tp_key
    if tp is None and job.keys.whole(group):
        tp, key = max(1, (job.keys.whole(group) or 1) // pp), group
    tp = tp or 1
    if kind == "sglang":
        pp = 1
    per_node = job.keys.whole("num_gpus_per_node") or 8
    wanted = tp
    while tp > 1 and not _fits(devices, tp * pp, per_node):
        tp -= 1
    note = ""
    if tp != wanted:
        note = f"was {wanted}"
        job.ask(
            f"{out}.tp is {tp} in place of {wanted}: an engine lies on one machine, and "
            "engines share the devices of the pool equally"
        )
    if tp > 1 or note:
        job.put(f"{out}.tp", tp, key, note=note)
    elif job.keys.has(key):
        job.put(f"{out}.tp", 1, key)
    if pp > 1:
        job.put(f"{out}.pp", pp, pp_key)
    job.why(pp_key, "one stage")


def _fits(devices: tuple[int, ...], size: int, per_node: int) -> bool:
    """Return whether engines of `size` consecutive devices each lie on one machine."""
    groups = [devices[i : i + size] for i in range(0, len(devices), size)]
    return all(
        len(group) == size and len({device // per_node for device in group}) == 1
        for group in groups
    )


def _put_vllm(job: Job, config: str, target: str) -> None:
    """Write what only vLLM has: graphs, caching, quantisation, adapters."""
    out = f"{target}.strategy"
    job.move(f"{config}.enforce_eager", f"{out}.enforce_eager", "flag")
    job.move(f"{config}.enable_prefix_caching", f"{out}.prefix_caching", "flag")
    lora = job.draft.get("model.lora") if target == "actor_infer" else None
    sleep = f"{config}.sleep_level"
    renewed = target == "actor_infer" and lora is None and not job.draft.get("model.freeze")
    if renewed and job.keys.whole(sleep) in (1, 2):
        job.put(f"{out}.sleep_level", job.keys.whole(sleep), sleep)
    else:
        job.why(sleep, "1, where weights are kept that are not pushed again")
    key = f"{config}.quantization"
    if job.keys.text(key) == "fp8":
        job.put(f"{out}.quantization", "fp8_per_tensor", key)
        job.put(f"{target}.dtype", "bfloat16", key)
        job.put("track.verify_weights", "never", key, note="a quantised engine holds others")
    job.why(key, "this format has no counterpart")
    job.why(f"{config}.hf_overrides", "formats in blocks: `quantization: fp8_per_block`")
    job.why(f"{config}.speculative_config", "set `speculation` (n-grams, a small model; no MTP)")
    rank_key = f"{config}.max_lora_rank"
    adapters = [f"{config}.{name}" for name in ("enable_lora", "max_loras", "max_lora_rank")]
    if lora is None:
        for each in adapters:
            job.why(each, "no adapter is trained")
        return
    ranks = [rank for rank in get_args(LoraRank) if rank >= lora["rank"]]
    if ranks and job.draft.get(f"{out}.pp", 1) == 1:
        job.put(f"{out}.max_lora_rank", min(ranks), rank_key, note="holds model.lora.rank")
        job.put("model.lora.serve", "adapter", f"{config}.enable_lora")
    for each in adapters:
        job.why(each, "the engine has one adapter")


def put_sampling(job: Job, args: str, target: str, tokens_key: str, tokens: int | None) -> None:
    """Write a sampling; what is left out has ROLL's default.

    Args:
        args: key of the `generating_args`.
        tokens_key: key that says the longest response, if `args` does not.
        tokens: the longest response.
    """
    defaults = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
    for name, default in defaults.items():
        key = f"{args}.{name}"
        value = job.keys.number(key)
        if name == "top_k" and value is not None:
            value = -1 if value < 1 else int(value)
        if value is None or (name == "top_p" and not 0 < value <= 1) or value < -1:
            job.why(key, "out of range; ROLL's default stands in")
            job.put(f"{target}.{name}", default)
        else:
            job.put(f"{target}.{name}", value if name == "top_k" else float(value), key)
    if job.draft.get(f"{target}.temperature") < 0:
        job.put(f"{target}.temperature", 0.0, f"{args}.temperature", note="below 0")
    if tokens is not None:
        job.put(f"{target}.max_new_tokens", tokens, f"{args}.max_new_tokens", tokens_key)
    stop = job.keys.texts(f"{args}.stop_strings")
    if stop:
        job.put(f"{target}.stop", stop, f"{args}.stop_strings")


def _positive(value: int) -> int | None:
    return value if value > 0 else None
