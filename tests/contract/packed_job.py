"""What every rank of a Megatron layout is put through with packed rows: one update of each case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from roll.algorithms.loss_interface import TermsLoss
from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.strategy import MegatronConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from tests.contract.backends import PLAIN_STEP, TrainBackend
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import rollout_batch

MEGATRON = TrainBackend("", MegatronConfig, ())
POLICY, POLICY_LOSS = PolicyHead(1.0, 7), EntropyBonusLoss()
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
BY_LENGTH = [0, 4, 1, 7, 6, 3, 2, 5]
"""Rows such that the first of two ranks has longer ones."""
LENGTHS = (1, 3, 13, 31, 2, 1, 67, 2)
"""Such that the first of two ranks has one micro-batch, and the second several."""


def hostile_batch() -> RolloutBatch:
    """Rows of one and two tokens, of prime numbers of tokens, and one that is over the budget."""
    batch, lengths = rollout_batch(len(LENGTHS), longest=62), torch.tensor(LENGTHS)
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(4, 60, batch.tokens.shape, generator=g)
    at_T = torch.arange(tokens.shape[1])
    real_BT = at_T < lengths[:, None]
    mask_BT = real_BT & (at_T > 0)
    return replace(
        batch,
        tokens=tokens * real_BT,
        lengths=lengths,
        loss_mask=mask_BT,
        advantages=torch.randn(tokens.shape, generator=g) * mask_BT,
        token_weights=mask_BT.float() / mask_BT.sum(),
    )


@dataclass(frozen=True)
class Case:
    model: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    packing: bool = True
    budget: int = 40
    lora: bool = False
    head: Any = POLICY
    loss: TermsLoss[Any, RolloutBatch] = POLICY_LOSS
    batch: Callable[[], RolloutBatch] = train_batch

    @property
    def alone(self) -> Case:
        """The case that this one is compared with: padded rows on one rank.

        Sparse attention takes one of several tokens of equal scores, by the length of the row that
        it sees. So padding decides there, too, and each row must be alone.
        """
        budget = 1 if self.model == "sparse" else 1000
        return replace(self, layout={}, packing=False, budget=budget)


def job(spec: WorkerSpec, folder: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    group = GroupMembership(spec)
    results = {name: one_update(spec, folder.parent, case) for name, case in cases.items()}
    if spec.world_size == 1:
        results["refused"] = refusal(spec, folder.parent / "linear")
    group.leave()
    return results


def refusal(spec: WorkerSpec, model: Path) -> dict[str, str]:
    """What a model says whose rows cannot be packed."""
    try:
        MEGATRON.build(spec, ModelConfig(path=str(model)), packing=True)
    except ConfigError as error:
        return {"said": str(error)}
    return {}


def one_update(spec: WorkerSpec, folder: Path, case: Case) -> dict[str, Any]:
    role = TrainRole(
        pool="p",
        strategy=MegatronConfig(**case.layout),
        optimizer=PLAIN_STEP,
        max_tokens_per_microbatch=case.budget,
        packing=case.packing,
    )
    model = ModelConfig(path=str(folder / case.model), lora=LORA if case.lora else None)
    strategy = build_train(role, model, spec, case.head, total_steps=None)
    rows = rows_of(strategy, case.batch().select(BY_LENGTH))
    start, before = (
        exported(strategy),
        strategy.score(rows, entropy=case.head is POLICY, squares=case.head is POLICY),
    )
    metrics = strategy.train(rows, case.loss)
    result = {
        "info": strategy.rank_info,
        "lengths": rows.lengths.tolist(),
        "before": before,
        "start": start,
        "metrics": metrics,
        "weights": exported(strategy),
    }
    strategy.close()
    return result


def real(values_BT: Any, lengths: Sequence[int]) -> list[Any]:
    """The values of each row's tokens, without padding and the first token."""
    return [row[1:length] for row, length in zip(values_BT, lengths, strict=True)]
