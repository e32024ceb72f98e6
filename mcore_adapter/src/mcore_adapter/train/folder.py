"""The output folder: checkpoints by step, the newest kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mcore_adapter.errors import ConfigError

_NAME = re.compile(r"step-(\d+)")


class Folder:
    """
    checkpoints/step-00000100   what `mcore_adapter.checkpoint` writes
    data/                       tokens of the data files, and DPO's reference log-probabilities
    metrics.jsonl               a line for every step and every validation
    model/                      the result, for `from_pretrained`; of lora
    adapter/                    instead, for PEFT
    """

    def __init__(self, path: Path) -> None:
        self.checkpoints = path / "checkpoints"
        self.data = path / "data"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model"
        self.adapter = path / "adapter"

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        found = self._steps()
        return found[-1] if found else None

    def refuse_used(self) -> None:
        """
        Raises:
            ConfigError: another run was here.
        """
        for path in (*self._steps(), self.metrics, self.model, self.adapter):
            if path.exists():
                raise ConfigError(
                    f"{path} exists; say resume=auto to go on, or name another output folder"
                )

    def tokens(self, name: str) -> Path:
        return self.data / f"{name}.safetensors"

    def references(self, name: str) -> Path:
        return self.data / f"reference-{name}.safetensors"

    def forget_references(self) -> None:
        """A run that starts may start from other weights than one that came no further."""
        for path in self.data.glob("reference-*"):
            path.unlink()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def forget(self, keep: int) -> None:
        """Delete all checkpoints but the newest."""
        for path in self._steps()[:-keep]:
            shutil.rmtree(path)

    def _steps(self) -> list[Path]:
        if not self.checkpoints.is_dir():
            return []
        return sorted(path for path in self.checkpoints.iterdir() if _NAME.fullmatch(path.name))
