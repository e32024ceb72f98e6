"""Bytes that an engine needs on each of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from roll.commands.memory.needs import FULL, Needs
from roll.commands.memory.sizes import ModelSizes
from roll.config.sections.engines import EngineConfig, HfEngineConfig, SglangConfig, VllmConfig
from roll.platform.machine import GIB

CPU_KV_TOKENS = 2**14
"""KV cache of SGLang without a GPU, unless it is set, in tokens."""
_BITS = {"mxfp4": 4, "nvfp4_per_token": 4}
"""Bits of a weight by format of quantization; 8 of all others."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that an engine gets."""

    tokens: int
    """Largest number of tokens of prompt and response together."""
    width: int
    """Bytes of an element."""


def served(
    sizes: ModelSizes, strategy: EngineConfig, requests: Requests, memory: float | None
) -> Needs:
    """Return what a process of an engine needs.

    The KV cache is that of the config; where it is a share of the device, it is what the share
    leaves, and at least one sequence.

    Args:
        memory: memory of the GPU, in bytes; None: it is not known, or there is no GPU.
    """
    b = requests.width
    per_token = _cached_bytes(sizes, strategy, b)
    sequence = per_token * requests.tokens
    quantised = sizes.quantised_bytes
    whole = b * sizes.total if quantised is None else quantised
    weights = whole // strategy.processes
    logits = 2 * FULL * strategy.max_num_seqs * sizes.vocab // strategy.processes
    match strategy:
        case HfEngineConfig():
            return Needs(weights=weights, kv_cache=strategy.max_num_seqs * sequence, buffers=logits)
        case VllmConfig():
            if strategy.quantization is not None and quantised is None:
                weights = weights * _BITS.get(strategy.quantization, 8) // (8 * b)
            cache = None if strategy.kv_cache_gb is None else int(strategy.kv_cache_gb * GIB)
            default = strategy.cpu_cache_bytes(per_token, requests.tokens)
        case SglangConfig():
            tokens = strategy.kv_cache_tokens
            cache, default = (
                None if tokens is None else tokens * per_token,
                CPU_KV_TOKENS * per_token,
            )
    if cache is None and memory is not None:
        left = strategy.gpu_memory_utilization * memory - weights - logits
        cache = max(sequence, int(left))
    return Needs(weights=weights, kv_cache=default if cache is None else cache, buffers=logits)


def _cached_bytes(sizes: ModelSizes, strategy: EngineConfig, b: int) -> int:
    """Return the bytes of a token in the KV cache of a process. A tensor parallel rank has a whole
    head of keys at least. The vectors of latent attention have no heads that ranks could divide;
    `hf` caches the keys and values that it makes of them."""
    stages = strategy.pp if isinstance(strategy, VllmConfig) else 1
    if not sizes.latent or isinstance(strategy, HfEngineConfig):
        width = sizes.queries // sizes.heads
        each = sizes.keys // (strategy.processes // stages)
        return 2 * b * sizes.layers * max(each, width) // stages
    return b * sizes.layers * sizes.latent // stages
