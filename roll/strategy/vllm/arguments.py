"""Translation of the configuration into vLLM's engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.sections.engines import (
    DraftSpeculationConfig,
    NgramSpeculationConfig,
    SpeculationConfig,
    VllmConfig,
)
from roll.config.sections.model import ModelConfig
from roll.core.types import WorkerSpec
from roll.strategy.vllm.compat import cpu_arguments
from roll.strategy.vllm.pictures import PICTURE_ARGUMENTS


def engine_arguments(
    config: VllmConfig,
    model: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    spec: WorkerSpec,
    cpu_token_bytes: int | None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the keyword arguments of `AsyncEngineArgs`.

    Args:
        dtype: dtype of weights and activations, `float32` or `bfloat16`.
        max_model_len: largest length of prompt plus response, in tokens.
        spec: place of this process, whose engine may lie on several nodes.
        cpu_token_bytes: bytes that a token takes in the KV cache of all layers; None: the engine
            runs on GPUs.
        overrides: values of the model's config, see `missing_keys` and `replaced_values`.
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
        "enforce_eager": config.eager_on(spec.platform),
        "quantization": config.quantization,
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that is sampled from
        "worker_extension_cls": "roll.strategy.vllm.worker_side.worker.RollWorker",
        "disable_log_stats": True,
        "seed": spec.seed,
        **PICTURE_ARGUMENTS,
    }
    if config.processes > 1:
        # By default vLLM notices that this process is in a Ray placement group and starts its ranks
        # as Ray actors, which do not use the devices that the run assigned to this replica.
        arguments["distributed_executor_backend"] = "mp"
    arguments |= _nodes(spec, config.processes)
    if config.speculation is not None:
        arguments["speculative_config"] = _speculation(config.speculation)
        # vLLM's rejection sampler returns wrong processed log-probs (NaN on CPUs). The raw ones are
        # equal here: `roll check` makes sure that the sampling settings change no logits.
        arguments["logprobs_mode"] = "raw_logprobs"
    if config.max_lora_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": config.max_lora_rank, "max_loras": 1}
    arguments |= _memory(config, max_model_len, cpu_token_bytes)
    arguments |= config.engine_args
    if overrides:
        arguments["hf_overrides"] = {**overrides, **config.engine_args.get("hf_overrides", {})}
    return arguments


def _nodes(spec: WorkerSpec, processes: int) -> dict[str, Any]:
    """Return the arguments of an engine on several nodes: vLLM starts the same number of processes
    on each, and all meet at an address of the first."""
    if not spec.parts:
        return {}
    host, _, port = spec.rendezvous.rpartition(":")
    arguments: dict[str, Any] = {
        "nnodes": len(spec.parts),
        "node_rank": spec.part,
        "master_addr": host,
        "master_port": int(port),
    }
    if spec.platform == "cpu":
        # vLLM takes two processes for neighbours by the number of visible devices of a node, which
        # is 1 on any CPU unless it is told.
        arguments["device_ids"] = list(range(processes // len(spec.parts)))
    return arguments


def _memory(config: VllmConfig, max_model_len: int, cpu_token_bytes: int | None) -> dict[str, Any]:
    """Return the arguments that limit vLLM's memory; `kv_cache_gb` fixes the KV cache's size."""
    if cpu_token_bytes is not None:
        size = config.cpu_cache_bytes(cpu_token_bytes // config.processes, max_model_len)
        return cpu_arguments(size, max_model_len, processes=config.processes)
    arguments: dict[str, Any] = {
        "enable_sleep_mode": True,
        # vLLM wants this share of the device free when it starts, whatever the cache's size.
        "gpu_memory_utilization": 0.01 if config.kv_cache_gb else config.gpu_memory_utilization,
    }
    if config.sleep_level == 2 and isinstance(config.speculation, DraftSpeculationConfig):
        # No push brings the weights of the small model, which sleep would drop, too.
        arguments["sleep_preserve_parameter_names"] = ["draft.*"]
    if config.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * (1 << 30))
    return arguments


def _speculation(config: SpeculationConfig) -> dict[str, Any]:
    """Return vLLM's config of speculation, by n-grams of the text so far or by a model."""
    common = {"method": config.kind, "num_speculative_tokens": config.num_tokens}
    if isinstance(config, NgramSpeculationConfig):
        return common | {
            "prompt_lookup_min": config.min_match,
            "prompt_lookup_max": config.max_match,
        }
    return common | {"model": config.model}
