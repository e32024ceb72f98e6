"""Norms of vLLM on CPUs by its kernels: the numbers of transformers' norm, where they may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from roll.strategy.vllm.worker_side.norms import PROVIDER, NormKernels

EPSILON = 1e-5


@pytest.fixture
def ops() -> Iterator[Any]:
    """vLLM's operations, with its choice for CPUs and ours behind it; as they were at the end.

    vLLM is imported here: each of pytest's workers reads this module, and one runs it.
    """
    import vllm._custom_ops  # noqa: F401  # loads the kernels
    from vllm import ir

    both = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
    before = [op.get_priority() for op in both]
    for op in both:
        op.set_default(["native"])
    NormKernels().roll_use_norm_kernels()
    yield ir.ops
    for op, priority in zip(both, before, strict=True):
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
def test_a_norm_in_float32_is_that_of_transformers(ops: Any, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    assert used(ops.rms_norm, x, weight, EPSILON) == PROVIDER
    before = x.clone()
    found = ops.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(found, by_transformers(x, weight), atol=2e-6, rtol=2e-6)
    assert torch.equal(x, before)


def test_a_norm_of_the_heads_in_a_wider_row_is_that_of_transformers(ops: Any) -> None:
    queries = torch.randn(6, 300)[:, 40:168].view(6, 4, 32)
    assert not queries.is_contiguous()
    weight = torch.randn(32)
    found = ops.rms_norm(queries, weight, EPSILON)
    torch.testing.assert_close(found, by_transformers(queries, weight), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_sum_and_its_norm_are_those_of_transformers(ops: Any, tokens: int) -> None:
    x, more, weight = torch.randn(tokens, 128), torch.randn(tokens, 128), torch.randn(128)
    assert used(ops.fused_add_rms_norm, x, more, weight, EPSILON) == PROVIDER
    total = x + more
    normed, residual = ops.fused_add_rms_norm.maybe_inplace(x, more, weight, EPSILON)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, by_transformers(total, weight), atol=2e-6, rtol=2e-6)


def test_what_the_kernels_compute_in_another_way_stays_with_vllm(ops: Any) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    wide = torch.randn(4, 128)[:, :64]
    half, half_weight = x.bfloat16(), weight.bfloat16()
    assert used(ops.rms_norm, half, half_weight, EPSILON) == "native"
    assert used(ops.rms_norm, half, weight, EPSILON) == "native"
    assert used(ops.rms_norm, x, None, EPSILON) == "native"
    assert used(ops.rms_norm, x, weight, EPSILON, 32) == "native"
    assert used(ops.fused_add_rms_norm, wide, x, weight, EPSILON) == "native"
    assert used(ops.fused_add_rms_norm, x, wide, weight, EPSILON) == "native"
    assert used(ops.fused_add_rms_norm, x, half, weight, EPSILON) == "native"
    assert used(ops.fused_add_rms_norm, half, half, half_weight, EPSILON) == "native"


def nothing(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return x


def test_a_priority_of_the_user_stays(ops: Any) -> None:
    ops.rms_norm.register_impl("users")(nothing)
    try:
        ops.rms_norm.set_default(["users", "native"])
        NormKernels().roll_use_norm_kernels()
        assert ops.rms_norm.get_priority()[0] == "users"
    finally:
        ops.rms_norm.set_default(["native"])
        del ops.rms_norm.impls["users"]
