"""Pictures of micro-batches, as a Megatron-Core model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from mcore_adapter.modeling.vision.model import SeenPictures
from roll.config.sections.model import ModelConfig
from roll.core.pictures import Pictures
from roll.models.load import load_config
from roll.models.vision import folder
from roll.models.vision.folder import VisionPart
from roll.models.vision.inputs import inputs_of
from roll.models.vision.pixels import normalise, value_table
from roll.models.vision.positions import positions


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

    def positions(self, tokens_BT: Tensor, pictures: Sequence[Pictures | None]) -> Tensor:
        """Return the positions of rows, int64 `[3, B, T]`.

        Args:
            pictures: pictures of the first rows; the others have none.
        """
        rows = _of_all_rows(tokens_BT, pictures)
        return positions(tokens_BT.shape[1], rows, self.part.merge).to(tokens_BT.device)

    def seen(self, tokens_BT: Tensor, pictures: Sequence[Pictures | None]) -> SeenPictures:
        """Fetch the patches of rows, normalise them, and say where their features belong.

        Arguments as in `positions`; some row has a picture.

        Raises:
            ValueError: pictures do not fit to their patches or to the tokens.
            WorkerError: patches are lost.
        """
        rows = _of_all_rows(tokens_BT, pictures)
        device = tokens_BT.device
        inputs = inputs_of(tokens_BT.cpu(), rows, self.part, device)
        return SeenPictures(
            patches_PC=normalise(inputs.patches_PC, self._table.to(device)),
            grids_G3=inputs.grids_G3,
            features_K=inputs.features_K,
            places_K=inputs.places_K,
        )

    @cached_property
    def _table(self) -> Tensor:
        return value_table(self.part)


def _of_all_rows(tokens_BT: Tensor, pictures: Sequence[Pictures | None]) -> list[Pictures | None]:
    """Return the pictures of all rows, of which the last ones may be padding without any."""
    return [*pictures, *[None] * (len(tokens_BT) - len(pictures))]
