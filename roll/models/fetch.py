"""Models of the hub, brought to this machine before anybody waits for workers that load them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError

LOGGER = logging.getLogger(__name__)
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
"""Weights, what describes them, tokenizers and model code; not weights in other formats."""


def fetch(
    models: Iterable[ModelConfig], *, download: Callable[..., Any] = snapshot_download
) -> None:
    """Download what is not on this machine; folders are left alone.

    It takes as long as it takes: the hub's client has limits of its own, on each read that brings
    nothing (`HF_HUB_DOWNLOAD_TIMEOUT`). Nodes that share no cache with this one download by
    themselves, as they load.

    Raises:
        ConfigError: the hub cannot be reached, or has no such model.
    """
    paths = dict.fromkeys(
        path for model in models for path in (model.path, model.tokenizer) if path is not None
    )
    for path in paths:
        if Path(path).expanduser().exists():
            continue
        LOGGER.info("%s: making sure that its files are on this machine", path)
        try:
            download(path, allow_patterns=_FILES)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ConfigError(
                f"model {path!r} could not be taken from the hub ({reason}); what has arrived is "
                "kept, so that the same command goes on from there"
            ) from error
