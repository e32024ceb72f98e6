"""What every rank of a backend that trains adapters is put through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.config.model import LoraConfig, ModelConfig
from roll.config.strategy import Fsdp2Config
from roll.config.training import OptimizerConfig, TrainRole
from roll.core.types import WorkerSpec
from roll.strategy.api import TrainStrategy
from roll.strategy.build import build_train
from roll.strategy.forward import PolicyHead
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch

LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
STEPS = 3


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    model = ModelConfig(path=str(folder.parent / "model"))
    plain = _build(spec, model)
    batch = train_batch()
    rows = rows_of(plain, batch)
    before, start = plain.score(rows).logprobs_BT, exported(plain)
    adapted = _build(spec, replace_lora(model))
    results: dict[str, Any] = {
        "start": start,
        "fresh": adapted.score(rows).logprobs_BT,
        "before": before,
        "fresh_export": exported(adapted),
        "frozen": adapted.frozen_weights(),
    }
    results["metrics"] = [adapted.train(rows, EntropyBonusLoss()) for _ in range(STEPS)]
    results["after"] = adapted.score(rows).logprobs_BT
    results["base"] = adapted.score_base(rows).logprobs_BT
    results["export"] = exported(adapted)
    results["parts"] = {name: part.clone() for name, part in adapted.export_parts()}
    results["manifest"] = adapted.weight_manifest()
    adapted.save_hf(folder / "adapter")
    adapted.save_hf(folder / "merged", merged=True)
    adapted.save(folder / "checkpoint")
    results["next"] = adapted.train(rows, EntropyBonusLoss()).values_by_name()
    results["next_export"] = exported(adapted)
    resumed = _build(spec, replace_lora(model))
    resumed.load(folder / "checkpoint")
    results["resumed"] = resumed.train(rows, EntropyBonusLoss()).values_by_name()
    elsewhere = folder.parent / "2" / "checkpoint"
    if spec.world_size == 1 and elsewhere.exists():
        resumed.load(elsewhere)
        results["from_two_ranks"] = exported(resumed)
    plain.close()
    return results


def replace_lora(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"lora": LORA})


def _build(spec: WorkerSpec, model: ModelConfig) -> TrainStrategy[Any]:
    role = TrainRole(pool="p", strategy=Fsdp2Config(), optimizer=ADAM)
    return build_train(role, model, spec, PolicyHead(1.0, 64), total_steps=None)


def trained_by_hand(path: Path) -> tuple[Any, Tensor]:
    """PEFT, plain autograd and AdamW on whole rows; the model, and its log-probs at the end."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(20)
    settings = PeftConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=list(LORA.targets)
    )
    adapted = get_peft_model(model, settings)
    factors = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        factors, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    batch = train_batch()
    assert batch.advantages is not None
    assert batch.token_weights is not None
    for _ in range(STEPS):
        total = torch.zeros(())
        for row, length in enumerate(batch.lengths.tolist()):
            tokens = batch.tokens[row, :length]
            logp = adapted(tokens[None]).logits[0, :-1].log_softmax(-1)
            chosen = logp[torch.arange(length - 1), tokens[1:]]
            entropy = -(logp.exp() * logp).sum(-1)
            loss = -chosen * batch.advantages[row, 1:length] - 0.1 * entropy
            total = total + (loss * batch.token_weights[row, 1:length]).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(factors, ADAM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return adapted, scored_by_hand(adapted)


def scored_by_hand(model: Any) -> Tensor:
    """Log-probs `[B, T]` of the real tokens of `train_batch`."""
    batch = replace(train_batch())
    out = torch.zeros(batch.tokens.shape)
    with torch.no_grad():
        for row, length in enumerate(batch.lengths.tolist()):
            tokens = batch.tokens[row, :length]
            logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            out[row, 1:length] = logp[torch.arange(length - 1), tokens[1:]]
    return out
