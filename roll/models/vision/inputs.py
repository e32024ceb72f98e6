"""Pictures of rows in the form that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from roll.core.pictures import Pictures
from roll.models.vision.folder import VisionPart
from roll.models.vision.positions import positions

Patches = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """Pictures of rows `[B, T]`: what the tower reads, and where its features belong.

    The tower makes one feature of each merged patch. A feature may be read at several places, as
    siblings share a picture, or at none.
    """

    patches_PC: Tensor
    """Patches of all pictures, uint8."""
    grids_G3: Tensor
    """Number of patches of each picture: frames, rows, columns; int64."""
    features_K: Tensor
    """Number of the feature at each placeholder, int64."""
    places_K: Tensor
    """Flat index of each placeholder in the rows, ascending, int64."""
    positions_3BT: Tensor | None
    """Positions of the tokens, int64; None: those of rows without pictures."""

    def packed(self, real_N: Tensor) -> PictureInputs:
        """Return the inputs of the row `[1, N]` that holds only the tokens with the flat indices
        `real_N`, ascending."""
        found = self.positions_3BT
        return replace(
            self,
            places_K=torch.searchsorted(real_N, self.places_K),
            positions_3BT=None if found is None else found.flatten(1)[:, None, real_N],
        )

    def cut(self, width: int, own: slice, attended: slice) -> PictureInputs:
        """Return the inputs of a rank that holds a part of the columns of each row. It reads all
        patches, and uses the features of its own placeholders.

        Args:
            width: number of columns of the rows.
            own: columns that the rank holds; rows may be shorter.
            attended: columns whose positions the rank needs.
        """
        row_K, column_K = self.places_K // width, self.places_K % width
        mine_K = (column_K >= own.start) & (column_K < own.stop)
        places_K = row_K * (own.stop - own.start) + column_K - own.start
        found = self.positions_3BT
        if found is not None:
            found = pad(found, [0, max(attended.stop - width, 0)])[..., attended]
        return replace(
            self,
            features_K=self.features_K[mine_K],
            places_K=places_K[mine_K],
            positions_3BT=found,
        )


def inputs_of(
    tokens_BT: Tensor, pictures: Sequence[Pictures | None], part: VisionPart, device: torch.device
) -> PictureInputs:
    """Fetch the patches of the rows' pictures, each once, and move them to the device.

    Args:
        tokens_BT: token ids on the CPU.
        pictures: pictures of each row, of which some row has one.

    Raises:
        ValueError: pictures do not fit to their patches or to the tokens.
        WorkerError: patches are lost.
    """
    width = tokens_BT.shape[1]
    patches: list[Patches] = []
    grids: list[tuple[int, int, int]] = []
    features: list[Tensor] = []
    places: list[Tensor] = []
    first: dict[int, int] = {}  # number of the first feature, by identity of the address
    total = 0
    for row, its in enumerate(pictures):
        if its is None:
            continue
        sizes = [frames * rows * columns // part.merge**2 for frames, rows, columns in its.grids]
        if id(its.patches) not in first:
            first[id(its.patches)] = total
            patches.append(_checked(its.patches.get(), its, part))
            grids.extend(its.grids)
            total += sum(sizes)
        begin = first[id(its.patches)]
        features.append(torch.arange(begin, begin + sum(sizes)))
        for place, size in zip(its.places, sizes, strict=True):
            columns_K = torch.arange(place, place + size)
            _check_places(tokens_BT[row], columns_K, part)
            places.append(row * width + columns_K)
    return PictureInputs(
        torch.from_numpy(np.concatenate(patches)).to(device),
        torch.tensor(grids, device=device),
        torch.cat(features).to(device),
        torch.cat(places).to(device),
        positions(width, pictures, part.merge).to(device),
    )


def blank_inputs(part: VisionPart, device: torch.device) -> PictureInputs:
    """Return a picture of one merged patch that belongs to no token.

    It lets a pass over rows without pictures run the same modules as passes of other ranks, and
    gives the tower gradients of zero.
    """
    none = torch.zeros(0, dtype=torch.long, device=device)
    patches_PC = torch.zeros(part.merge**2, part.values, dtype=torch.uint8, device=device)
    grid_13 = torch.tensor([[1, part.merge, part.merge]], device=device)
    return PictureInputs(patches_PC, grid_13, none, none, None)


def _checked(patches: Patches, pictures: Pictures, part: VisionPart) -> Patches:
    """Return the patches of a row; ValueError unless they are those that its grids announce."""
    expected = (pictures.num_patches(), part.values)
    if patches.dtype != np.uint8 or patches.shape != expected:
        raise ValueError(
            f"patches are {patches.dtype} {patches.shape}, expected uint8 {expected} of the grids "
            f"{pictures.grids}: not yet normalised, cut as the model's image processor cuts them"
        )
    return patches


def _check_places(tokens_T: Tensor, columns_K: Tensor, part: VisionPart) -> None:
    """Raise ValueError unless a row has placeholders at these columns."""
    inside = columns_K[columns_K < len(tokens_T)]
    found = set(tokens_T[inside].tolist())
    if len(inside) < len(columns_K) or found != {part.placeholder}:
        raise ValueError(
            f"tokens {int(columns_K[0])} to {int(columns_K[-1])} of a row of {len(tokens_T)} "
            f"should be the placeholder {part.placeholder} of a picture, but are {sorted(found)}; "
            "the row's tokens are not expanded, or are cut"
        )
