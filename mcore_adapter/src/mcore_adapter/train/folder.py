"""Output folder of a run. It keeps the newest checkpoints."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from mcore_adapter.convert.storage.output import wait_for_disk
from mcore_adapter.errors import ConfigError

_NAME = re.compile(r"step-(\d+)")
_OLD = ".*.old-????????"
"""Pattern of the hidden names of folders that are being deleted."""


class Folder:
    """Output folder of a run, with these contents:

    checkpoints/step-00000100   checkpoint after step 100, written by `mcore_adapter.checkpoint`
    data/                       tokens of the data files, and DPO's reference log-probabilities
    metrics.jsonl               one line for every step and every validation
    model/                      trained model, for `from_pretrained`; absent with lora
    adapter/                    trained LoRA adapter, for PEFT; only with lora

    A folder gets a hidden name before it is deleted, so that one with a part of its files is never
    taken for a complete one.
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
            _hide(path)
        _sweep(self.checkpoints)

    def aside(self, export: Path) -> Path:
        """Return the path to write an export to; `put_in_place` then gives it its name.

        Args:
            export: `model` or `adapter`, which may exist. It stays until the new one is complete.
        """
        return export.with_name(f".{export.name}.new")

    def put_in_place(self, export: Path) -> None:
        """Give the complete export in `aside(export)` its name, and delete an earlier one."""
        if export.exists():
            _hide(export)
        self.aside(export).rename(export)
        wait_for_disk(export.parent)
        _sweep(export.parent)

    def tidy(self) -> None:
        """Finish what an earlier part of the run began, if it was killed in `put_in_place` or
        `forget`."""
        for export in (self.model, self.adapter):
            aside = self.aside(export)
            if aside.exists() and not export.exists():
                aside.rename(export)
            elif aside.exists():
                shutil.rmtree(aside)
        for folder in (self.model.parent, self.checkpoints):
            _sweep(folder)

    def _steps(self) -> list[Path]:
        """Return the folders of all checkpoints, the oldest first.

        They are complete: a checkpoint under construction has another name.
        """
        if not self.checkpoints.is_dir():
            return []
        return sorted(path for path in self.checkpoints.iterdir() if _NAME.fullmatch(path.name))


def _hide(path: Path) -> None:
    """Give a folder that shall be deleted a hidden name, which `_sweep` finds."""
    path.rename(path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:8]}"))


def _sweep(folder: Path) -> None:
    """Delete the hidden folders in `folder` that `_hide` has made.

    Some network file systems refuse to delete a file that a reader still has open. Such a folder
    stays until the next call.
    """
    for path in folder.glob(_OLD):
        shutil.rmtree(path, ignore_errors=True)
