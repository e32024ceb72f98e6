"""Compiled log-probs against those that are computed one operation after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from roll.algorithms.logprobs import LogitChunks, from_hidden
from roll.strategy.training.compiled_logits import compiled_chunks

N, D, V = 23, 8, 40
Numbers = tuple[list[Tensor], list[Tensor]]


def numbers(
    chunks: LogitChunks, dtype: torch.dtype, temperature: float | Tensor, *, learns: bool
) -> Numbers:
    """Results, and gradients of hidden states, weight and bias."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=g).to(dtype).requires_grad_()
        for shape in ((N, D), (V, D), (V,))
    )
    targets = torch.randint(0, V, (N,), generator=g)
    up, up_entropy = torch.randn(2, N, generator=g)
    logprobs, entropy, squares = from_hidden(
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        chunks=chunks,
        entropy=True,
        squares=True,
    )
    assert entropy is not None
    assert squares is not None
    total = (logprobs * up).sum()
    if learns:  # else the entropy has no gradient at all
        total = total + (entropy * up_entropy).sum()
    grads = torch.autograd.grad(total, (hidden, weight, bias))
    return [logprobs, entropy, squares], list(grads)


@contextmanager
def compiler(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with this backend of torch.compile, and nothing that was compiled before."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_default_backend(backend)
    try:
        yield
    finally:
        torch.compiler.set_default_backend("inductor")
        torch._dynamo.reset()


Case = tuple[float | None, float | Tensor, bool, torch.dtype]
COLUMN = torch.rand(N, generator=torch.Generator().manual_seed(1)) + 0.5
CASES: dict[str, list[Case]] = {
    "aot_eager": [
        (None, 0.7, True, torch.float32),
        (2.0, COLUMN, True, torch.float32),
        (2.0, 1.3, False, torch.bfloat16),
    ],
    # PyTorch's compiler, which calls a C++ compiler for many seconds.
    "inductor": [(2.0, COLUMN, True, torch.bfloat16)],
}
"""Cap, temperature, whether the entropy is learned, and dtype, by the backend of torch.compile."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", CASES)
def test_compiled_numbers_and_gradients_are_those_of_single_operations(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with compiler(backend, monkeypatch):
        for cap, temperature, learns, dtype in CASES[backend]:
            chunks = LogitChunks(7, cap)
            plain, compiled = (
                numbers(each, dtype, temperature, learns=learns)
                for each in (chunks, compiled_chunks(chunks))
            )
            for want, got in zip(plain[0], compiled[0], strict=True):
                torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)
            bound = 2e-6 if dtype == torch.float32 else 2e-2
            for want, got in zip(plain[1], compiled[1], strict=True):
                scale = float(want.abs().max())
                torch.testing.assert_close(got, want, atol=bound * scale, rtol=bound)


@pytest.mark.slow
def test_chunks_of_another_length_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler("aot_eager", monkeypatch):
        counts = []
        for tokens in (7, 9, 4, 11, 1):
            chunks = compiled_chunks(LogitChunks(tokens))
            numbers(chunks, torch.float32, 0.7, learns=True)
            counts.append(counters["stats"]["unique_graphs"])
    assert counts == [2] * 5
