"""Tiny random models that see, with processors, pictures, rows, and plain passes as the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from roll.core.pictures import Pictures
from tests.tiny import ALPHABET, SPECIAL, char_tokenizer

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET) + len(VISION)
VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB_SIZE - len(VISION), VOCAB_SIZE)
MERGE = 2
"""Patches of a side that a model merges into one token."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% elif m.role == 'assistant' %}"
    "<assistant>{% endif %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

_INIT = {"initializer_range": 0.05}
_TEXT: dict[str, Any] = {
    **_INIT,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_TOWER: dict[str, Any] = {
    **_INIT,
    "depth": 2,
    "num_heads": 4,
    "in_channels": 3,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_HALF = ([0.5] * 3, [0.5] * 3)


@dataclass(frozen=True)
class Family:
    """What tells one family from another."""

    tower: dict[str, Any]
    rope: dict[str, Any]
    video_processor: str
    mean_and_std: tuple[list[float], list[float]] = _CLIP
    patch_size: int = 14
    text: dict[str, Any] = field(default_factory=dict)


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_INTERLEAVED = {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_QWEN3_5_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
}
_QWEN3_TOWER = {**_QWEN3_5_TOWER, "deepstack_visual_indexes": [0]}
FAMILIES = {
    "qwen2_vl": Family({"embed_dim": 64, "hidden_size": 128}, _ROPE, "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": Family(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 128,
            "window_size": 56,  # two merged patches: small pictures have several windows
            "fullatt_block_indexes": [1],
        },
        _ROPE,
        "Qwen2VLVideoProcessor",
    ),
    "qwen3_vl": Family(
        _QWEN3_TOWER, _INTERLEAVED, "Qwen3VLVideoProcessor", _HALF, 16, {"head_dim": 32}
    ),
    "qwen3_vl_moe": Family(
        _QWEN3_TOWER,
        _INTERLEAVED,
        "Qwen3VLVideoProcessor",
        _HALF,
        16,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen3_5": Family(
        _QWEN3_5_TOWER,
        {**_INTERLEAVED, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25},
        "Qwen3VLVideoProcessor",
        _HALF,
        16,
        {
            "head_dim": 64,  # vLLM has no smaller ones for it
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and the tokens that stand for pictures."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", *VISION]})
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.convert_tokens_to_ids(VISION) == [VISION_START, VISION_END, IMAGE, VIDEO]
    return tokenizer


def make_vision_model(
    family: str, *, seed: int = 0, tied: bool = False, text: dict[str, Any] | None = None
) -> PreTrainedModel:
    """In evaluation mode; every value is random, also those of norms and biases.

    Args:
        text: settings of the language half that replace the usual ones.
    """
    torch.manual_seed(seed)
    its = FAMILIES[family]
    language = {**_TEXT, "rope_parameters": dict(its.rope), **its.text, **(text or {})}
    config = AutoConfig.for_model(
        family,
        text_config=language,
        vision_config={**_TOWER, "patch_size": its.patch_size, **its.tower},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def save_vision_model(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    tied: bool = False,
    text: dict[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder with weights, tokenizer and processors."""
    make_vision_model(family, seed=seed, tied=tied, text=text).save_pretrained(path)
    vision_tokenizer().save_pretrained(path)
    image = {"image_processor_type": "Qwen2VLImageProcessor", **processor_settings(family)}
    video = {"video_processor_type": FAMILIES[family].video_processor, **processor_settings(family)}
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return path


def processor_settings(family: str) -> dict[str, Any]:
    """Settings of the processors; a picture has 1 to 64 tokens."""
    its = FAMILIES[family]
    mean, std = its.mean_and_std
    side = its.patch_size * MERGE
    return {
        "patch_size": its.patch_size,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": mean,
        "image_std": std,
        "size": {"shortest_edge": side * side, "longest_edge": 64 * side * side},
    }


def random_picture(family: str, rows: int, columns: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Noise of the size that makes a picture of rows x columns tokens, `[H, W, 3]`."""
    side = FAMILIES[family].patch_size * MERGE
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows * side, columns * side, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Held:
    """Patches that are here."""

    patches: NDArray[np.uint8]

    def get(self) -> NDArray[np.uint8]:
        return self.patches


@dataclass(frozen=True)
class SeenRow:
    """Tokens with pictures, twice: as the framework has them and as transformers reads them."""

    tokens: tuple[int, ...]
    pictures: Pictures
    pixel_values: Tensor
    """Normalised by the image processor, float32 `[P, C]`."""
    grids: Tensor
    """Int64 `[pictures, 3]`."""

    def forward_inputs(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of the model's own pass over tokens that begin with this row's."""
        kinds = torch.zeros(1, len(tokens), dtype=torch.int)
        for place, count in zip(self.pictures.places, self.grids.prod(-1) // MERGE**2, strict=True):
            kinds[0, place : place + int(count)] = 1
        return {
            "input_ids": torch.tensor([list(tokens)]),
            "mm_token_type_ids": kinds,
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.grids,
        }


def seen_row(
    family: str, sizes: Sequence[tuple[int, int]] = ((2, 3),), *, seed: int = 0
) -> SeenRow:
    """A row of random characters with a random picture of each size (rows, columns) in tokens."""
    generator = np.random.default_rng(seed)
    arrays = [random_picture(family, *size, seed=seed * 100 + i) for i, size in enumerate(sizes)]
    settings = processor_settings(family)
    whole = Qwen2VLImageProcessorPil(**settings)(arrays, return_tensors="pt")
    plain = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
    raw = plain(arrays, return_tensors="np")["pixel_values"]
    tokens: list[int] = []
    places = []
    for rows, columns in sizes:
        tokens += [*_characters(generator, 3), VISION_START]
        places.append(len(tokens))
        tokens += [IMAGE] * (rows * columns) + [VISION_END]
    tokens += _characters(generator, 4)
    grids = tuple((int(t), int(h), int(w)) for t, h, w in whole["image_grid_thw"].tolist())
    pictures = Pictures(tuple(places), grids, Held(raw.astype(np.uint8)))
    return SeenRow(tuple(tokens), pictures, whole["pixel_values"], whole["image_grid_thw"])


def _characters(generator: np.random.Generator, count: int) -> list[int]:
    return generator.integers(len(SPECIAL), len(SPECIAL) + len(ALPHABET), count).tolist()


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, row: SeenRow, written: Sequence[int] = ()) -> Tensor:
    """Logits `[T, V]` of the model's own pass over the row and what was written after it.

    transformers takes each `<|image_pad|>` for a part of a picture. So one that was written is read
    as another token with the same embedding.
    """
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    own = embedding.weight
    embedding.weight = nn.Parameter(torch.cat([own, own[IMAGE : IMAGE + 1]]))
    after = [VOCAB_SIZE if token == IMAGE else token for token in written]
    try:
        output = model(**row.forward_inputs([*row.tokens, *after]))
    finally:
        embedding.weight = own
    logits: Tensor = output.logits[0]
    return logits


def oracle_logprobs(
    model: PreTrainedModel, row: SeenRow, written: Sequence[int], temperature: float = 1
) -> Tensor:
    """Log-probs of the tokens written after the row, float64 `[T]`."""
    logits = oracle_logits(model, row, written)[len(row.tokens) - 1 : -1].double()
    chosen = torch.tensor(list(written))[:, None]
    logprobs: Tensor = (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
    return logprobs
