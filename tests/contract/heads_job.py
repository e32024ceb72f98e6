"""What every rank of a critic and of a reward model on Megatron-Core is put through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3MoeForTokenClassification,
)

from roll.algorithms.loss_interface import TermsLoss
from roll.algorithms.losses.ranking import BradleyTerryLoss
from roll.config.algorithm.preferences import BradleyTerryConfig
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.batches import PreferenceBatch, TrainBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import ScoreHead, ValueHead
from tests.contract.backends import PLAIN_STEP
from tests.contract.critic_job import critic_batch, squared_error
from tests.contract.train_job import SMALL_BUDGET, exported, rows_of
from tests.tiny import char_tokenizer, save_tiny_model, tiny_qwen3, tiny_qwen3_moe

ADAM = AdamWConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
LORA = LoraConfig(rank=3, alpha=7.0)
"""Of all linear layers, the head not among them."""
STEPS = 3


def pair_batch() -> PreferenceBatch:
    """Pairs of rows of different lengths; the last token of each has its score."""
    rows = critic_batch()
    at = torch.arange(rows.tokens.shape[1])
    mask = at == rows.lengths[:, None] - 1
    return PreferenceBatch(
        tokens=rows.tokens,
        lengths=rows.lengths,
        loss_mask=mask,
        token_weights=mask.float() / len(rows),
        margins=torch.tensor([0.3, 0.0, 0.1, 0.5]).repeat_interleave(2),
    )


@dataclass(frozen=True)
class Case:
    model: str
    """A folder of `save_models`."""
    head: Any = ValueHead()  # noqa: RUF009 - frozen
    loss: TermsLoss[Any, Any] = squared_error
    batch: Callable[[], TrainBatch] = critic_batch
    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()

    def build(
        self, spec: WorkerSpec, folder: Path, strategy: Fsdp2Config | MegatronConfig, **options: Any
    ) -> TrainStrategy[Any]:
        role = TrainRole(
            pool="p",
            strategy=strategy,
            optimizer=options.get("optimizer", PLAIN_STEP),
            max_tokens_per_microbatch=SMALL_BUDGET,
        )
        model = ModelConfig(
            path=str(folder / self.model),
            dtype=options.get("dtype", "float32"),
            lora=self.lora,
            freeze=self.freeze,
        )
        return build_train(role, model, spec, self.head, total_steps=None)


def _scores(model: str) -> Case:
    return Case(model, ScoreHead(), BradleyTerryLoss(BradleyTerryConfig()), pair_batch)


CASES = {
    "critic": Case("critic"),
    "critic, head alone": Case("critic", freeze=("model.*",)),
    "critic of experts": Case("experts"),
    "scorer": _scores("scorer"),
    "new scorer": _scores("policy"),
    "critic of a scorer": Case("scorer"),
    "scorer of a critic": _scores("critic"),
}
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    # ranks: options and cases
    2: {
        "dp 2": ({"distributed_optimizer": True}, ("critic",)),
        "tp 2": ({"tp": 2}, ("critic", "scorer", "scorer of a critic")),
        "tp 2, divided tokens": (SPLIT, ("critic", "scorer", "critic of experts")),
        "pp 2": ({"pp": 2}, ("critic", "critic, head alone", "new scorer", "critic of a scorer")),
        "pp 2, vpp 2": ({"pp": 2, "vpp": 2}, ("scorer",)),
        "cp 2": ({"cp": 2}, ("critic",)),
        "ep 2": ({"ep": 2}, ("critic of experts",)),
    },
    1: {"alone": ({}, ("critic", "scorer"))},  # goes on with adapters of two ranks
}
ADAPTED: dict[str, dict[str, Any]] = {"divided": SPLIT, "pp 2": {"pp": 2}}
"""Layouts of two ranks that train an adapter."""


def save_models(folder: Path) -> None:
    """Classifiers with heads that are not zero, and a language model."""
    save_tiny_model(folder / "policy")
    torch.manual_seed(0)
    for name, kind, config in (
        ("critic", Qwen3ForTokenClassification, tiny_qwen3().config),
        ("scorer", Qwen3ForSequenceClassification, tiny_qwen3(tied=False, layers=4).config),
        ("experts", Qwen3MoeForTokenClassification, tiny_qwen3_moe().config),
    ):
        assert isinstance(config, PreTrainedConfig)
        config.num_labels = 1
        model = kind(config)
        for parameter in model.score.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / name)
        char_tokenizer().save_pretrained(folder / name)


def of_terms(terms: Any) -> Tensor:
    """Values or scores `[B, T]`."""
    found: Tensor = terms.values_BT if hasattr(terms, "values_BT") else terms.scores_BT
    return found


def _one_step(strategy: TrainStrategy[Any], case: Case) -> dict[str, Any]:
    rows = rows_of(strategy, case.batch())  # type: ignore[arg-type]
    start = exported(strategy)
    strategy.offload()
    strategy.onload()
    before = of_terms(strategy.score(rows))
    metrics = strategy.train(rows, case.loss)
    return {
        "info": strategy.rank_info,
        "start": start,
        "before": before,
        "metrics": metrics,
        "weights": exported(strategy),
        "after": of_terms(strategy.score(rows)),
    }


def reference_job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """One update of every case by fsdp2 on one rank."""
    group, results = GroupMembership(spec), dict[str, Any]()
    for name, case in CASES.items():
        strategy = case.build(spec, folder.parent, Fsdp2Config())
        results[name] = _one_step(strategy, case)
        strategy.save_hf(folder / name)
    low = CASES["critic"].build(spec, folder.parent, Fsdp2Config(), dtype="bfloat16")
    results["bf16"] = of_terms(low.score(critic_batch()))
    group.leave()
    return results


def job(spec: WorkerSpec, folder: Path) -> dict[Any, Any]:
    """One update of every case in each layout of as many ranks."""
    group, results = GroupMembership(spec), dict[Any, Any]()
    for layout, (options, cases) in LAYOUTS[spec.world_size].items():
        for name in cases:
            strategy = CASES[name].build(spec, folder.parent, MegatronConfig(**options))
            results[layout, name] = _one_step(strategy, CASES[name])
            strategy.save_hf(folder / layout / name)
            strategy.close()
    if spec.world_size > 1:
        results["bf16"] = _in_bfloat16(spec, folder)
        results["adapters"] = {
            layout: _adapted(spec, folder / f"adapter, {layout}", options)
            for layout, options in ADAPTED.items()
        }
    else:
        results["adapters"] = {
            layout: _resumed(spec, folder.parent / "2" / f"adapter, {layout}", {})
            for layout in ADAPTED
        }
    group.leave()
    return results


def families_job(spec: WorkerSpec, folder: Path, heads: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values or scores of one classifier of each family."""
    group, results = GroupMembership(spec), {}
    for name, head in heads.items():
        role = ScoreRole(pool="p", strategy=MegatronConfig())
        strategy = build_score(role, ModelConfig(path=str(folder.parent / name)), spec, head)
        results[name] = of_terms(strategy.score(critic_batch()))
        strategy.close()
    group.leave()
    return results


def _in_bfloat16(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """Values before and after updates, and a checkpoint, which another layout resumes."""
    case = CASES["critic"]

    def build(options: Mapping[str, Any]) -> TrainStrategy[Any]:
        return case.build(
            spec, folder.parent, MegatronConfig(**options), optimizer=ADAM, dtype="bfloat16"
        )

    first = build(SPLIT)
    values = of_terms(first.score(critic_batch()))
    for _ in range(2):
        first.train(rows_of(first, critic_batch()), squared_error)
    first.save(folder / "bf16")
    results = {"before": values, "trained": exported(first)}
    first.close()
    for name, options in (("dp", {"distributed_optimizer": True}), ("pp", {"pp": 2})):
        other = build(options)
        other.load(folder / "bf16")
        results[name] = exported(other)
        other.save(folder / f"bf16 {name}")
        other.close()
    return results


def _adapted(spec: WorkerSpec, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter and the head beside it, from the first score to the update after a resume."""
    case = replace(CASES["critic"], lora=LORA)
    strategy = case.build(spec, folder.parent.parent, MegatronConfig(**options), optimizer=ADAM)
    rows = rows_of(strategy, critic_batch())
    strategy.save_hf(folder / "fresh")
    for _ in range(STEPS):
        strategy.train(rows, case.loss)
    results = {
        "info": strategy.rank_info,
        "after": of_terms(strategy.score(rows)),
        "frozen": strategy.frozen_weights(),
        "weights": exported(strategy),
    }
    strategy.save_hf(folder / "adapter")
    strategy.save_hf(folder / "merged", merged=True)
    strategy.save(folder / "checkpoint")
    results["next"] = strategy.train(rows, case.loss)
    strategy.close()
    return results | {"resumed": _resumed(spec, folder, options)}


def _resumed(spec: WorkerSpec, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The update after a checkpoint of `_adapted`."""
    case = replace(CASES["critic"], lora=LORA)
    models = folder.parent.parent
    again = case.build(spec, models, MegatronConfig(**options), optimizer=ADAM)
    again.load(folder / "checkpoint")
    weights = exported(again)
    metrics = again.train(rows_of(again, critic_batch()), case.loss)
    again.close()
    return {"weights": weights, "metrics": metrics}
