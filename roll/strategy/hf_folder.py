"""What a Hugging Face folder holds, read from its headers: names and shapes, no values."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from roll.config.sections.model import ModelConfig
from roll.core.errors import EngineError

_UNTRAINED = re.compile(
    r"(^|\.)rotary(_pos)?_emb\.inv_freq$"  # of the config; early Llamas saved it
    r"|(^|\.)mtp(_layers)?\."  # layers that predict further tokens, as in Qwen3-Next
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors a push of weights must bring."""

    shapes: dict[str, tuple[int, ...]]
    """By Hugging Face name."""
    optional: frozenset[str]
    """Names that may come or stay away: second names of another tensor (tied), and what no trainer
    here trains, which stays as the engine loaded it."""


def read_checkpoint(model: ModelConfig) -> Checkpoint:
    """The tensors of `model.path`, a folder or a name in the local hub cache.

    Raises:
        EngineError: the checkpoint has no safetensors files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder_of(model)):
        shapes |= _header(file)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    text = config.get_text_config()
    tied = frozenset({"lm_head.weight"}) if text.tie_word_embeddings else frozenset()
    return Checkpoint(shapes, tied | {name for name in shapes if is_untrained(name, text)})


def is_untrained(name: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor of a checkpoint is one that no training backend has.

    Args:
        config: of the language model.
    """
    if _UNTRAINED.search(name):
        return True
    layer = _LAYER.search(name)
    # DeepSeek-V3 and GLM-4 MoE count those that predict further tokens on from the last one.
    further = config.to_dict().get("num_nextn_predict_layers") or 0
    beyond = int(layer[1]) - config.num_hidden_layers if layer else -1
    return 0 <= beyond < further


def folder_of(model: ModelConfig) -> Path:
    """Where the files of `model.path` are, a folder or a name in the local hub cache."""
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    found = cached_file(model.path, "config.json")
    assert found is not None  # it raises when there is none
    return Path(found).parent


def _files(folder: Path) -> list[Path]:
    """Those that transformers loads; others, such as a copy in a vendor's own layout, may lie
    beside them."""
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


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entries = json.loads(stream.read(size))
    return {
        name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"
    }
