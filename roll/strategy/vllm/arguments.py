"""From our configuration to vLLM's engine arguments."""

from __future__ import annotations

from typing import Any

from roll.config.sections.engine_options import NgramSpeculationConfig, SpeculationConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import VllmConfig
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
        "pipeline_parallel_size": config.pp,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager,
        "quantization": config.quantization,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": "roll.strategy.vllm.worker_side.worker.RollWorker",
        "disable_log_stats": True,
        "seed": seed,
    }
    if config.processes > 1:
        # Left to itself vLLM sees that this process lies in a placement group of Ray, and starts
        # its ranks as Ray actors, outside of the devices that the run has given this replica.
        arguments["distributed_executor_backend"] = "mp"
    if config.speculation is not None:
        arguments["speculative_config"] = _speculation(config.speculation)
        # The processed ones come out wrong (on CPUs as NaN) from vLLM's rejection sampler. The raw
        # ones are the same here: `roll check` sees to it that sampling changes no logits.
        arguments["logprobs_mode"] = "raw_logprobs"
    if config.max_lora_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": config.max_lora_rank, "max_loras": 1}
    arguments |= _memory(config, max_model_len, cpu=cpu)
    return arguments | config.engine_args


def _memory(config: VllmConfig, max_model_len: int, *, cpu: bool) -> dict[str, Any]:
    if cpu:
        return cpu_arguments(config.kv_cache_gb, max_model_len, processes=config.processes)
    arguments: dict[str, Any] = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if config.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * (1 << 30))
    return arguments


def _speculation(config: SpeculationConfig) -> dict[str, Any]:
    common = {"method": config.kind, "num_speculative_tokens": config.num_tokens}
    if isinstance(config, NgramSpeculationConfig):
        return common | {
            "prompt_lookup_min": config.min_match,
            "prompt_lookup_max": config.max_match,
        }
    return common | {"model": config.model}
