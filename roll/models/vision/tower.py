"""The vision part of a loaded model: from patches to the embeddings that its layers read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.config.sections.model import ModelConfig
from roll.core.pictures import Pictures
from roll.models.vision import folder
from roll.models.vision.folder import VisionPart
from roll.models.vision.inputs import PictureInputs, blank_inputs, inputs_of
from roll.models.vision.parts import sees
from roll.models.vision.pixels import normalise, value_table


class Tower:
    """Makes arguments of the language model out of tokens and pictures.

    transformers' own pass of the whole model looks for placeholders among the tokens, also among
    those that the policy wrote, and fails if they are more than the features. It computes positions
    from the tokens as well, or takes those of a text in silence. Here the places are known, so the
    parts are run one by one: tower, embedding, language model.

    Args:
        model: model with a head, of a type in `parts.FAMILIES`.
        config: where its image processor is.
    """

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._model = model.base_model
        self._config = config

    @property
    def module(self) -> nn.Module:
        """The tower with its projector."""
        visual = self._model.visual
        assert isinstance(visual, nn.Module)
        return visual

    @cached_property
    def part(self) -> VisionPart:
        """Settings of the model's folder; ConfigError: it has no image processor. Read when the
        first picture comes, as a folder may be used for text alone."""
        return folder.read(self._config, self._model.config)

    def inputs(
        self, tokens_BT: Tensor, pictures: Sequence[Pictures | None], device: torch.device
    ) -> PictureInputs:
        """Return the inputs of rows, `blank_inputs` if none has pictures. Arguments and errors: see
        `inputs_of`."""
        if not any(each is not None for each in pictures):
            return blank_inputs(self.part, device)
        return inputs_of(tokens_BT, pictures, self.part, device)

    def arguments(self, tokens_BT: Tensor, inputs: PictureInputs) -> dict[str, Any]:
        """Run the tower; return keyword arguments of the language model (`parts.language_model`)
        for these tokens, in place of `input_ids` and `position_ids`.

        Args:
            tokens_BT: token ids on the device of the model.
            inputs: pictures of these rows.
        """
        pixels_PC = normalise(inputs.patches_PC, self._table.to(inputs.patches_PC.device))
        seen = self._model.get_image_features(
            pixels_PC, image_grid_thw=inputs.grids_G3, return_dict=True
        )
        embeds_BTD = self._model.get_input_embeddings()(tokens_BT)
        features_KD = torch.cat(seen.pooler_output)[inputs.features_K]
        found: dict[str, Any] = {"inputs_embeds": _put(embeds_BTD, inputs.places_K, features_KD)}
        if inputs.positions_3BT is not None:
            found["position_ids"] = inputs.positions_3BT
        if "deepstack_features" in seen:
            mask_N = torch.zeros(tokens_BT.numel(), dtype=torch.bool, device=tokens_BT.device)
            mask_N[inputs.places_K] = True
            found["visual_pos_masks"] = mask_N.view(tokens_BT.shape)
            found["deepstack_visual_embeds"] = [
                torch.cat(layer)[inputs.features_K] for layer in seen.deepstack_features
            ]
        return found

    @cached_property
    def _table(self) -> Tensor:
        return value_table(self.part)


def find_tower(model: PreTrainedModel, config: ModelConfig) -> Tower | None:
    """Return the vision part of a loaded model; None if it has none, or none that is known."""
    return Tower(model, config) if sees(model.config) else None


def _put(embeds_BTD: Tensor, places_K: Tensor, features_KD: Tensor) -> Tensor:
    """Return the embeddings with the features at the flat indices `places_K`."""
    flat_ND = embeds_BTD.flatten(0, 1)
    put_ND = flat_ND.index_put((places_K,), features_KD.to(flat_ND.dtype))
    return put_ND.view(embeds_BTD.shape)
