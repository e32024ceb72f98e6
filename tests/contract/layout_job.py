"""What every rank of an FSDP2 layout is put through: one update of each kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from roll.algorithms.api import ScoreTerms, TokenLoss
from roll.config.model import LoraConfig, ModelConfig
from roll.config.strategy import Fsdp2Config
from roll.config.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.strategy.api import TrainStrategy
from roll.strategy.build import build_train
from roll.strategy.group import Membership
from roll.strategy.heads import PolicyHead, ScoreHead, ValueHead
from tests.contract.backends import PLAIN_STEP
from tests.contract.critic_job import critic_batch, squared_error
from tests.contract.train_job import SMALL_BUDGET, EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import char_tokenizer, save_tiny_model

POLICY, POLICY_LOSS = PolicyHead(0.7, 16), EntropyBonusLoss()
Options = Mapping[str, Any]
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))


def squared_score(terms: ScoreTerms, batch: RolloutBatch) -> TokenLoss:
    return TokenLoss(loss_BT=(terms.scores_BT - 0.5).square())


@dataclass(frozen=True)
class Case:
    model: str
    """A folder of `save_models`."""
    packing: bool = False
    head: Any = POLICY
    loss: Callable[[Any, Any], TokenLoss] = POLICY_LOSS
    batch: Callable[[], RolloutBatch] = train_batch
    lora: LoraConfig | None = None


CASES = {
    "packed": Case("dense", packing=True),
    "window": Case("window"),
    "window, packed": Case("window", packing=True),
    "critic": Case("dense", head=ValueHead(), loss=squared_error, batch=critic_batch),
    "scores, packed": Case("dense", packing=True, head=ScoreHead(), loss=squared_score),
    "adapter": Case("dense", packing=True, lora=LORA),
}


def save_models(folder: Path) -> None:
    save_tiny_model(folder / "dense")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(char_tokenizer()),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,  # fewer than the ranks that share a row
        sliding_window=4,
        dtype="float32",
    )
    MistralForCausalLM(config).save_pretrained(folder / "window")
    char_tokenizer().save_pretrained(folder / "window")


def build(
    spec: WorkerSpec, folder: Path, case: Case, layout: Options, **options: Any
) -> TrainStrategy[Any]:
    role = TrainRole(
        pool="p",
        strategy=Fsdp2Config(**layout),
        optimizer=options.get("optimizer", PLAIN_STEP),
        packing=case.packing,
        max_tokens_per_microbatch=SMALL_BUDGET,
    )
    model = ModelConfig(path=str(folder / case.model), lora=case.lora)
    return build_train(role, model, spec, case.head, total_steps=options.get("total_steps"))


def job(
    spec: WorkerSpec, folder: Path, layouts: Mapping[str, Options], cases: tuple[str, ...]
) -> dict[str, Any]:
    group, results = Membership(spec), {}
    for layout, options in layouts.items():
        for name in cases:
            case = CASES[name]
            strategy = build(spec, folder.parent, case, options)
            rows = rows_of(strategy, case.batch())
            before = strategy.score(rows)
            start = exported(strategy)
            parts = {key: part.clone() for key, part in strategy.export_parts()}
            metrics = strategy.train(rows, case.loss)
            results[layout, name] = {
                "info": strategy.rank_info,
                "before": before,
                "start": start,
                "parts": parts,
                "manifest": strategy.weight_manifest(),
                "metrics": metrics,
                "weights": exported(strategy),
            }
    group.leave()
    return results
