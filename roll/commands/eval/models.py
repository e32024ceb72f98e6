"""Models that an evaluation names: folders, names on the hub, and runs with their checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import ConfigError
from roll.core.hub import may_be_on_hub
from roll.output_dir.checkpoints import Checkpoints
from roll.output_dir.resume import exported_step

PIECE = 1 << 20
"""Bytes of a file of weights that are read at each of three places."""


@dataclass(frozen=True, slots=True)
class Examinee:
    """A model to be evaluated."""

    name: str
    """Name in the table, and of its folder: `Qwen--Qwen3-1.7B`, `run-step10`."""
    path: str
    """Folder in the format of Hugging Face, which is written first if `checkpoint` is set; or a
    name on the hub."""
    checkpoint: Path | None = None
    """Checkpoint of a run that has to be written as such a folder; None if there is nothing to
    do."""
    run: str | None = None
    """Name of the run whose weights they are; None if the model is of none."""
    step: int | None = None
    """Number of steps that the run had done."""


def find_models(named: Sequence[str], steps: Sequence[int], out: Path) -> list[Examinee]:
    """Return the models that the command line names, in its order.

    Args:
        named: folders of models, names on the hub, or output folders of runs.
        steps: numbers of the checkpoints of each run; empty: its last weights.
        out: output folder of the evaluation, where checkpoints are written as models.

    Raises:
        ConfigError: one of them is no model, or two have one name.
    """
    found: list[Examinee] = []
    for text in named:
        path = Path(text).expanduser()
        if (path / "checkpoints").is_dir() or (path / "hf").is_dir():
            found += _of_run(path, steps, out)
        elif (path / "config.json").is_file():
            found.append(Examinee(path.resolve().name, str(path.resolve())))
        elif path.exists() or not may_be_on_hub(text):
            raise ConfigError(
                f"{text} is no model: expected a folder with config.json, the output_dir of a run "
                "with checkpoints/ or hf/, or `org/name` on the hub"
            )
        else:
            found.append(Examinee(text.replace("/", "--"), text))
    if steps and not any(one.checkpoint for one in found):
        raise ConfigError(f"--checkpoint: none of {', '.join(named)} is a run with checkpoints/")
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two of the models have the name {name!r}, which their results are kept under; "
                "evaluate them with an --out each"
            )
    return found


def _of_run(folder: Path, steps: Sequence[int], out: Path) -> list[Examinee]:
    """Return the checkpoints of a run with these numbers of steps; without any, its exported
    weights `hf/` if they are whole, else its newest checkpoint.

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    run, exported = folder.resolve().name, exported_step(folder)
    complete = dict(Checkpoints(folder / "checkpoints", CheckpointConfig()).complete())
    if not steps and exported is not None and (folder / "hf" / "config.json").is_file():
        path = str((folder / "hf").resolve())
        return [Examinee(f"{run}-step{exported}", path, run=run, step=exported)]
    missing = [step for step in steps if step not in complete]
    if missing or not complete:
        known = ", ".join(map(str, complete)) or "none"
        raise ConfigError(
            f"--checkpoint: {folder} has no complete checkpoint of step {missing or 'any'} "
            f"(complete: {known}; checkpoint.keep_last of the run says how many stay)"
        )
    found = []
    for step in steps or [max(complete)]:
        name = f"{run}-step{step}"
        path = str((out / name / "hf").resolve())
        found.append(Examinee(name, path, complete[step], run, step))
    return found


def make_folder(model: Examinee, *, trust_remote_code: bool) -> None:
    """Write the checkpoint of a model as a folder in the format of Hugging Face, unless an earlier
    session has; the errors are those of `roll merge`."""
    if model.checkpoint is None or Path(model.path).exists():
        return
    from roll.commands.merge import merge

    Path(model.path).parent.mkdir(parents=True, exist_ok=True)
    merge(model.checkpoint, Path(model.path), trust_remote_code=trust_remote_code)


def fingerprint(path: str) -> str | None:
    """Return a hash of a model's folder, by which other weights of the same path are noticed; None
    for a name on the hub.

    Of each file it covers the name, the size, and a MiB at the begin, in the middle and at the end:
    training changes all tensors, and to read all of a large model would take minutes.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".safetensors", ".json", ".jinja", ".model", ".txt"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for place in sorted({0, max(0, size // 2 - PIECE // 2), max(0, size - PIECE)}):
                content.seek(place)
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:32]
