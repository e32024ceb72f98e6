"""The tensors of a checkpoint as deferred ones, for transformers to load."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig

from roll.config.sections.model import ModelConfig
from roll.models.deferred.files import stored_tensors, weight_files
from roll.models.deferred.tensor import Deferred
from roll.models.fetch import FILES

LOGGER = logging.getLogger(__name__)


def deferred_tensors(model: ModelConfig, config: PreTrainedConfig) -> dict[str, Tensor] | None:
    """Return the tensors of a checkpoint by their names in its files, without reading them.

    The result is None, and a warning says why, if transformers has to read the files itself: then
    every rank has the whole model in memory for a while.

    Raises:
        OSError: a file is missing, or the hub cannot be reached.
        SafetensorError: a file is damaged.
    """
    folder = Path(model.path)
    if not folder.is_dir():
        folder = Path(snapshot_download(model.path, allow_patterns=FILES))
    files = weight_files(folder)
    why = _what_needs_transformers(model, config, folder)
    if files is None:
        why = "it has no safetensors files"
    if files is not None and why is None:
        found = stored_tensors(files)
        if found is not None:
            return {name: Deferred(each) for name, each in found.items()}
        why = "a tensor has a dtype that is not read in parts"
    LOGGER.warning("model %s: every rank reads all of it before it keeps its part: %s", folder, why)
    return None


def _what_needs_transformers(
    model: ModelConfig, config: PreTrainedConfig, folder: Path
) -> str | None:
    """Return what of a checkpoint only transformers' own reading understands; None: nothing."""
    told = config.to_dict()
    if model.trust_remote_code and told.get("auto_map"):
        return "it has code of its own"
    if told.get("quantization_config"):
        return "its weights are quantised"
    if told.get("transformers_weights"):
        return "its config names other files (transformers_weights)"
    if (folder / "adapter_config.json").exists():
        return "an adapter lies beside it"
    return None
