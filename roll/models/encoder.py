"""`Encoder`: turns texts into vectors whose products are cosines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from roll.config.sections.model import ModelConfig
from roll.models.load import load_encoder, load_tokenizer
from roll.platform.cuda import free_cached

Pooling = Literal["mean", "first", "last"]


class Encoder:
    """Encoder on a device.

    Args:
        model: its model and tokenizer.
        pooling: tokens whose hidden states make up the vector of a text.
        max_tokens: number of tokens of a text that it reads.
        batch: number of texts of one forward pass.
        device: device of the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        pooling: Pooling,
        max_tokens: int,
        batch: int,
        device: torch.device,
    ) -> None:
        self._tokenizer = load_tokenizer(model)
        if self._tokenizer.pad_token is None:  # of many decoders
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = "right"
        self._model = load_encoder(model).requires_grad_(False).to(device)
        self._pooling, self._max_tokens, self._batch = pooling, max_tokens, batch
        self._device = device

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of texts, of length 1, float32 `[N, D]` on the CPU; N at least 1."""
        parts = [
            self._encode(texts[start : start + self._batch])
            for start in range(0, len(texts), self._batch)
        ]
        return torch.cat(parts)

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of the texts of one forward pass, float32 `[N, D]`."""
        read = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(self._device)
        mask_NT = read["attention_mask"]
        hidden_NTD = self._model(**read).last_hidden_state.float()
        vectors_ND = pooled(hidden_NTD, mask_NT, self._pooling)
        return torch.nn.functional.normalize(vectors_ND, dim=-1).cpu()

    def move(self, device: str) -> None:
        """Move the model to the CPU (`cpu`), or back to its own device (`own`)."""
        self._model.to("cpu" if device == "cpu" else self._device)
        if device == "cpu":
            free_cached()


def pooled(hidden_NTD: Tensor, mask_NT: Tensor, pooling: Pooling) -> Tensor:
    """Return the vector of each text, `[N, D]`.

    Args:
        hidden_NTD: hidden states of its tokens, padded on the right.
        mask_NT: 1 for its tokens and 0 for the padding.
        pooling: tokens whose states make up the vector.
    """
    match pooling:
        case "mean":
            sums_ND = (hidden_NTD * mask_NT[..., None]).sum(1)
            return sums_ND / mask_NT.sum(1, keepdim=True).clamp(min=1)
        case "first":
            return hidden_NTD[:, 0]
        case "last":
            last_N = (mask_NT.sum(1) - 1).clamp(min=0)
            return hidden_NTD[torch.arange(len(hidden_NTD)), last_N]
