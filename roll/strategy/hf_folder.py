"""Names and shapes of the tensors in a Hugging Face checkpoint, read from the file headers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from roll.config.sections.model import ModelConfig
from roll.core.errors import EngineError
from roll.models.parts.further import is_further_name

_FREQUENCIES = re.compile(r"(^|\.)rotary(_pos)?_emb\.inv_freq$")
"""Rotary frequencies, which early Llamas saved; they are known from the config."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors that a push of weights must contain."""

    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor of the checkpoint, by Hugging Face name."""
    optional: frozenset[str]
    """Names that a push may leave out: second names of another tensor (tied weights), and tensors
    that no training backend trains, or only one that loads the vision tower beside the language
    model. The latter keep the values that the engine loaded."""


def read_checkpoint(model: ModelConfig) -> Checkpoint:
    """Read the names and shapes of the tensors of the checkpoint at `model.path`.

    `model.path` is a folder, or a model's name in the local Hugging Face hub cache.

    Raises:
        EngineError: the checkpoint has no safetensors files, or one is damaged.
        OSError: `model.path` is neither of the two.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder_of(model)):
        shapes |= _shapes(file)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    text = config.get_text_config()
    tied = frozenset({"lm_head.weight"}) if _is_tied(config) else frozenset()
    unread = _unread_by_language_model(config)
    untrained = {name for name in shapes if is_never_pushed(name, text) or unread(name)}
    return Checkpoint(shapes, tied | untrained)


def is_never_pushed(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a push of weights never has a tensor of a checkpoint.

    Such tensors are saved rotary frequencies and multi-token prediction layers.

    Args:
        name: Hugging Face name of the tensor.
        config: config of the language model.
    """
    return _FREQUENCIES.search(name) is not None or is_further(name, config)


def is_further(name: str, config: PreTrainedConfig) -> bool:
    """Return whether a tensor of a checkpoint belongs to a multi-token prediction layer.

    Args:
        name: Hugging Face name of the tensor.
        config: config of the language model.
    """
    further = config.to_dict().get("num_nextn_predict_layers") or 0
    return is_further_name(name, config.num_hidden_layers, further)


def _is_tied(config: PreTrainedConfig) -> bool:
    """Return whether the head is the embedding. A model that reads pictures says so in its own
    config; some files say it in that of the language model."""
    return any(
        part.to_dict().get("tie_word_embeddings", False)
        for part in (config, config.get_text_config())
    )


def _unread_by_language_model(config: PreTrainedConfig) -> Callable[[str], bool]:
    """Return a function that tells the tensors of a checkpoint with several parts (a vision tower,
    a language model) that transformers leaves out when it loads the language model alone.

    A run on text alone trains the language model alone if transformers has a class for it, such as
    that of Qwen3.5. Then the engine keeps the tower that it loaded.
    """
    parted = config.get_text_config() is not config
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if parted else None
    patterns = language_model._keys_to_ignore_on_load_unexpected if language_model else None
    unread = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in unread)


def folder_of(model: ModelConfig) -> Path:
    """Return the folder with the files of `model.path`.

    `model.path` is a folder, or a model's name in the local Hugging Face hub cache.

    Raises:
        OSError: it is neither of the two.
    """
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    found = cached_file(model.path, "config.json")
    assert found is not None  # `cached_file` raises if the file is missing
    return Path(found).parent


def _files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers loads; EngineError: there are none.

    A folder may hold more files, such as a copy of the weights in a vendor's own layout.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{folder} has no *.safetensors file; an engine needs them to check pushed weights: "
            "save the checkpoint with `save_pretrained`"
        )
    return files


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file, by name; only the header is read.

    Raises:
        EngineError: the file is damaged, or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()  # the file itself is no iterable
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise EngineError(
            f"{file} is no safetensors file, or damaged ({error}); fetch or write it again"
        ) from error
