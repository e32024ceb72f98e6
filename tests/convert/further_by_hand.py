"""Layers that predict further tokens, made of Hugging Face's layers, and checkpoints with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.convert.tiny_models import COMMON, MODELS

LAYERS = COMMON["num_hidden_layers"]
COUNTS = {"deepseek_v3": 2, "glm4_moe": 1, "qwen3_next": 1}
"""Further layers."""


@dataclass(frozen=True)
class Names:
    """Of the parts of a further layer in a checkpoint."""

    layer: str
    enorm: str
    hnorm: str
    projection: str
    last: str


def names_of(name: str, number: int) -> Names:
    if name == "qwen3_next":
        return Names(
            "mtp.layers.0.",
            "mtp.pre_fc_norm_embedding",
            "mtp.pre_fc_norm_hidden",
            "mtp.fc",
            "mtp.norm",
        )
    at = f"model.layers.{LAYERS + number}."
    return Names(at, at + "enorm", at + "hnorm", at + "eh_proj", at + "shared_head.norm")


class Further(nn.Module):
    """The model, and `count` further layers (arXiv 2412.19437, section 2.2)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = COUNTS[name]
        made = {**COMMON, **MODELS[name], "num_hidden_layers": LAYERS + count}
        if "layer_types" in made:
            made["layer_types"] = [*made["layer_types"], *["full_attention"] * count]
        config = AutoConfig.for_model(made.pop("model_type"), **made)
        # Hugging Face's modules, the last layers of which are not run with the others.
        self.whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.layers = self.whole.model.layers[LAYERS:]
        norm, width = type(self.whole.model.norm), config.hidden_size
        self.norms = nn.ModuleList(
            nn.ModuleList(norm(width, config.rms_norm_eps) for _ in range(3)) for _ in range(count)
        )
        self.projections = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(count)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)

    def forward(self, tokens_BT: Tensor) -> list[Tensor]:
        """Logits [B, T, V] of the next token, then of those of each further layer; the last places
        of these follow no token."""
        model = self.whole.model
        every, model.layers = model.layers, model.layers[:LAYERS]
        hidden = model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        model.layers = every
        logits, tokens = [self.whole.lm_head(hidden)], tokens_BT
        positions = torch.arange(tokens_BT.shape[1])[None]
        for layer, norms, projection in zip(self.layers, self.norms, self.projections, strict=True):
            assert isinstance(norms, nn.ModuleList)
            tokens = F.pad(tokens[:, 1:], (0, 1))
            pair = (norms[0](model.embed_tokens(tokens)), norms[1](hidden))
            found = layer(
                projection(torch.cat(pair, dim=-1)),
                attention_mask=None,
                position_ids=positions,
                position_embeddings=model.rotary_emb(hidden, positions),
            )
            hidden = norms[2](found[0] if isinstance(found, tuple) else found)
            logits.append(self.whole.lm_head(hidden))
        return logits


def tensors_of(model: Further, name: str, folder: Path) -> dict[str, Tensor]:
    """As published checkpoints name them, those that are shared stored twice.

    Args:
        folder: for what Hugging Face writes.
    """
    model.whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, (norms, projection) in enumerate(zip(model.norms, model.projections, strict=True)):
        assert isinstance(norms, nn.ModuleList)
        names = names_of(name, number)
        was = f"model.layers.{LAYERS + number}."
        tensors = {key.replace(was, names.layer): tensor for key, tensor in tensors.items()}
        parts = (names.enorm, names.hnorm, names.last)
        tensors |= {f"{key}.weight": n.weight for key, n in zip(parts, norms, strict=True)}
        tensors[f"{names.projection}.weight"] = projection.weight
        if name != "qwen3_next":
            tensors[names.layer + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            tensors[names.layer + "shared_head.head.weight"] = tensors["lm_head.weight"]
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def save_further(folder: Path, name: str) -> tuple[Path, Further]:
    """A checkpoint, and what it is one of."""
    model, made = Further(name), folder / name
    tensors = tensors_of(model, name, made)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((made / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": COUNTS[name]}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    (made / "config.json").write_text(json.dumps(config))
    return made, model


def further_loss(logits: list[Tensor], tokens_BT: Tensor, weight: float) -> Tensor:
    """Mean negative log-likelihood of all tokens but the first of each row, and `weight` times
    the mean over the further layers, of the tokens that they predict; per token of the first."""
    count, total = tokens_BT[:, 1:].numel(), torch.zeros(())
    for k, each in enumerate(logits):
        ahead = k + 1
        loss = F.cross_entropy(
            each[:, :-ahead].flatten(0, 1), tokens_BT[:, ahead:].flatten(), reduction="sum"
        )
        total = total + loss / count * (weight / (len(logits) - 1) if k else 1.0)
    return total
