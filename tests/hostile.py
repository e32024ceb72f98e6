"""Files that run code when they are unpickled, and a look whether one has."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled(mark: Path) -> bytes:
    return pickle.dumps(Bomb(mark))


def torch_saved(mark: Path, path: Path) -> None:
    with path.open("wb") as file:  # a path is part of what is written, and not every one will do
        torch.save({"state": Bomb(mark)}, file)


def assert_works(mark: Path) -> None:
    """The bomb goes off where it is unpickled, so a test in which it does not proves something."""
    pickle.loads(pickled(mark))
    assert mark.exists()
    mark.unlink()
