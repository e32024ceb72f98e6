"""GPT model with a vision tower on its first stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mcore_adapter.errors import LayoutError
from mcore_adapter.modeling.rope import Rope
from mcore_adapter.modeling.vision.mrope import MRope
from mcore_adapter.modeling.vision.tower import tower
from mcore_adapter.models.fields import Vision
from mcore_adapter.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class SeenPictures:
    """Pictures of a micro-batch `[B, T]`: what the tower reads, and where its features belong.

    The tower makes one feature of each square of merged patches. Several placeholder tokens may
    stand for one feature, as where rows share a picture.
    """

    patches_PC: Tensor
    """Patches of all pictures, as the image processor normalises them, floats."""
    grids_G3: Tensor
    """Number of patches of each picture: frames, rows, columns; int64."""
    features_K: Tensor
    """Number of the feature that belongs to each placeholder, int64."""
    places_K: Tensor
    """Flat index of each placeholder in the micro-batch, int64."""


class GPTModelWithTower(GPTModel):
    """GPT model whose first stage replaces embeddings of placeholder tokens by what the tower sees.

    All tensor parallel ranks of the first stage hold all of the tower, and compute the same: each
    has the whole gradient of the embeddings, so the gradients of its tower need no sum.
    """

    def __init__(self, *, vision: Vision, rope: Rope, **given: Any) -> None:
        """Make the model; further arguments are those of Megatron-Core's model."""
        super().__init__(
            position_embedding_type="mrope",
            # Embeddings are replaced before they are divided over ranks.
            scatter_embedding_sequence_parallel=False,
            **given,
        )
        self.rotary_pos_emb = MRope(rope, vision)
        self._has_deepstack = vision.deepstack > 0
        if self.pre_process:
            recompute = self.config.recompute_granularity == "full"
            self.visual = tower(vision, dtype=self.config.params_dtype, recompute=recompute)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        pictures: SeenPictures | None = None,
        **given: Any,
    ) -> Tensor:
        """Return logits, or the hidden states for the next stage.

        Args:
            input_ids: tokens `[B, T]`.
            position_ids: positions on the axes time, height and width, `[3, B, T]`; or `[B, T]` if
                they are the same on all axes, as without pictures.
            pictures: read by the first stage only; None: there are none.
            given: further arguments of Megatron-Core's model.
        """
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if self.pre_process:
            hidden_TBD = self.embedding(input_ids=input_ids, position_ids=position_ids)
            layers_TBLD = None
            if pictures is not None:
                hidden_TBD, layers_TBLD = self._see(hidden_TBD, pictures)
            given["decoder_input"] = self._own_tokens(hidden_TBD)
            if layers_TBLD is not None:
                # Layers pass the context on. Here it holds what `DeepstackLayer` adds.
                given["extra_block_kwargs"] = {"context": self._own_tokens(layers_TBLD)}
        output: Tensor = super().forward(input_ids, position_ids, attention_mask, **given)
        return output

    def _see(self, hidden_TBD: Tensor, pictures: SeenPictures) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings with features in their places, and features for the first layers.

        Those for the layers, `[T, B, layers, D]`, are zero at other tokens. None: the tower makes
        none.
        """
        length, rows, width = hidden_TBD.shape
        seen = self.visual(pictures.patches_PC, grid_thw=pictures.grids_G3, return_dict=True)
        where = (pictures.places_K % length, pictures.places_K // length)
        own_KD = seen.pooler_output.to(hidden_TBD.dtype)[pictures.features_K]
        hidden_TBD = hidden_TBD.index_put(where, own_KD)
        if not self._has_deepstack:
            return hidden_TBD, None
        features_KLD = torch.stack(seen.deepstack_features, dim=1)[pictures.features_K]
        empty = hidden_TBD.new_zeros(length, rows, features_KLD.shape[1], width)
        return hidden_TBD, empty.index_put(where, features_KLD.to(hidden_TBD.dtype))

    def _own_tokens(self, values_T: Tensor) -> Tensor:
        """Return this rank's tokens with sequence parallelism, else all tokens."""
        if not self.config.sequence_parallel:
            return values_T
        own: Tensor = scatter_to_sequence_parallel_region(values_T, group=self.pg_collection.tp)
        return own


class DeepstackLayer(TransformerLayer):
    """Transformer layer that adds features of a vision tower to its output (DeepStack).

    The features of all such layers come as the context, `[T, B, layers, D]`, and are passed on in
    the same way. So they are an input like the hidden states where a layer is recomputed.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the features for the next layer; None: it needs none."""
        hidden, features = super().forward(*args, **kwargs)
        if features is None:
            return hidden, None
        index = self.layer_number - 1
        last = index == features.shape[2] - 1
        return hidden + features[:, :, index], None if last else features


def check_deepstack(vision: Vision, sizes: ParallelSizes, num_layers: int) -> None:
    """Raise `LayoutError` unless all layers that get features of the tower lie beside the tower."""
    first = len(sizes.chunks(num_layers)[0])
    if first < vision.deepstack:
        raise LayoutError(
            f"the first {vision.deepstack} layers get features of the vision tower, which is on "
            f"the first stage, but its first chunk has {first} of {num_layers} layers; use a "
            "smaller pp or vpp, or name the layers of each chunk (layers)"
        )
