"""What every rank of teachers and students is put through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.losses.distill import DistillLoss
from roll.algorithms.teacher_divergence import comparison
from roll.config.algorithm.divergences import (
    DistillLossConfig,
    DistillTargetConfig,
    JensenShannonConfig,
)
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import DeepspeedConfig, Fsdp2Config, HfScoreConfig
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.batches import TrainBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.interfaces import ScoreStrategy
from roll.strategy.training import forward
from roll.strategy.training.heads import PolicyHead
from roll.strategy.training.teacher_forward import TeacherHead
from tests.contract.backends import PLAIN_STEP, ZERO_3
from tests.tiny import rollout_batch

ROWS = 8
NUM_TOKENS = 60
"""Fewer than the models have logits."""
SFT_COEF = 0.3
TARGETS = {
    "whole": DistillTargetConfig(
        divergence=JensenShannonConfig(), student_temperature=1.2, teacher_temperature=0.9
    ),
    "likeliest": DistillTargetConfig(divergence=JensenShannonConfig(), top_k=4),
}
PAIRS: dict[
    str, tuple[HfScoreConfig | Fsdp2Config | DeepspeedConfig, Fsdp2Config | DeepspeedConfig]
] = {
    "hf to fsdp2": (HfScoreConfig(), Fsdp2Config()),
    "fsdp2 to zero3": (Fsdp2Config(), DeepspeedConfig(**ZERO_3)),
    "zero3 to zero2": (DeepspeedConfig(**ZERO_3), DeepspeedConfig(stage=2)),
    "ulysses to ulysses": (Fsdp2Config(ulysses=2), Fsdp2Config(ulysses=2)),
}


def taught_batch() -> TrainBatch:
    batch = rollout_batch(ROWS, seed=3, vocab=NUM_TOKENS)
    weights = batch.loss_mask.float() / batch.loss_mask.sum()
    return TrainBatch(
        tokens=batch.tokens,
        lengths=batch.lengths,
        loss_mask=batch.loss_mask,
        token_weights=weights,
    )


def share(strategy: ScoreStrategy[Any]) -> TrainBatch:
    """The rows of this rank."""
    info = strategy.rank_info
    return taught_batch().split(info.dp_size)[info.dp_rank]


def rounding(
    spec: WorkerSpec,
    model: ModelConfig,
    learns: Fsdp2Config | DeepspeedConfig,
    kept: list[Any],
    told: TrainBatch,
) -> float:
    """How far divergences of a bfloat16 student are from those of the model alone, whose teacher's
    log-probs nobody rounds."""
    model = model.model_copy(update={"dtype": "bfloat16"})
    head = PolicyHead(1.0, 7, comparison(TARGETS["likeliest"], NUM_TOKENS))
    role = TrainRole(pool="p", strategy=learns, max_tokens_per_microbatch=40)
    kept.append(build_train(role, model, spec, head, total_steps=None))
    alone = forward.score(
        head.load(model, torch.bfloat16),
        told,
        device=torch.device("cpu"),
        max_tokens=40,
        entropy=False,
        agree=lambda passes: passes,
    )
    found, wanted = kept[-1].score(told).divergence_BT, alone.divergence_BT
    assert wanted is not None
    return float((found - wanted).abs().max())


def job(spec: WorkerSpec, folder: Path, pair: str) -> dict[str, Any]:
    teaches, learns = PAIRS[pair]
    teacher_model = ModelConfig(path=str(folder.parent / "teacher"))
    student_model = ModelConfig(path=str(folder.parent / "student"))
    results: dict[str, Any] = {}
    kept: list[Any] = []  # all share the process group of the first
    for name, target in TARGETS.items():
        role = ScoreRole(pool="p", strategy=teaches, max_tokens_per_microbatch=24)
        teacher = build_score(role, teacher_model, spec, TeacherHead(target, NUM_TOKENS, 5))
        head = teacher.output_head() if target.top_k is None else None
        teacher_outputs = [replace(row, head=head) for row in teacher.score(share(teacher)).rows]
        student = build_train(
            TrainRole(
                pool="p", strategy=learns, optimizer=PLAIN_STEP, max_tokens_per_microbatch=40
            ),
            student_model,
            spec,
            PolicyHead(1.0, 7, comparison(target, NUM_TOKENS)),
            total_steps=None,
        )
        kept += [teacher, student]
        start = {key: tensor.clone() for key, tensor in student.export_weights()}
        told = replace(share(student), teacher_outputs=teacher_outputs)
        divergence_BT = student.score(told).divergence_BT
        metrics = student.train(told, DistillLoss(DistillLossConfig(sft_coef=SFT_COEF)))
        results[name] = {
            "start": start,
            "divergence": divergence_BT,
            "info": student.rank_info,
            "metrics": metrics,
            "weights": {key: tensor.clone() for key, tensor in student.export_weights()},
        }
    results["bf16"] = rounding(spec, student_model, learns, kept, told)
    for strategy in reversed(kept):
        strategy.close()
    return results
