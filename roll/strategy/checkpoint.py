"""What a Hugging Face folder holds, read from its headers: names and shapes, no values."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig
from transformers.utils.hub import cached_file

from roll.config.model import ModelConfig
from roll.core.errors import EngineError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors a push of weights must bring."""

    shapes: dict[str, tuple[int, ...]]
    """By Hugging Face name."""
    optional: frozenset[str]
    """Names that are a second name of another tensor (tied); they may come or stay away."""


def read_checkpoint(model: ModelConfig) -> Checkpoint:
    """The tensors of `model.path`, a folder or a name in the local hub cache.

    Raises:
        EngineError: the checkpoint has no safetensors files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder_of(model)):
        shapes |= _header(file)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    tied = bool(config.get_text_config().tie_word_embeddings)
    return Checkpoint(shapes, frozenset({"lm_head.weight"}) if tied else frozenset())


def folder_of(model: ModelConfig) -> Path:
    """Where the files of `model.path` are, a folder or a name in the local hub cache."""
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    found = cached_file(model.path, "config.json")
    assert found is not None  # it raises when there is none
    return Path(found).parent


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{folder} has no *.safetensors file; an engine needs them to check pushed weights: "
            "save the checkpoint with `save_pretrained`"
        )
    return files


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entries = json.loads(stream.read(size))
    return {
        name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
    }
