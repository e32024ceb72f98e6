"""`ReferenceWorker`: log-probs of the frozen model that training starts from."""

from __future__ import annotations

from dataclasses import replace

from roll.config.model import ModelConfig
from roll.config.training import ScoreRole
from roll.core.batches import RolloutBatch
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, dispatch
from roll.distributed.worker import Worker
from roll.strategy.build import build_score


class ReferenceWorker(Worker):
    """One rank of `reference`."""

    def __init__(
        self, spec: WorkerSpec, role: ScoreRole, model: ModelConfig, temperature: float
    ) -> None:
        super().__init__(spec)
        self.strategy = build_score(role, model, spec, temperature=temperature)

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info

    @dispatch(SHARD_BATCH)
    def add_ref_logprobs(self, batch: RolloutBatch) -> RolloutBatch:
        return replace(batch, ref_logprobs=self.strategy.score(batch).logprobs_BT)

    @dispatch(BROADCAST)
    def offload(self) -> None:
        self.strategy.offload()

    @dispatch(BROADCAST)
    def onload(self) -> None:
        self.strategy.onload()

    def close(self) -> None:
        self.strategy.close()
        super().close()
