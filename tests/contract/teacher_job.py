"""What every rank of teachers and students is put through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll.algorithms.losses.distill import DistillLoss
from roll.algorithms.teacher_divergence import comparison
from roll.config.algorithm.divergences import (
    DistillLossConfig,
    DistillTargetConfig,
    JensenShannonConfig,
)
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import (
    DeepspeedConfig,
    Fsdp2Config,
    HfScoreConfig,
    MegatronConfig,
)
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.batches import TrainBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.interfaces import ScoreStrategy
from roll.strategy.training import forward
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from roll.strategy.training.teacher_forward import TeacherHead, TeacherTerms
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
Learns = Fsdp2Config | DeepspeedConfig | MegatronConfig


@dataclass(frozen=True)
class Pair:
    """A teacher and its student, on two ranks."""

    teaches: HfScoreConfig | Learns
    learns: Learns
    models: str = "dense"
    """Kind of both models, the name of their folder."""
    packing: bool = False


def on_megatron(models: str = "dense", *, packing: bool = False, **layout: Any) -> Pair:
    """Both on Megatron-Core, which a process can cut in one way only."""
    return Pair(MegatronConfig(**layout), MegatronConfig(**layout), models, packing)


PAIRS = {
    "hf to fsdp2": Pair(HfScoreConfig(), Fsdp2Config()),
    "fsdp2 to zero3": Pair(Fsdp2Config(), DeepspeedConfig(**ZERO_3)),
    "zero3 to zero2": Pair(DeepspeedConfig(**ZERO_3), DeepspeedConfig(stage=2)),
    "ulysses to ulysses": Pair(Fsdp2Config(ulysses=2), Fsdp2Config(ulysses=2)),
    "fsdp2 to megatron dp2": Pair(Fsdp2Config(), MegatronConfig(distributed_optimizer=True)),
    "megatron pp2 to fsdp2": Pair(MegatronConfig(pp=2), Fsdp2Config()),
    "hf to megatron tp2": Pair(HfScoreConfig(), MegatronConfig(tp=2)),
    "megatron tp2 in sequence, packed": on_megatron(tp=2, sequence_parallel=True, packing=True),
    "megatron cp2": on_megatron(cp=2),
    "megatron cp2, packed": on_megatron(cp=2, packing=True),
    "megatron pp2 vpp2": on_megatron(pp=2, vpp=2),
    "megatron ep2": on_megatron("experts", ep=2),
    "megatron tp2 of bounded logits": on_megatron("bounded", tp=2),
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


def share(strategy: ScoreStrategy[Any], batch: TrainBatch) -> TrainBatch:
    """The rows of this rank."""
    info = strategy.rank_info
    return batch.split(info.dp_size)[info.dp_rank]


def asked(teacher: ScoreStrategy[TeacherTerms], *, whole: bool) -> TrainBatch:
    """All rows with what the leaders among the teacher's ranks tell, and where `whole` asks for
    one, with the head that rank 0 tells: as the students of a run get it."""
    batch, info = taught_batch(), teacher.rank_info
    head = teacher.output_head() if whole else None
    rows = teacher.score(share(teacher, batch)).rows
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (info, rows, head))
    parts = {each.dp_rank: rows for each, rows, _ in told if each.is_dp_leader}
    every = [row for place in sorted(parts) for row in parts[place]]
    return replace(batch, teacher_outputs=[replace(row, head=told[0][2]) for row in every])


def rounding(
    spec: WorkerSpec,
    model: ModelConfig,
    learns: Learns,
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
    made = PAIRS[pair]
    teacher_model, student_model = (
        ModelConfig(path=str(folder.parent / made.models / name)) for name in ("teacher", "student")
    )
    results: dict[str, Any] = {}
    group = GroupMembership(spec)  # which all share
    kept: list[Any] = []
    for name, target in TARGETS.items():
        role = ScoreRole(
            pool="p", strategy=made.teaches, max_tokens_per_microbatch=24, packing=made.packing
        )
        teacher = build_score(role, teacher_model, spec, TeacherHead(target, NUM_TOKENS, 5))
        told = asked(teacher, whole=target.top_k is None)
        student = build_train(
            TrainRole(
                pool="p",
                strategy=made.learns,
                optimizer=PLAIN_STEP,
                max_tokens_per_microbatch=40,
                packing=made.packing,
            ),
            student_model,
            spec,
            PolicyHead(1.0, 7, comparison(target, NUM_TOKENS)),
            total_steps=None,
        )
        kept += [teacher, student]
        start = {key: tensor.clone() for key, tensor in student.export_weights()}
        mine = share(student, told)
        divergence_BT = student.score(mine).divergence_BT
        metrics = student.train(mine, DistillLoss(DistillLossConfig(sft_coef=SFT_COEF)))
        results[name] = {
            "start": start,
            "divergence": divergence_BT,
            "head": next(row.head for row in told.teacher_outputs or []),
            "info": student.rank_info,
            "metrics": metrics,
            "weights": {key: tensor.clone() for key, tensor in student.export_weights()},
        }
    if made.models == "dense":
        results["bf16"] = rounding(spec, student_model, made.learns, kept, mine)
    for strategy in reversed(kept):
        strategy.close()
    group.leave()
    return results
