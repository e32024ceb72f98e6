"""Translation of the configuration into SGLang's engine arguments and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.sections.engines import SglangConfig
from roll.config.sections.model import ModelConfig
from roll.strategy.sglang.extension import LOADER

CPU_KV_CACHE_TOKENS = 16384
"""Default size of the KV cache without a GPU, in tokens: 64 sequences of 256 tokens."""
_CONTEXT_SLACK = 8
"""Tokens added to the context length, because SGLang does not use all of it.

It ends a response two tokens before the context is full, and accepts only prompts that leave six
tokens free."""


def engine_arguments(
    config: SglangConfig,
    model: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    cpu: bool,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the keyword arguments of SGLang's `Engine`.

    Args:
        dtype: dtype of weights and activations, `float32` or `bfloat16`.
        max_model_len: largest length of prompt plus response, in tokens.
        cpu: true if the engine runs without a GPU.
        overrides: values of the model's config, see `replaced_values`.
    """
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer,
        "trust_remote_code": model.trust_remote_code,
        "dtype": dtype,
        "context_length": max_model_len + _CONTEXT_SLACK,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tp,
        "disable_radix_cache": not config.prefix_caching,
        "disable_cuda_graph": config.enforce_eager or cpu,
        "mem_fraction_static": config.gpu_memory_utilization,
        "max_total_tokens": config.kv_cache_tokens,
        "random_seed": seed,
        "weight_version": "0",
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        # Otherwise each scheduler takes a whole core, also while the others use the device.
        "sleep_on_idle": True,
        "log_level": "error",
        "sampling_backend": "pytorch",  # SGLang's faster samplers do not support seeds
        "sampling_mask_max_tokens": 1 << 20,  # so many that log-probs cover any nucleus of top-p
    }
    sleep = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    arguments |= _cpu_arguments(config, max_model_len) if cpu else sleep
    if overrides:
        arguments["json_model_override_args"] = json.dumps(overrides)
    return arguments | config.engine_args


def _cpu_arguments(config: SglangConfig, max_model_len: int) -> dict[str, Any]:
    """Return the arguments for CPUs; by default the KV cache holds two full sequences or more."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        # Overlap launches a step before the last one is read, which is faster on GPUs only.
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.6,
        "max_total_tokens": config.kv_cache_tokens or max(CPU_KV_CACHE_TOKENS, 2 * max_model_len),
    }


def engine_environment(
    platform: str, cores: Sequence[int], tp: int, have: Mapping[str, str], folder: str
) -> dict[str, str]:
    """Return the environment variables of SGLang's processes.

    Args:
        platform: `cpu` or `cuda`.
        cores: numbers of the cores of this replica.
        tp: number of ranks.
        have: environment of this process.
        folder: folder for temporary files, which SGLang does not remove.
    """
    wanted = dict(have) | {
        "TMPDIR": folder,
        # Needed for `_CONTEXT_SLACK`; positions beyond the model's own limit are never computed.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if platform == "cpu":
        # Even in eager mode torch.compile would call g++ at the first batch.
        wanted.setdefault("TORCHDYNAMO_DISABLE", "1")
        wanted["OMP_NUM_THREADS"] = str(max(1, len(cores) // tp))
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        # SGLang's default needs one NUMA node per rank.
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share)) for share in _shares(cores, tp)
        )
    return wanted


def _shares(cores: Sequence[int], tp: int) -> list[Sequence[int]]:
    """Split the cores into equal parts, one for each rank; those left over stay unused. With fewer
    cores than ranks each rank gets all cores."""
    size = len(cores) // tp
    if size == 0:
        return [cores] * tp
    return [cores[rank * size : (rank + 1) * size] for rank in range(tp)]
