"""What every rank of a backend that trains adapters is put through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.interfaces import TrainStrategy
from tests.contract.backends import TRAIN_BACKENDS, TrainBackend
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch

DENSE = ("q_proj", "v_proj", "o_proj", "down_proj")
EXPERTS = ("q_proj", "v_proj", "o_proj")
"""Of a model with experts, which have no factors."""
ADAM = AdamWConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
STEPS = 3
TOO_MUCH = ("deepspeed-zero1",)
"""Another stage of ZeRO would only take time."""
BACKENDS: dict[str, TrainBackend] = {
    backend.name: backend
    for backend in TRAIN_BACKENDS
    if backend.adapters and backend.name not in TOO_MUCH
}


def job(spec: WorkerSpec, folder: Path, backend_name: str) -> dict[str, Any]:
    """All that one adapter goes through, from its first score to the update after a resume."""
    backend, model = BACKENDS[backend_name], ModelConfig(path=str(folder.parent / "model"))
    plain = _build(backend, spec, model)
    batch = train_batch()
    rows = rows_of(plain, batch)
    before, start = plain.score(rows).logprobs_BT, exported(plain)
    adapted = _build(backend, spec, _adapted(backend, model))
    results: dict[str, Any] = {
        "info": adapted.rank_info,
        "start": start,
        "fresh": adapted.score(rows).logprobs_BT,
        "before": before,
        "fresh_export": exported(adapted),
        "frozen": adapted.frozen_weights(),
    }
    adapted.save_hf(folder / "fresh")
    results["metrics"] = [adapted.train(rows, EntropyBonusLoss()) for _ in range(STEPS)]
    results["after"] = adapted.score(rows).logprobs_BT
    results["base"] = adapted.score_base(rows).logprobs_BT
    results["export"] = exported(adapted)
    results["parts"] = {name: part.clone() for name, part in adapted.export_parts()}
    results["manifest"] = adapted.weight_manifest()
    parts = adapted.export_parts(adapter=True)
    results["adapter_parts"] = {name: part.clone() for name, part in parts}
    results["adapter_manifest"] = adapted.weight_manifest(adapter=True)
    adapted.save_hf(folder / "adapter")
    adapted.save_hf(folder / "merged", merged=True)
    adapted.save(folder / "checkpoint")
    results["next"] = adapted.train(rows, EntropyBonusLoss())
    results["next_export"] = exported(adapted)
    results["resumed"] = _resumed(backend, spec, model, folder / "checkpoint")
    results["options"] = {
        option: _trained(backend, spec, model, **backend.turned(option))
        for option in backend.options
    }
    results["bf16"] = _in_bfloat16(backend, spec, model, folder)
    plain.close()
    return results


def _trained(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, **options: bool
) -> Tensor:
    strategy = _build(backend, spec, _adapted(backend, model), **options)
    rows = rows_of(strategy, train_batch())
    for _ in range(STEPS):
        strategy.train(rows, EntropyBonusLoss())
    return strategy.score(rows).logprobs_BT


def _in_bfloat16(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, folder: Path
) -> dict[str, Any]:
    half = _adapted(backend, model).model_copy(update={"dtype": "bfloat16"})
    strategy = _build(backend, spec, half)
    strategy.save_hf(folder / "fresh_bf16")
    rows = rows_of(strategy, train_batch())
    for _ in range(STEPS):
        strategy.train(rows, EntropyBonusLoss())
    return {"export": exported(strategy), "after": strategy.score(rows).logprobs_BT}


def resume_job(
    spec: WorkerSpec, folder: Path, backend_name: str, checkpoint: Path
) -> dict[str, Any]:
    """The update after a checkpoint that another number of ranks wrote."""
    backend, model = BACKENDS[backend_name], ModelConfig(path=str(folder.parent / "model"))
    plain = _build(backend, spec, model)
    results = {
        "info": plain.rank_info,
        "resumed": _resumed(backend, spec, model, checkpoint),
    }
    plain.close()
    return results


def _resumed(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, checkpoint: Path
) -> dict[str, Any]:
    strategy = _build(backend, spec, _adapted(backend, model))
    strategy.load(checkpoint)
    found = exported(strategy)
    metrics = strategy.train(rows_of(strategy, train_batch()), EntropyBonusLoss())
    return {"export": found, "metrics": metrics}


def seeds_job(spec: WorkerSpec, folder: Path, backend_name: str) -> dict[str, Any]:
    """Save fresh adapters of runs with these seeds."""
    backend, model = BACKENDS[backend_name], ModelConfig(path=str(folder.parent / "model"))
    first = _build(backend, spec, model)
    for seed in (1, 2):
        _build(backend, replace(spec, seed=seed), _adapted(backend, model)).save_hf(
            folder / f"seed {seed}"
        )
    first.close()
    return {}


def refusals(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """What the layers of a model with experts say that cannot have factors."""
    backend, found = BACKENDS["megatron-ep2"], {}
    plain = ModelConfig(path=str(folder.parent / "experts"))
    first = _build(backend, spec, plain)
    for target in ("gate_up_proj", "down_proj", "lm_head", "q_prj"):
        model = plain.model_copy(update={"lora": LoraConfig(targets=(target,))})
        try:
            _build(backend, spec, model)
        except ConfigError as error:
            found[target] = str(error)
    first.close()
    return found


def factors_of(backend: TrainBackend) -> tuple[str, ...]:
    return EXPERTS if backend.experts else DENSE


def _adapted(backend: TrainBackend, model: ModelConfig) -> ModelConfig:
    lora = LoraConfig(rank=3, alpha=7.0, targets=factors_of(backend))
    return model.model_copy(update={"lora": lora})


def _build(
    backend: TrainBackend, spec: WorkerSpec, model: ModelConfig, **options: bool
) -> TrainStrategy[Any]:
    return backend.build(spec, model, chunk=64, optimizer=ADAM, **options)


def trained_by_hand(path: Path, adapter: Path) -> Tensor:
    """PEFT, plain autograd and AdamW on whole rows, from a fresh adapter; log-probs at the end."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
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
    return scored_by_hand(adapted)


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
