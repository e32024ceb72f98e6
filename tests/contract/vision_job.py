"""What every rank of a backend is put through with models that see; and the oracle, which is
transformers' own pass over the outputs of its own processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForImageTextToText, PreTrainedModel

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.frozen import part_of
from roll.config.sections.model import LoraConfig, ModelConfig, ModelPart
from roll.config.sections.strategy import MegatronConfig
from roll.config.sections.training import ScoreRole
from roll.core.batches import RolloutBatch
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.teacher_forward import TeacherHead
from tests.contract.backends import PACKING, SCORE_BACKENDS, TRAIN_BACKENDS, TrainBackend
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of
from tests.vision_models import IMAGE, VOCAB_SIZE, SeenRow, seen_row

EMBEDDING = "model.language_model.embed_tokens.weight"
MIXED, LOPSIDED, BLIND = "mixed", "lopsided", "blind"
"""Rows with and without pictures on both ranks; all pictures on the first rank; no pictures."""
ORDER = {
    MIXED: [0, 1, 2, 3, 4, 5, 6, 7],
    LOPSIDED: [0, 1, 3, 6, 2, 4, 5, 7],
    BLIND: [0, 1, 2, 3, 4, 5, 6, 7],
}
TIGHT = 100
"""Budget with which rows with pictures need a pass each, and those without share one."""


@dataclass(frozen=True)
class Case:
    """One update."""

    rows: str = MIXED
    budget: int = 16384
    freeze: tuple[ModelPart, ...] = ()
    lora: bool = False
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "whole": Case(),
    "one row each": Case(budget=1),
    "packed": Case(budget=2 * TIGHT, options={PACKING: True}),
    "one rank sees": Case(LOPSIDED, budget=TIGHT),
    "one rank sees, at once": Case(LOPSIDED),
    "nobody sees": Case(BLIND),
    "checkpointed": Case(LOPSIDED, options={"activation_checkpointing": True}),
    "frozen tower": Case(LOPSIDED, freeze=("vision",)),
    "frozen eyes": Case(freeze=("vision", "projector")),
    "frozen language": Case(LOPSIDED, budget=TIGHT, freeze=("language",)),
    "adapter": Case(LOPSIDED, lora=True),
    "bf16": Case(dtype="bfloat16"),
}
KEPT = "frozen tower"
"""The case whose result is saved and loaded."""
FEWER = ("whole", "packed", "one rank sees", KEPT)
"""Cases of all families of a backend but one: those in which families differ. What is frozen or
computed again does not depend on how a family reads pictures."""
INEXACT = ("adapter", "bf16")
"""Cases whose step does not show the gradient of the weights."""


@dataclass(frozen=True)
class Row:
    """A prompt, with pictures or without, and what was written after it."""

    seen: SeenRow | None
    prompt: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.written]


def vision_rows(family: str) -> list[Row]:
    """Two siblings, others with one and with two pictures, and rows of text."""
    draw = np.random.default_rng(0)
    seen: list[SeenRow | None] = [None] * 8
    seen[0] = seen[1] = seen_row(family, [(2, 3)], seed=1)
    seen[3] = seen_row(family, [(1, 2), (3, 2)], seed=2)
    seen[6] = seen_row(family, [(2, 2)], seed=3)
    rows = []
    for its in seen:
        prompt = tuple(draw.integers(4, 60, 6).tolist()) if its is None else its.tokens
        written = draw.integers(4, 60, int(draw.integers(3, 9))).tolist()
        # A policy may write what stands for a picture; it is text then.
        written[1] = IMAGE
        rows.append(Row(its, prompt, tuple(written)))
    return rows


def vision_batch(family: str, kind: str) -> RolloutBatch:
    rows = vision_rows(family)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, len(row.prompt) : len(row.tokens)] = True
    advantages = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(4)) * mask
    batch = RolloutBatch(
        sample_ids=[str(i) for i in range(len(rows))],
        tags=["default"] * len(rows),
        group_ids=torch.arange(len(rows)),
        tokens=tokens,
        lengths=lengths,
        loss_mask=mask,
        token_weights=mask.float() / mask.sum(),
        advantages=advantages,
        pictures=[None if row.seen is None else row.seen.pictures for row in rows],
    )
    batch = replace(batch, pictures=None) if kind == BLIND else batch
    return batch.select(ORDER[kind])


def options_of(made: TrainBackend, case: Case) -> dict[str, Any]:
    """The options of a case as the backend calls them."""
    if made.strategy is not MegatronConfig or PACKING in case.options:
        return case.options
    return {"recompute": "full"} if case.options else {}


def names_of(made: TrainBackend, world_size: int, *, all_cases: bool) -> list[str]:
    """Return the names of the cases that a backend runs for a family.

    Args:
        all_cases: not only those in which families differ.
    """
    if world_size == 1 and not made.differs_alone:
        names = ["adapter"] if all_cases else []  # what the adapter of several ranks is compared to
    else:
        names = list(CASES if all_cases else FEWER)
    return [name for name in names if made.adapters or not CASES[name].lora]


def job(spec: WorkerSpec, folder: Path, *, backend: str, families: Sequence[str]) -> dict[Any, Any]:
    """One update for each family and case, by (family, case)."""
    made = next(each for each in TRAIN_BACKENDS if each.name == backend)
    group = GroupMembership(spec)
    results: dict[Any, Any] = {}
    for family in families:
        for name in names_of(made, spec.world_size, all_cases=family == families[-1]):
            case = CASES[name]
            options = options_of(made, case)
            model = ModelConfig(
                path=str(folder.parent / family),
                dtype=case.dtype,  # type: ignore[arg-type]
                freeze=case.freeze,
                lora=LoraConfig(rank=2) if case.lora else None,
            )
            strategy = made.build(spec, model, budget=case.budget, chunk=7, **options)
            rows = rows_of(strategy, vision_batch(family, case.rows))
            before = strategy.score(rows, entropy=True)
            start = exported(strategy)
            frozen = strategy.frozen_weights()
            metrics = strategy.train(rows, EntropyBonusLoss())
            results[family, name] = {
                "info": strategy.rank_info,
                "before": before,
                "start": start,
                "frozen": frozen,
                "metrics": metrics,
                "weights": exported(strategy),
                "after": strategy.score(rows).logprobs_BT,
            }
            if name == KEPT:
                out = folder / family
                strategy.save(out / "checkpoint")
                strategy.save_hf(out / "hf")
                again = made.build(spec, model, budget=case.budget, chunk=7, **options)
                again.load(out / "checkpoint")
                results[family, name]["resumed"] = exported(again)
                again.close()
            strategy.close()
    group.leave()
    return results


def score_job(spec: WorkerSpec, folder: Path, *, families: Sequence[str]) -> dict[Any, Any]:
    """Scores of each backend that can score, by (family, backend, kind of rows)."""
    results: dict[Any, Any] = {}
    group = GroupMembership(spec)
    for family in families:
        model = ModelConfig(path=str(folder.parent / family))
        for name in SCORING:
            strategy = SCORE_BACKENDS[name].build(spec, model, budget=TIGHT, chunk=7)
            info = strategy.rank_info
            for kind in (MIXED, LOPSIDED, BLIND):
                rows = vision_batch(family, kind).split(info.dp_size)[info.dp_rank]
                results[family, name, kind] = info, strategy.score(rows, entropy=True)
            strategy.close()
    group.leave()
    return results


def taught_job(spec: WorkerSpec, folder: Path, *, family: str) -> dict[str, Any]:
    """What a teacher on megatron tells of its rows, and its head."""
    role = ScoreRole(pool="p", strategy=MegatronConfig(), max_tokens_per_microbatch=TIGHT)
    head = TeacherHead(DistillTargetConfig(), VOCAB_SIZE, 7)
    teacher = build_score(role, ModelConfig(path=str(folder.parent / family)), spec, head)
    rows = teacher.score(vision_batch(family, MIXED)).rows
    found = {"rows": rows, "head": teacher.output_head()}
    teacher.close()
    return found


def refused_job(spec: WorkerSpec, folder: Path) -> dict[str, str]:
    """What a backend says that would read pictures as text, and one that would wait for gradients
    of a tower without pictures."""
    made = next(each for each in TRAIN_BACKENDS if each.name == "megatron-dp2")
    seeing = ModelConfig(path=str(folder.parent / "qwen2_vl"))
    said = {}
    try:
        made.build(spec, seeing, overlap_grad_reduce=True)
    except ConfigError as error:
        said["overlap"] = str(error)
    made.build(
        spec,
        seeing.model_copy(update={"freeze": ("vision", "projector")}),
        overlap_grad_reduce=True,
    ).close()
    strategy = SCORE_BACKENDS["megatron"].build(spec, ModelConfig(path=str(folder.parent / "text")))
    try:
        strategy.score(vision_batch("qwen3_vl", MIXED))
    except ConfigError as error:
        said["pictures"] = str(error)
    strategy.close()
    return said


SCORING = ("hf", "fsdp2", "fsdp2-ulysses2", "deepspeed", "deepspeed-zero3", "megatron")


def plain_logits(model: PreTrainedModel, row: Row, *, sees: bool) -> Tensor:
    """Logits `[T, V]` of the model's own pass.

    transformers takes each `<|image_pad|>` for a part of a picture. So one that was written is read
    as another token with the same embedding.
    """
    own = model.get_parameter(EMBEDDING)
    longer = {EMBEDDING: torch.cat([own, own[IMAGE : IMAGE + 1]])}
    written = [VOCAB_SIZE if token == IMAGE else token for token in row.written]
    ids = [*row.prompt, *written]
    if row.seen is None or not sees:
        inputs = {"input_ids": torch.tensor([ids])}
    else:
        inputs = row.seen.forward_inputs(ids)
    logits: Tensor = functional_call(model, longer, kwargs=inputs).logits[0]
    return logits


def plain_terms(model: PreTrainedModel, row: Row, *, sees: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[T - 1]` of all tokens but the first."""
    logp = plain_logits(model, row, sees=sees)[:-1].log_softmax(-1)
    chosen = logp.gather(1, torch.tensor(row.tokens)[1:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1)


def plain_gradient(
    path: Path, family: str, freeze: Sequence[ModelPart], *, sees: bool
) -> tuple[dict[str, Tensor], float]:
    """Gradient and loss of `EntropyBonusLoss`, one row at a time, by names of the checkpoint."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    batch = vision_batch(family, MIXED)
    assert batch.advantages is not None
    assert batch.token_weights is not None
    total = torch.zeros(())
    for i, row in enumerate(vision_rows(family)):
        chosen, entropy = plain_terms(model, row, sees=sees)
        length = len(row.tokens)
        loss = -chosen * batch.advantages[i, 1:length] - 0.1 * entropy
        total = total + (loss * batch.token_weights[i, 1:length]).sum()
    total.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            grad = None if part_of(name) in freeze else parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    out = path / "gradient" / "_".join([str(sees), *freeze])
    model.save_pretrained(out)
    return load_file(out / "model.safetensors"), float(total.detach())
