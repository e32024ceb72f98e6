"""Output folder of a run. It keeps the newest checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mcore_adapter.errors import ConfigError

_NAME = re.compile(r"step-(\d+)")


class Folder:
    """Output folder of a run, with these contents:

    checkpoints/step-00000100   checkpoint after step 100, written by `mcore_adapter.checkpoint`
    data/                       tokens of the data files, and DPO's reference log-probabilities
    metrics.jsonl               one line for every step and every validation
    model/                      trained model, for `from_pretrained`; absent with lora
    adapter/                    trained LoRA adapter, for PEFT; only with lora
    """

    def __init__(self, path: Path) -> None:
        self.checkpoints = path / "checkpoints"
        self.data = path / "data"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model"
        self.adapter = path / "adapter"

    def newest(self) -> Path | None:
        """Return the last complete checkpoint; None: there is no checkpoint."""
        found = self._steps()
        return found[-1] if found else None

    def refuse_used(self) -> None:
        """Check that no other run has written to this folder.

        Raises:
            ConfigError: the folder has checkpoints, metrics, a model or an adapter.
        """
        for path in (*self._steps(), self.metrics, self.model, self.adapter):
            if path.exists():
                raise ConfigError(
                    f"{path} exists; say resume=auto to go on, or name another output folder"
                )

    def tokens(self, name: str) -> Path:
        """Return the path of the tokens of the dataset `name`."""
        return self.data / f"{name}.safetensors"

    def references(self, name: str) -> Path:
        """Return the path of the reference log-probabilities of the dataset `name`."""
        return self.data / f"reference-{name}.safetensors"

    def forget_references(self) -> None:
        """Delete all reference log-probabilities.

        A run without a checkpoint may start from other weights than an earlier run that computed
        these values and ended before its first checkpoint.
        """
        for path in self.data.glob("reference-*"):
            path.unlink()

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` steps."""
        return self.checkpoints / f"step-{step:08d}"

    def forget(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints; `keep` must be at least 1."""
        for path in self._steps()[:-keep]:
            shutil.rmtree(path)

    def _steps(self) -> list[Path]:
        """Return the folders of all checkpoints, the oldest first.

        They are complete: a checkpoint under construction has another name.
        """
        if not self.checkpoints.is_dir():
            return []
        return sorted(path for path in self.checkpoints.iterdir() if _NAME.fullmatch(path.name))
