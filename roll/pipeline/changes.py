"""What a run file says otherwise than the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.run import RunConfig

EXPECTED = ("max_steps", "epochs", "resume", "output_dir", "track", "checkpoint", "cluster")
"""Keys that say how long a run is and what it leaves behind."""


def changed_keys(checkpoint: Path, config: RunConfig) -> list[str]:
    """`key: then -> now` of every value that is another one; none if the file is not there.

    Args:
        config: as the user wrote it.
    """
    file = checkpoint / "config.yaml"
    if not file.is_file():
        return []
    then = dict(_leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))
    now = dict(_leaves(config.model_dump(mode="json")))
    return [
        f"{key}: {then.get(key, 'unset')} -> {now.get(key, 'unset')}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and key.split(".")[0] not in EXPECTED
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value
