"""From our configuration to vLLM's engine arguments."""

from __future__ import annotations

from typing import Any

from roll.config.model import ModelConfig
from roll.config.strategy import VllmConfig
from roll.strategy.vllm.compat import cpu_arguments


def engine_arguments(
    config: VllmConfig, model: ModelConfig, *, dtype: str, max_model_len: int, seed: int, cpu: bool
) -> dict[str, Any]:
    """Keywords of `AsyncEngineArgs`.

    Args:
        dtype: of weights and activations, `float32` or `bfloat16`.
        max_model_len: longest prompt plus response, in tokens.
    """
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer,
        "trust_remote_code": model.trust_remote_code,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tp,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": "roll.strategy.vllm.extension.WeightLoader",
        "disable_log_stats": True,
        "seed": seed,
    }
    if cpu:
        return arguments | cpu_arguments(config.kv_cache_gb, max_model_len)
    arguments["enable_sleep_mode"] = True
    arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * (1 << 30))
    return arguments
