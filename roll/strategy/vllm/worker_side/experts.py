"""Experts on CPUs: vLLM packs them when it loads a model, and every push must pack them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def packing_experts(model: nn.Module) -> Iterator[None]:
    """Let vLLM's reload pack the experts of each layer again; do nothing on other devices.

    vLLM packs experts when it builds a layer's kernel, which it does only once. So a reload would
    put unpacked weights where the kernel reads packed ones. Inside the block no layer has a kernel,
    so that the reload packs again. After the block, also after an error, each layer has its first
    kernel again, which reads from the memory that the reload has filled.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {
        method: kernel
        for method in methods
        if (kernel := getattr(method, "moe_kernel", None)) is not None
        and isinstance(kernel.fused_experts, CPUUnquantizedExperts)
    }
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            method.moe_kernel = kernel
