"""`TeacherWorker`: what a teacher expects of every token, kept for its students."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from roll.config.algorithm.divergences import LessonConfig
from roll.config.sections.training import TeacherRole
from roll.core.batches import TrainBatch
from roll.core.teacher_outputs import OutputHead
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, dispatch
from roll.distributed.remote_values import Parcel, pack
from roll.strategy.build import build_score
from roll.strategy.training.teacher_forward import TaughtTerms, TeacherHead
from roll.workers.model import ScoreWorker

B = TypeVar("B", bound=TrainBatch)


class TeacherWorker(ScoreWorker[TaughtTerms]):
    """One rank of a teacher.

    Args:
        num_tokens: of the tokenizer that it shares with its students.
    """

    def __init__(
        self, spec: WorkerSpec, role: TeacherRole, lesson: LessonConfig, num_tokens: int
    ) -> None:
        head = TeacherHead(lesson, num_tokens, role.logprob_chunk_tokens)
        super().__init__(spec, build_score(role, role.model, spec, head))

    @dispatch(SHARD_BATCH)
    def teach(self, batch: B) -> B:
        """The rows, each with a parcel of what is said of it."""
        rows = [replace(row, teacher=self.spec.label) for row in self.strategy.score(batch).rows]
        if not self.rank_info.is_dp_leader:
            return batch  # nobody looks at it
        return replace(batch, taught=pack(rows, [row.num_bytes for row in rows]))

    @dispatch(BROADCAST)
    def output_head(self) -> list[Parcel[OutputHead]]:
        """What makes logits of the hidden states it tells; that of rank 0 counts."""
        head = self.strategy.output_head()
        return pack([head] if self.spec.rank == 0 else [], [head.weight_VD.nbytes])
