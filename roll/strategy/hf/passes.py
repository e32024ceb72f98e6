"""Forward passes of a request: over whole rows, and over one further token of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from roll.core.pictures import Pictures
from roll.models.vision.parts import language_model
from roll.models.vision.positions import row_positions
from roll.models.vision.tower import Tower


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model's weights between two pushes. A KV cache is valid for one such object only."""

    model: PreTrainedModel
    version: int
    tower: Tower | None = None
    """Vision part of the model; None if it reads no pictures."""

    def read(self, tokens_NT: Tensor, pictures: Pictures | None, cache: DynamicCache) -> Tensor:
        """Read rows from their beginning; return the logits `[N, V]` of their next tokens.

        Args:
            pictures: pictures at the same places of all rows; their patches are here.
            cache: empty KV cache, which is filled.
        """
        tokens_NT = tokens_NT.to(self.model.device)
        if self.tower is None or pictures is None:
            return self._logits(tokens_NT, cache, self._positions(tokens_NT, 0, None))
        inputs = self.tower.inputs(tokens_NT.cpu(), [pictures] * len(tokens_NT), tokens_NT.device)
        arguments = self.tower.arguments(tokens_NT, inputs)
        output = language_model(self.model)(**arguments, past_key_values=cache)
        head = self.model.get_output_embeddings()
        logits_NV: Tensor = head(output.last_hidden_state[:, -1])
        return logits_NV

    def read_next(self, tokens_N: Tensor, pictures: Pictures | None, cache: DynamicCache) -> Tensor:
        """Read one further token of each row; return the logits `[N, V]` of their next tokens.

        Args:
            pictures: as for `read`, which filled the cache.
        """
        tokens_N1 = tokens_N.to(self.model.device)[:, None]
        positions = self._positions(tokens_N1, cache.get_seq_length(), pictures)
        return self._logits(tokens_N1, cache, positions)

    def _logits(self, tokens_NT: Tensor, cache: DynamicCache, further: dict[str, Any]) -> Tensor:
        output = self.model(input_ids=tokens_NT, past_key_values=cache, logits_to_keep=1, **further)
        logits_NV: Tensor = output.logits[:, -1]
        return logits_NV

    def _positions(
        self, tokens_NT: Tensor, before: int, pictures: Pictures | None
    ) -> dict[str, Tensor]:
        """Return the argument `position_ids` for a model that sees; none for another.

        Such a model would otherwise count on from the request that it read last.

        Args:
            before: number of tokens of a row that were read before.
        """
        if self.tower is None:
            return {}
        merge = 1 if pictures is None else self.tower.part.merge
        length = before + tokens_NT.shape[1]
        positions_3T = row_positions(length, pictures, merge)[:, before:].to(tokens_NT.device)
        return {"position_ids": positions_3T[:, None].expand(-1, len(tokens_NT), -1)}
