"""Benchmark of vLLM's RMS norms without a GPU: its operations of PyTorch, and its compiled kernels.

For some numbers of tokens and widths, in float32: the time of a norm, and of a norm behind a sum,
each as vLLM computes it by itself and with the kernels that `roll_use_norm_kernels` chooses.

    python benchmarks/norm_kernels.py [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
import vllm._custom_ops  # noqa: F401  # loads the kernels
from torch import Tensor
from vllm import ir

from roll.strategy.vllm.worker_side.norms import PROVIDER, NormKernels

SHAPES = ((16, 128), (256, 128), (2048, 128), (256, 4, 32), (16, 1024), (256, 1024), (2048, 1024))
"""Tokens and width; between them the number of heads, where each head has a norm of its own."""
EPSILON = 1e-6


def microseconds(run: Callable[[], object]) -> float:
    """Return the shortest of five times of one call, in microseconds."""
    calls, _ = timeit.Timer(run).autorange()
    return min(timeit.repeat(run, number=calls, repeat=5)) / calls * 1e6


def norms(provider: str, x: Tensor, more: Tensor, weight: Tensor) -> tuple[float, float]:
    """Return the times of a norm and of a norm behind a sum, in microseconds."""
    norm = ir.ops.rms_norm.impls[provider].impl_fn
    added = ir.ops.fused_add_rms_norm.impls[provider].impl_fn
    return (
        microseconds(lambda: norm(x, weight, EPSILON)),
        microseconds(lambda: added(x.clone(), more, weight, EPSILON)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    NormKernels().roll_use_norm_kernels()
    print("| shape | norm: PyTorch | kernel | sum and norm: PyTorch | kernel |")
    print("|---|---|---|---|---|")
    with torch.inference_mode():
        for shape in SHAPES:
            x, more, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
            (slow, slow_added), (fast, fast_added) = (
                norms(provider, x, more, weight) for provider in ("native", PROVIDER)
            )
            print(
                f"| {' x '.join(map(str, shape))} | {slow:.0f} us | {fast:.0f} us "
                f"| {slow_added:.0f} us | {fast_added:.0f} us |"
            )


if __name__ == "__main__":
    main()
