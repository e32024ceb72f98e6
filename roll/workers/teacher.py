"""`TeacherWorker`: what a teacher expects of every token, kept for its students."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.sections.training import TeacherRole
from roll.core.batches import TrainBatch
from roll.core.teacher_outputs import OutputHead
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, dispatch
from roll.distributed.remote_values import RemoteValue, store
from roll.strategy.build import build_score
from roll.strategy.training.teacher_forward import TeacherHead, TeacherTerms
from roll.workers.model import ScoreWorker

B = TypeVar("B", bound=TrainBatch)


class TeacherWorker(ScoreWorker[TeacherTerms]):
    """One rank of a teacher.

    Args:
        num_tokens: of the tokenizer that it shares with its students.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        role: TeacherRole,
        target: DistillTargetConfig,
        num_tokens: int,
    ) -> None:
        head = TeacherHead(target, num_tokens, role.logprob_chunk_tokens)
        super().__init__(spec, build_score(role, role.model, spec, head))

    @dispatch(SHARD_BATCH)
    def add_teacher_outputs(self, batch: B) -> B:
        """Return the rows, each with a `RemoteValue` of what the teacher tells of it."""
        rows = [replace(row, teacher=self.spec.label) for row in self.strategy.score(batch).rows]
        if not self.rank_info.is_dp_leader:
            return batch  # nobody looks at it
        return replace(batch, teacher_outputs=store(rows, [row.num_bytes for row in rows]))

    @dispatch(BROADCAST)
    def output_head(self) -> list[RemoteValue[OutputHead]]:
        """What makes logits of the hidden states it tells; that of rank 0 counts."""
        head = self.strategy.output_head()
        return store([head] if self.spec.rank == 0 else [], [head.weight_VD.nbytes])
