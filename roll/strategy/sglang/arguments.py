"""From our configuration to SGLang's engine arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import SglangConfig
from roll.strategy.sglang.extension import LOADER

CPU_KV_CACHE_TOKENS = 16384
"""Without a GPU, unless set; enough for 64 sequences of 256 tokens."""
_CONTEXT_SLACK = 8
"""SGLang ends responses two tokens before the context is full, and takes prompts that leave six."""


def engine_arguments(
    config: SglangConfig,
    model: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    cpu: bool,
) -> dict[str, Any]:
    """Keywords of SGLang's `Engine`.

    Args:
        dtype: of weights and activations, `float32` or `bfloat16`.
        max_model_len: longest prompt plus response, in tokens.
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
        "log_level": "error",
        # SGLang's fastest samplers take no seeds; this one does.
        "sampling_backend": "pytorch",
        # So that log-probs of top-p come from the whole nucleus, however wide it is.
        "sampling_mask_max_tokens": 1 << 20,
    }
    arguments |= _cpu_arguments(config, max_model_len) if cpu else {"enable_memory_saver": True}
    if not cpu:
        arguments["enable_weights_cpu_backup"] = True
    return arguments | config.engine_args


def _cpu_arguments(config: SglangConfig, max_model_len: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        # It launches the next step before the last one is read, which pays on GPUs only.
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.6,
        "max_total_tokens": config.kv_cache_tokens or max(CPU_KV_CACHE_TOKENS, 2 * max_model_len),
    }


def engine_environment(
    platform: str, cores: Sequence[int], tp: int, have: Mapping[str, str], folder: str
) -> dict[str, str]:
    """The environment of SGLang's processes.

    Args:
        have: this process's own.
        folder: for their files, which they leave behind.
    """
    wanted = dict(have) | {
        "TMPDIR": folder,
        # Because of the slack; positions beyond the model's own are never computed.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if platform == "cpu":
        # Even in eager mode torch.compile would call g++ at the first batch.
        wanted.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Idle OpenMP threads sleep instead of spinning on the trainer's cores.
        wanted.setdefault("OMP_WAIT_POLICY", "passive")
        wanted["OMP_NUM_THREADS"] = str(max(1, len(cores) // tp))
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        # By itself SGLang wants one NUMA node per rank.
        wanted["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share)) for share in _shares(cores, tp)
        )
    return wanted


def _shares(cores: Sequence[int], tp: int) -> list[Sequence[int]]:
    """The cores of each rank; all of them where there are fewer cores than ranks."""
    size = len(cores) // tp
    if size == 0:
        return [cores] * tp
    return [cores[rank * size : (rank + 1) * size] for rank in range(tp)]
