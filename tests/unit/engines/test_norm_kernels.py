"""Norms of vLLM on CPUs by its kernels: the numbers of transformers' norm, where they may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm._custom_ops  # noqa: F401  # loads the kernels
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from vllm import ir

from roll.strategy.vllm.worker_side.norms import PROVIDER, NormKernels

EPSILON = 1e-5
OPS = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    """vLLM's choice for CPUs, and ours behind it; as it was at the end."""
    before = [op.get_priority() for op in OPS]
    for op in OPS:
        op.set_default(["native"])
    NormKernels().roll_use_norm_kernels()
    yield
    for op, priority in zip(OPS, before, strict=True):
        op.set_default(priority)
        del op.impls[PROVIDER]


def by_transformers(x: Tensor, weight: Tensor) -> Tensor:
    norm = Qwen3RMSNorm(len(weight), eps=EPSILON).to(weight.dtype)
    norm.weight.data = weight
    with torch.no_grad():
        found: Tensor = norm(x)
    return found


def used(op: Any, *arguments: Any) -> str:
    name: str = op.dispatch(*arguments).provider
    return name


@pytest.mark.parametrize("shape", [(1, 128), (70, 128), (5, 4, 32), (3, 96)])
def test_a_norm_in_float32_is_that_of_transformers(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    assert used(OPS[0], x, weight, EPSILON) == PROVIDER
    before = x.clone()
    found = ir.ops.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(found, by_transformers(x, weight), atol=2e-6, rtol=2e-6)
    assert torch.equal(x, before)


def test_a_norm_of_the_heads_in_a_wider_row_is_that_of_transformers() -> None:
    queries = torch.randn(6, 300)[:, 40:168].view(6, 4, 32)
    assert not queries.is_contiguous()
    weight = torch.randn(32)
    found = ir.ops.rms_norm(queries, weight, EPSILON)
    torch.testing.assert_close(found, by_transformers(queries, weight), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_sum_and_its_norm_are_those_of_transformers(tokens: int) -> None:
    x, more, weight = torch.randn(tokens, 128), torch.randn(tokens, 128), torch.randn(128)
    assert used(OPS[1], x, more, weight, EPSILON) == PROVIDER
    total = x + more
    normed, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x, more, weight, EPSILON)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, by_transformers(total, weight), atol=2e-6, rtol=2e-6)


def test_what_the_kernels_compute_in_another_way_stays_with_vllm() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    wide = torch.randn(4, 128)[:, :64]
    half, half_weight = x.bfloat16(), weight.bfloat16()
    assert used(OPS[0], half, half_weight, EPSILON) == "native"
    assert used(OPS[0], half, weight, EPSILON) == "native"
    assert used(OPS[0], x, None, EPSILON) == "native"
    assert used(OPS[0], x, weight, EPSILON, 32) == "native"
    assert used(OPS[1], wide, x, weight, EPSILON) == "native"
    assert used(OPS[1], x, wide, weight, EPSILON) == "native"
    assert used(OPS[1], x, half, weight, EPSILON) == "native"
    assert used(OPS[1], half, half, half_weight, EPSILON) == "native"


def nothing(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return x


def test_a_priority_of_the_user_stays() -> None:
    ir.ops.rms_norm.register_impl("users")(nothing)
    try:
        ir.ops.rms_norm.set_default(["users", "native"])
        NormKernels().roll_use_norm_kernels()
        assert ir.ops.rms_norm.get_priority()[0] == "users"
    finally:
        ir.ops.rms_norm.set_default(["native"])
        del ir.ops.rms_norm.impls["users"]
