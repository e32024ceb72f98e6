"""Download of hub models to this machine before workers start to load them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from roll.config.errors import nearest
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.core.hub import models_here, require_hub

LOGGER = logging.getLogger(__name__)
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
"""Patterns of the files to download: safetensors weights, configs, tokenizers and model code."""


def fetch(
    models: Iterable[ModelConfig],
    *,
    download: Callable[..., Any] = snapshot_download,
    reach: Callable[[str], None] = require_hub,
) -> None:
    """Download hub models and tokenizers into this machine's cache; skip existing paths.

    Only the files of `FILES` come: no pytorch_model.bin. After an error, a retry goes on.

    The whole download has no time limit. The hub's client limits each read that receives no data
    (`HF_HUB_DOWNLOAD_TIMEOUT`). Nodes that do not share this machine's cache download the files
    when they load the model.

    Args:
        download: function of the hub's client, replaceable for tests.
        reach: function that refuses what is not here if the hub does not answer; likewise.

    Raises:
        ConfigError: the hub cannot be reached, or it has no such model.
    """
    paths = dict.fromkeys(
        path for model in models for path in (model.path, model.tokenizer) if path is not None
    )
    for path in paths:
        if Path(path).expanduser().exists():
            continue
        LOGGER.info("%s: making sure that its files are on this machine", path)
        reach(path)
        try:
            download(path, allow_patterns=FILES)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ConfigError(
                f"model {path!r} is no folder here, and could not be taken from the hub "
                f"({reason}); what has arrived is kept, so that the same command goes on from "
                f"there{nearest(path, models_here())}"
            ) from error
