"""LoRA adapters in PEFT format: their two files, the names of the factors, and their scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from mcore_adapter.convert.run_conversion import Delta
from mcore_adapter.convert.storage.folders import HfFolder
from mcore_adapter.convert.storage.json_file import read_json
from mcore_adapter.convert.storage.tensor_file import read_header
from mcore_adapter.errors import ConversionError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of tensors in PEFT's files."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = (
    "modules_to_save",
    "use_dora",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
_CHANGES_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""Beginnings of the values of `init_lora_weights` with which PEFT changes the weights of the model,
so that the factors do not belong to the weights of its folder."""


def open_peft(path: Path, base: Mapping[str, Any]) -> HfFolder:
    """Read the configuration and the headers of an adapter in PEFT format.

    Args:
        base: the `config.json` of the model that the adapter changes.

    Raises:
        ConversionError: `path` holds no complete LoRA adapter of linear layers.
    """
    config = read_json(path / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ConversionError(f"{path} is of type {config.get('peft_type')!r}, expected 'LORA'")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ConversionError(
                f"{path / CONFIG}: {name} is {config[name]!r}; only low-rank factors of linear "
                "layers are converted"
            )
    _check_base_unchanged(path / CONFIG, config)
    if not (path / WEIGHTS).is_file():
        raise ConversionError(f"{path / WEIGHTS} is missing")
    tensors = read_header(path / WEIGHTS)
    strange = [name for name in tensors if not _NAME.fullmatch(name)]
    if strange:
        raise ConversionError(f"{path / WEIGHTS}: {strange[0]} is no factor of a linear layer")
    flat = [name for name, piece in tensors.items() if len(piece.spec.shape) != 2]
    if flat:
        raise ConversionError(
            f"{path / WEIGHTS}: {flat[0]} has shape {list(tensors[flat[0]].spec.shape)}, expected "
            "a matrix"
        )
    empty = [name for name, piece in tensors.items() if 0 in piece.spec.shape]
    if empty:
        raise ConversionError(f"{path / WEIGHTS}: {empty[0]} is empty")
    lonely = [name for name in tensors if _partner(name) not in tensors]
    if lonely:
        raise ConversionError(f"{path / WEIGHTS} has {lonely[0]} but not {_partner(lonely[0])}")
    return HfFolder(path, base, tensors)


def _check_base_unchanged(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `ConversionError` if PEFT changed the model's weights when it made the adapter.

    Args:
        path: path of the adapter's configuration, for the error message.
        config: content of the file.
    """
    made = str(config.get("init_lora_weights")).lower()
    if not made.startswith(_CHANGES_BASE):
        return
    # PEFT cannot make a plain adapter of LoftQ's, because it quantizes the weights.
    instead = (
        "merge it in PEFT and convert the merged model"
        if made == "loftq"
        else "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA"
    )
    raise ConversionError(
        f"{path}: init_lora_weights is {config['init_lora_weights']!r}, with which PEFT changes "
        f"the model's own weights, too, expected factors for the weights as they are; {instead}"
    )


def _partner(name: str) -> str:
    """Return the name of factor B of the same layer for that of factor A, and vice versa."""
    one, other = (".lora_A.", ".lora_B.") if ".lora_A." in name else (".lora_B.", ".lora_A.")
    return name.replace(one, other)


def factor_name(module: str, which: str) -> str:
    """Return the name in a PEFT file of factor `A` or `B` of a linear layer of Hugging Face."""
    return f"{PREFIX}{module}.lora_{which}.weight"


def adapted_modules(folder: HfFolder) -> set[str]:
    """Return the Hugging Face names of the linear layers that have factors in an adapter."""
    return {match[1] for name in folder.tensors if (match := _NAME.fullmatch(name))}


def deltas_of(folder: HfFolder) -> dict[str, Delta]:
    """Return the low-rank updates of a PEFT adapter, by Hugging Face name of the weight. Each has
    the rank of its tensors, and the scale alpha / rank, or alpha / sqrt(rank) with `use_rslora`.

    Args:
        folder: adapter that `open_peft` has checked.

    Raises:
        ConversionError: `lora_alpha` or `alpha_pattern` of its configuration is missing or invalid.
    """
    path = folder.path / CONFIG
    config = read_json(path)
    default = scale_key(path, config, "lora_alpha")
    patterns = _patterns(path, config)
    found = {}
    for name, piece in folder.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "A":
            continue
        module, rank = match[1], piece.spec.shape[0]
        alpha = next((a for pattern, a in patterns.items() if pattern.match(module)), default)
        scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
        b = folder.tensors[factor_name(module, "B")]
        found[f"{module}.weight"] = Delta(piece, b, scale)
    return found


def scale_key(path: Path, config: Mapping[str, Any], name: str) -> float:
    """Return a positive number of `adapter_config.json`.

    Args:
        path: path of the file, for error messages.
        config: content of the file, or of an object in it.
        name: key of the number.

    Raises:
        ConversionError: the value is missing or no positive number.
    """
    found = config.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise ConversionError(f"{path}: {name} is {found!r}, expected a positive number")
    return found


def _patterns(path: Path, config: Mapping[str, Any]) -> dict[re.Pattern[str], float]:
    """Return the alpha of each key of `alpha_pattern`, by compiled pattern.

    A pattern matches as in PEFT: against the end of a module's name.

    Raises:
        ConversionError: `alpha_pattern` is no object of valid patterns and positive numbers.
    """
    found = config.get("alpha_pattern") or {}
    if not isinstance(found, dict):
        raise ConversionError(f"{path}: alpha_pattern is {found!r}, expected an object")
    try:
        return {re.compile(rf"(.*\.)?({k})$"): scale_key(path, found, k) for k in found}
    except re.error as error:
        raise ConversionError(f"{path}: alpha_pattern has no pattern: {error}") from error
