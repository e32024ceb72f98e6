"""Models that an evaluation names: folders, names on the hub, and runs with their checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from roll.config.sections.lifecycle import CheckpointConfig
from roll.config.sections.roles import Role
from roll.core.errors import ConfigError, SettingsChangedError
from roll.core.hub import may_be_on_hub
from roll.output_dir.checkpoints import STATE, Checkpoints
from roll.output_dir.resume import exported_step
from roll.output_dir.whole_file import replace_file

PIECE = 1 << 20
"""Bytes of a file of weights that are read at each of three places."""
TENSOR_PIECE = 4 << 10
"""Bytes that are read at the begin of each tensor of a safetensors file."""
SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
"""Suffixes of files that answers of a model depend on."""
ORIGIN = "checkpoint.json"
"""Name of the file beside a written model that says which checkpoint it was written from."""


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
    """Return the checkpoints of a run with these numbers of steps; without any, its newest weights:
    those exported to `hf/` if they are whole and no checkpoint has more steps, else the newest
    checkpoint. (A run that goes on after an export leaves an older `hf/` behind until it ends.)

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    run, exported = folder.resolve().name, exported_step(folder)
    complete = dict(Checkpoints(folder / "checkpoints", CheckpointConfig()).complete())
    newest = max(complete, default=0)
    whole = (folder / "hf" / "config.json").is_file()
    if not steps and exported is not None and exported >= newest and whole:
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
    for step in steps or [newest]:
        name = f"{run}-step{step}"
        path = str((out / name / "hf").resolve())
        found.append(Examinee(name, path, complete[step], run, step))
    return found


def make_folder(model: Examinee, *, trust_remote_code: bool) -> None:
    """Write the checkpoint of a model as a folder in the format of Hugging Face, unless an earlier
    session has; the errors are those of `roll merge` and of `begins_folder`."""
    if model.checkpoint is not None and begins_folder(model.checkpoint, Path(model.path)):
        from roll.commands.merge import merge

        merge(model.checkpoint, Path(model.path), trust_remote_code=trust_remote_code)


def begins_folder(checkpoint: Path, folder: Path) -> bool:
    """Return whether a folder is still to be written from a checkpoint; if it is, note beside it
    where it comes from.

    Raises:
        SettingsChangedError: the folder that is there was written from another checkpoint.
    """
    mark, found = folder.with_name(ORIGIN), checkpoint_hash(checkpoint)
    if folder.exists():
        _refuse_other_origin(checkpoint, folder, mark, found)
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    origin = {"checkpoint": str(checkpoint.resolve()), "hash": found}
    replace_file(mark, json.dumps(origin) + "\n")
    return True


def _refuse_other_origin(checkpoint: Path, folder: Path, mark: Path, found: str) -> None:
    """Raise SettingsChangedError unless `mark` says that `folder` was written from a checkpoint
    with the hash `found`."""
    told: Any = None
    if mark.is_file():
        with suppress(ValueError):
            told = json.loads(mark.read_text(encoding="utf-8"))
    origin = told if isinstance(told, dict) else {}
    if origin.get("hash") == found:
        return
    path = origin.get("checkpoint", "a checkpoint that is not known")
    what = "an earlier state of it" if path == str(checkpoint.resolve()) else path
    raise SettingsChangedError(
        f"{folder} does not hold the weights of {checkpoint}: it was written from {what}. Its "
        "answers are kept beside it; give this evaluation another --out, or remove "
        f"{folder.parent}"
    )


def checkpoint_hash(checkpoint: Path) -> str:
    """Return a hash of what a checkpoint holds of its policy, by which another one of the same path
    or name is noticed; files are read as for `fingerprint`."""
    policy = sorted(path for path in (checkpoint / Role.ACTOR_TRAIN).rglob("*") if path.is_file())
    files = [file for file in (checkpoint / STATE, checkpoint / "config.yaml") if file.is_file()]
    return _hash_of([*files, *policy], checkpoint)


def fingerprint(path: str) -> str | None:
    """Return a hash of a model's folder, by which other weights of the same path are noticed; None
    for a name on the hub.

    Of each file it covers the name, the size, and a MiB at the begin, in the middle and at the end;
    of safetensors also the begin of each tensor, since training may change few of them. PyTorch's
    own files have the checksums of all tensors at the end. To read all of a large model would take
    minutes.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    return _hash_of([one for one in sorted(folder.iterdir()) if one.suffix in SUFFIXES], folder)


def _hash_of(files: Sequence[Path], folder: Path) -> str:
    """Return a hash of pieces of files, with their sizes and their names below `folder`."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}\0{size}\0".encode())
        with file.open("rb") as content:
            pieces = [(place, PIECE) for place in (0, size // 2 - PIECE // 2, size - PIECE)]
            if file.suffix == ".safetensors":
                pieces += [(begin, TENSOR_PIECE) for begin in _begins(content, size)]
            for place, length in sorted({(max(0, place), length) for place, length in pieces}):
                content.seek(place)
                digest.update(content.read(length))
    return digest.hexdigest()[:32]


def _begins(content: BinaryIO, size: int) -> list[int]:
    """Return where each tensor of a safetensors file begins; none if its header is damaged."""
    length = int.from_bytes(content.read(8), "little")
    if length > size:
        return []
    try:
        header = json.loads(content.read(length))
        return [
            8 + length + int(told["data_offsets"][0])
            for name, told in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return []
