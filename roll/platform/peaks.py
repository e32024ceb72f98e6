"""Peak speeds of GPUs, by the name that CUDA gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Peak:
    """Peak speed of a product without sparsity, in TFLOP/s."""

    name: str
    """Regular expression of its names."""
    bfloat16: float | None
    """With sums in float32, which are those of PyTorch; None: it has no units for it."""
    float32: float
    """Without TensorFloat-32, which PyTorch does not use unless it is told to."""


_MEMORY = r"( \d+GB)?( HBM[23]e?)?"
_PEAKS = (
    _Peak(rf"B200{_MEMORY}", 2250, 75),
    _Peak(rf"GB200{_MEMORY}", 2500, 80),
    _Peak(rf"H(100|200|800){_MEMORY}|GH200( \d+GB)?", 989.4, 66.9),
    _Peak(r"H(100|200) NVL", 835.5, 60),
    _Peak(r"H100 PCIe", 756, 51.2),
    _Peak(rf"H20{_MEMORY}", 148, 44),
    _Peak(r"A[18]00[- ](SXM4?|PCIE?)[- ]\d+GB|A[18]00 80GB PCIe", 312, 19.5),
    _Peak(r"A40", 149.7, 37.4),
    _Peak(r"A10", 125, 31.2),
    _Peak(r"L40S", 362, 91.6),
    _Peak(r"L40", 181, 90.5),
    _Peak(r"L4", 121, 30.3),
    _Peak(r"RTX A6000", 154.8, 38.7),
    _Peak(r"RTX 6000 Ada Generation", 364.2, 91.1),
    _Peak(r"GeForce RTX 5090", 209.5, 104.8),
    _Peak(r"GeForce RTX 4090", 165.2, 82.6),
    _Peak(r"GeForce RTX 3090", 71, 35.6),
    _Peak(r"V100-SXM[23]-\d+GB", None, 15.7),
    _Peak(r"V100-PCIE-\d+GB", None, 14),
)
"""Figures of NVIDIA's data sheets and architecture papers, those "with sparsity" halved."""


def peak_tflops(name: str, dtype: str) -> float | None:
    """Return the peak speed of matrix products of a GPU in a dtype, without sparsity; None if it is
    not known.

    Args:
        name: such as `NVIDIA H100 80GB HBM3`; slices of a GPU (MIG) have names of their own.
        dtype: `bfloat16` or `float32`.
    """
    product = re.sub(r"^(NVIDIA|Tesla) |^NVIDIA Tesla ", "", name)
    for peak in _PEAKS:
        if re.fullmatch(peak.name, product):
            return {"bfloat16": peak.bfloat16, "float32": peak.float32}.get(dtype)
    return None
