"""vLLM serves a tiny model of a family, before a push of other weights and after it."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.core.completion import Completion
from tests.contract.engine_rig import PROMPT, Rig, rescore, shake, start
from tests.contract.test_vllm_experts import saved
from tests.families import make
from tests.tiny import char_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024}
"""Sizes that vLLM computes without a GPU."""


@dataclass(frozen=True)
class Served:
    """What vLLM computes beside transformers with the same weights, as differences of log-probs."""

    before: float
    """The largest before the push."""
    after: float
    """The largest after it."""
    mean: float
    """The mean after it."""
    stale: float
    """The mean after it, from transformers with the weights before it."""
    least: float
    """The largest from transformers without the one new parameter that counts least."""
    least_name: str
    """Name of this parameter."""


def serve(
    folder: Path,
    name: str,
    sizes: dict[str, Any],
    loop: asyncio.AbstractEventLoop,
    *,
    dtype: str = "float32",
    **options: Any,
) -> Served:
    """Start vLLM on a tiny model of a family, push other weights, and compare log-probs.

    Args:
        folder: where the model is made.
        sizes: settings beside those of the family.
        loop: runs in another thread.
        options: of the engine.
    """
    save_decided(folder / "model", name, SIZES | sizes)
    rig = start("vllm", folder / "model", loop, endpoint=None, dtype=dtype, **options)
    rig.oracle.set_attn_implementation("eager")  # others leave out the bound of gemma2's scores
    model, old = rig.oracle, copy.deepcopy(rig.oracle)
    try:
        before = generated(rig)
        shake(model, seed=1)
        weights = saved(model, folder / "pushed")
        rig.push([(each, tensor.to(getattr(torch, dtype))) for each, tensor in weights])
        after = generated(rig)
    finally:
        rig.run(rig.engine.close())
    gaps = gap(after, model)
    least, least_name = least_change(model, old, list(after[0].tokens))
    return Served(
        before=float(gap(before, old).max()),
        after=float(gaps.max()),
        mean=float(gaps.mean()),
        stale=float(gap(after, old).mean()),
        least=least,
        least_name=least_name,
    )


def save_decided(folder: Path, name: str, sizes: dict[str, Any]) -> None:
    """A model whose next token depends on all that it computes: norms shrink nothing."""
    model = make(name, **sizes)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "norm" in label:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


def generated(rig: Rig) -> list[Completion]:
    return rig.generate(n=2, ignore_eos=True)


def gap(completions: list[Completion], model: PreTrainedModel) -> Tensor:
    """Differences from what a model computes [N]."""
    return torch.cat(
        [
            torch.tensor(one.logprobs, dtype=torch.float64) - rescore(model, PROMPT, one.tokens)
            for one in completions
        ]
    ).abs()


def least_change(
    model: PreTrainedModel, old: PreTrainedModel, tokens: list[int]
) -> tuple[float, str]:
    """The largest change of a log-prob if one parameter is the old one, and that parameter's name,
    of the one that changes least."""
    expected, values = rescore(model, PROMPT, tokens), dict(old.named_parameters())
    changes = []
    for name, parameter in model.named_parameters():
        new, parameter.data = parameter.data, values[name].data
        changes.append((float((rescore(model, PROMPT, tokens) - expected).abs().max()), name))
        parameter.data = new
    return min(changes)
