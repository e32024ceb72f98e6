"""Names of tensors: those of a checkpoint, and the paths of vLLM's modules."""

from __future__ import annotations

from typing import Any

from torch import nn


def renaming(model: nn.Module) -> Any:
    """Return vLLM's map (`WeightsMapper`) from the names of a checkpoint to the paths in `model`;
    None if they are the same.

    They differ in models with a vision tower: `model.language_model.norm.weight` of the checkpoint
    is `language_model.model.norm.weight` in vLLM. Parts that vLLM stacks, such as `q_proj`, keep
    their own last names.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


class ModulePaths:
    """Map from the names of a checkpoint to the paths of vLLM's `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._renaming = renaming(model)

    def __call__(self, name: str) -> str:
        """Return the path of a tensor."""
        path: str = name if self._renaming is None else self._renaming.map_name(name)
        return path
