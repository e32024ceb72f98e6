"""What every rank of a training backend is put through with frozen parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import TRAIN_BACKENDS, TrainBackend
from tests.contract.train_job import (
    ADAM,
    SMALL_BUDGET,
    EntropyBonusLoss,
    exported,
    rows_of,
    train_batch,
)

CASES: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens.*",),
    "first half": ("model.embed_tokens.*", "model.layers.0.*"),
    "second half": ("model.layers.1.*", "model.norm.weight", "lm_head.weight"),
    "matrices": ("*proj*", "model.embed_tokens.*", "lm_head.*"),
    "attention": ("*.self_attn.*",),
}
"""Two layers and two stages: a stage of which all is frozen, before and behind one that learns."""
REFUSED = ("model.layers.0.self_attn.q_proj.weight",)
"""What Megatron-Core keeps in one tensor with parameters that are trained."""
TIED = "embedding"
"""The case that is also run with a head that is the embedding."""


def _updates(
    made: TrainBackend, spec: WorkerSpec, model: ModelConfig, folder: Path, **options: Any
) -> dict[str, Any]:
    """Two updates of AdamW; the state after the first is saved, loaded and trained on."""
    build = partial(
        made.build, spec, model, optimizer=ADAM, total_steps=4, budget=SMALL_BUDGET, **options
    )
    strategy = build()
    rows, loss = rows_of(strategy, train_batch()), EntropyBonusLoss()
    found: dict[str, Any] = {"start": exported(strategy), "frozen": strategy.frozen_weights()}
    strategy.train(rows, loss)
    strategy.save(folder / "checkpoint")
    found["metrics"] = strategy.train(rows, loss)
    found["weights"] = exported(strategy)
    strategy.save_hf(folder / "hf")
    found["saved"] = load_file(folder / "hf" / "model.safetensors")
    resumed = build()
    resumed.load(folder / "checkpoint")
    resumed.train(rows, loss)
    found["resumed"] = exported(resumed)
    for one in (strategy, resumed):
        one.close()
    return found


def job(spec: WorkerSpec, folder: Path, backend: str) -> dict[str, Any]:
    """Two updates of each case, by its name."""
    made = next(each for each in TRAIN_BACKENDS if each.name == backend)
    group = GroupMembership(spec)
    results: dict[str, Any] = {}
    for name, freeze in CASES.items():
        for head in ("untied", "tied") if name == TIED else ("untied",):
            model = ModelConfig(path=str(folder.parent / head), freeze=freeze)
            where = f"{name}, {head}"
            results[where] = _updates(made, spec, model, folder / where)
    again: dict[str, Any] = {"activation_checkpointing": True}
    if made.strategy is MegatronConfig:
        again = {"recompute": "full"}
    model = ModelConfig(path=str(folder.parent / "untied"), freeze=CASES["first half"])
    results["first half, untied, recomputed"] = _updates(
        made, spec, model, folder / "recomputed", **again
    )
    model = ModelConfig(path=str(folder.parent / "untied"), freeze=REFUSED)
    try:
        made.build(spec, model).close()
        results["said"] = ""
    except ConfigError as error:
        results["said"] = str(error)
    group.leave()
    return results
