"""Positions of tokens in rows with pictures: time, height and width (mRoPE, arXiv 2409.12191).

A token of text has the same number on all three axes. The tokens of a picture count from the number
that follows the text before it: frames, rows and columns of merged patches. The text after it goes
on after the larger of rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roll.core.pictures import Pictures


def row_positions(length: int, pictures: Pictures | None, merge: int) -> Tensor:
    """Return the positions of the tokens of a row, int64 `[3, length]`.

    The tokens themselves are not read: a placeholder outside of the pictures, which a policy wrote,
    is text.

    Args:
        merge: number of patches along each side of the square that becomes one token.
    """
    found_3T = torch.arange(length).repeat(3, 1)
    if pictures is None:
        return found_3T
    for place, (frames, rows, columns) in zip(pictures.places, pictures.grids, strict=True):
        sizes = frames, rows // merge, columns // merge
        steps = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        start, steps_3K = found_3T[0, place].clone(), torch.stack(steps).flatten(1)
        end = place + steps_3K.shape[1]
        found_3T[:, place:end] = start + steps_3K
        found_3T[:, end:] += max(sizes[1:]) - steps_3K.shape[1]
    return found_3T


def positions(width: int, pictures: Sequence[Pictures | None], merge: int) -> Tensor:
    """Return the positions of rows that are padded to `width`, int64 `[3, B, T]`."""
    return torch.stack([row_positions(width, each, merge) for each in pictures], 1)
