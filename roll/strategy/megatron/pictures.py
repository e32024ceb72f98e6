"""Pictures of micro-batches, as a Megatron-Core model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mcore_adapter.modeling.vision.model import SeenPictures
from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch
from roll.core.pictures import Pictures
from roll.models.load import load_config
from roll.models.vision import folder
from roll.models.vision.folder import VisionPart
from roll.models.vision.inputs import inputs_of
from roll.models.vision.pixels import normalise, value_table
from roll.models.vision.positions import positions
from roll.strategy.megatron.batches.micro import Micro

B = TypeVar("B", bound=TokenBatch)


class Sight:
    """Makes arguments of a model that sees out of tokens and pictures.

    Args:
        config: where the model and its image processor are.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @cached_property
    def part(self) -> VisionPart:
        """Vision part as the model's folder describes it, read when the first picture comes.

        Raises:
            ConfigError: the folder has no image processor, without which it is good for text only.
        """
        return folder.read(self._config, load_config(self._config))

    def positions(self, micro: Micro[B]) -> Tensor:
        """Return the positions of the tokens that the model reads, int64 `[3, B, T]`."""
        tokens_BT = _tokens(micro)
        rows = _of_all_rows(tokens_BT, micro.pictures)
        found_3BT = positions(tokens_BT.shape[1], rows, self.part.merge).to(micro.tokens_BT.device)
        if micro.packed is None:
            return found_3BT
        whole_31T = micro.positions_BT.repeat(3, 1, 1)
        parts = zip(found_3BT.unbind(1), micro.packed.lengths, strict=True)
        own_3T = torch.cat([row_3T[:, :length] for row_3T, length in parts], dim=1)
        whole_31T[:, 0, : own_3T.shape[1]] = own_3T
        return whole_31T

    def seen(self, micro: Micro[B]) -> SeenPictures:
        """Fetch the patches of a micro-batch, of which some row has a picture, normalise them, and
        say where their features belong.

        Raises:
            ValueError: pictures do not fit to their patches or to the tokens.
            WorkerError: patches are lost.
        """
        tokens_BT, device = _tokens(micro), micro.tokens_BT.device
        rows = _of_all_rows(tokens_BT, micro.pictures)
        inputs = inputs_of(tokens_BT.cpu(), rows, self.part, device)
        places_K = inputs.places_K
        return SeenPictures(
            patches_PC=normalise(inputs.patches_PC, self._table.to(device)),
            grids_G3=inputs.grids_G3,
            features_K=inputs.features_K,
            places_K=places_K if micro.packed is None else micro.places(places_K),
        )

    @cached_property
    def _table(self) -> Tensor:
        return value_table(self.part)


def _tokens(micro: Micro[B]) -> Tensor:
    """Return the tokens of a micro-batch in rows, which may be followed by padding."""
    if micro.packed is None:
        return micro.tokens_BT
    assert micro.batch is not None  # it has pictures
    return micro.batch.tokens


def _of_all_rows(tokens_BT: Tensor, pictures: Sequence[Pictures | None]) -> list[Pictures | None]:
    """Return the pictures of all rows, of which the last ones may be padding without any."""
    return [*pictures, *[None] * (len(tokens_BT) - len(pictures))]
