"""Backends and the kinds of optimizers that they train with, and why not with others."""

from __future__ import annotations

from roll.config.sections.optimizers.kinds import OptimizerConfig

_NO_MATRICES = {
    "deepspeed": "ZeRO cuts the flattened parameters anywhere, so no rank has a whole matrix",
    "megatron": "it keeps q, k and v of a layer in one matrix, and gate and up, so updates would "
    "not be those of the model's own matrices",
}
_WHY_NOT = {
    ("deepspeed", "adamw_8bit"): "its checkpoints hold float32 moments",
    ("megatron", "adamw_8bit"): "its checkpoints hold float32 moments",
    ("deepspeed", "adafactor"): _NO_MATRICES["deepspeed"],
    ("deepspeed", "muon"): _NO_MATRICES["deepspeed"] + ", and DeepSpeed's own Muon clips the "
    "gradients only after their singular values are equal",
    ("deepspeed", "sgd"): "its checkpoints hold the moments of AdamW",
    ("megatron", "adafactor"): _NO_MATRICES["megatron"],
    ("megatron", "muon"): _NO_MATRICES["megatron"],
    ("megatron", "sgd"): "its checkpoints hold the moments of AdamW",
}
"""Backend and kind of optimizer that do not go together -> why."""


def optimizer_problem(backend: str, optimizer: OptimizerConfig) -> str | None:
    """Return why a backend does not train with this optimizer, and what to do; None if it does."""
    why = _WHY_NOT.get((backend, optimizer.kind))
    if why is None:
        return None
    return (
        f"{backend} does not train with {optimizer.kind}: {why}; use strategy.kind: fsdp2, or "
        "optimizer.kind: adamw"
    )
