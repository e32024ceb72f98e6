"""What every rank of an FSDP2 layout is put through: one update of each kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3MoeForTokenClassification,
)

from roll.algorithms.loss_interface import ScoreTerms, TermsLoss, TokenLoss
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead, ScoreHead, ValueHead
from tests.contract.backends import PLAIN_STEP
from tests.contract.critic_job import critic_batch, squared_error
from tests.contract.train_job import SMALL_BUDGET, EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import char_tokenizer, save_tiny_model, tiny_qwen3

EXPERTS = 6
"""Two expert parallel ranks have three of them each, which no two ranks share evenly."""
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
    loss: TermsLoss[Any, RolloutBatch] = POLICY_LOSS
    batch: Callable[[], RolloutBatch] = train_batch
    lora: LoraConfig | None = None


CASES = {
    "packed": Case("dense", packing=True),
    "window": Case("window"),
    "window, packed": Case("window", packing=True),
    "critic": Case("critic", head=ValueHead(), loss=squared_error, batch=critic_batch),
    "scores, packed": Case("scorer", packing=True, head=ScoreHead(), loss=squared_score),
    "biased, packed": Case("biased", packing=True),
    "adapter": Case("dense", packing=True, lora=LORA),
    "experts": Case("experts"),
    "experts, packed": Case("experts", packing=True),
    "experts, critic": Case(
        "experts critic", head=ValueHead(), loss=squared_error, batch=critic_batch
    ),
}


def save_models(folder: Path) -> None:
    save_tiny_model(folder / "dense")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(char_tokenizer()),
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dtype": "float32",
    }
    # One key head, which is fewer than the ranks that share a row.
    window = MistralConfig(**sizes, intermediate_size=96, num_key_value_heads=1, sliding_window=4)
    MistralForCausalLM(window).save_pretrained(folder / "window")
    # Two tensor parallel ranks have 49 rows each, which no two ranks share evenly.
    biased = LlamaConfig(
        **sizes, intermediate_size=98, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    )
    model = LlamaForCausalLM(biased)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "biased")
    # With heads that are not zero, as new ones would be: they would give no gradients below.
    config = tiny_qwen3().config
    config.num_labels = 1
    Qwen3ForTokenClassification(config).save_pretrained(folder / "critic")
    Qwen3ForSequenceClassification(config).save_pretrained(folder / "scorer")
    save_tiny_model(folder / "experts", experts=True, tied=False, number=EXPERTS)
    config = AutoConfig.from_pretrained(folder / "experts", num_labels=1)
    Qwen3MoeForTokenClassification(config).save_pretrained(folder / "experts critic")
    for name in ("window", "biased", "critic", "scorer", "experts critic"):
        char_tokenizer().save_pretrained(folder / name)


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


def is_sharded(strategy: Any) -> bool:
    """Return whether FSDP has the model."""
    return isinstance(strategy._model, FSDPModule)


def job(
    spec: WorkerSpec, folder: Path, layouts: Mapping[str, tuple[Options, tuple[str, ...]]]
) -> dict[tuple[str, str], Any]:
    """
    Args:
        layouts: options and cases of each.
    """
    group, results = GroupMembership(spec), {}
    for layout, (options, cases) in layouts.items():
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
                "sharded": is_sharded(strategy),
                "before": before,
                "start": start,
                "parts": parts,
                "manifest": strategy.weight_manifest(),
                "metrics": metrics,
                "weights": exported(strategy),
            }
    group.leave()
    return results
