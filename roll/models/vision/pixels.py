"""Normalisation of patches, to the bit as transformers' image processors (PIL) do it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from roll.models.vision.folder import VisionPart


def value_table(part: VisionPart) -> Tensor:
    """Return what the image processor makes of each uint8 value, float32 `[channels, 256]`.

    Pixels have only 256 values, so a table is exact whatever the device rounds like. It is
    calculated as the image processor calculates: rescaled in float64, then in float32.
    """
    values = np.arange(256, dtype=np.float64)
    if part.rescale is not None:
        values = values * part.rescale
    table = np.tile(values.astype(np.float32), (part.channels, 1))
    if part.mean is not None:
        mean, std = (np.array(each, np.float32)[:, None] for each in (part.mean, part.std))
        table = (table - mean) / std
    return torch.from_numpy(table)


def normalise(patches_PC: Tensor, table: Tensor) -> Tensor:
    """Return the patches as the model reads them, float32 `[P, C]`.

    Args:
        patches_PC: uint8; channels are the slowest axis within C.
        table: result of `value_table`, on the device of the patches.
    """
    by_channel = patches_PC.unflatten(1, (len(table), -1)).unbind(1)
    found = [values[raw.int()] for values, raw in zip(table, by_channel, strict=True)]
    return torch.stack(found, 1).flatten(1)
