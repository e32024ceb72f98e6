"""`TeacherWorker`: computes the outputs of a teacher, from which students learn."""

from __future__ import annotations

from dataclasses import replace

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.sections.training import TeacherRole
from roll.core.batches import RetokenizedBatch, TeacherColumn, TrainBatch
from roll.core.teacher_outputs import OutputHead
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, dispatch
from roll.distributed.remote_values import RemoteValue, store
from roll.strategy.build import build_score
from roll.strategy.training.teacher_forward import TeacherHead, TeacherTerms
from roll.workers.model import ScoreWorker
from roll.workers.work import WorkMeter


class TeacherWorker(ScoreWorker[TeacherTerms]):
    """A worker of a teacher: one rank of the frozen model.

    Args:
        target: kind of outputs that the students compare with (hidden states, or top-k tokens).
        num_tokens: number of tokens of the teacher's tokenizer.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        role: TeacherRole,
        target: DistillTargetConfig,
        num_tokens: int,
    ) -> None:
        head = TeacherHead(target, num_tokens, role.logprob_chunk_tokens)
        meter = WorkMeter(role.model, trains=False, writes=target.top_k is not None)
        super().__init__(spec, build_score(role, role.model, spec, head), meter)
        self.num_tokens = num_tokens

    @dispatch(SHARD_BATCH)
    def outputs(self, batch: TrainBatch) -> TeacherColumn:
        """Return a `RemoteValue` of a `TeacherRow` for each row. Only data-parallel leaders make
        them: the results of other ranks are not used. A `RetokenizedBatch` has this teacher's
        tokens; positions in the result are always those of the student."""
        found = self.score(batch).rows
        if not self.rank_info.is_dp_leader:
            return TeacherColumn(outputs=[None] * len(batch))
        rows = [replace(row, teacher=self.spec.label) for row in found]
        if isinstance(batch, RetokenizedBatch):
            places = batch.student_positions
            rows = [replace(row, positions_N=at) for row, at in zip(rows, places, strict=True)]
        return TeacherColumn(outputs=store(rows, [row.num_bytes for row in rows]))

    @dispatch(BROADCAST)
    def output_head(self) -> list[RemoteValue[OutputHead]]:
        """Return the last layer of the teacher, which turns hidden states into logits, as a list
        with one address. The method is collective; only the result of rank 0 is used."""
        head = replace(self.strategy.output_head(), num_tokens=self.num_tokens)
        return store([head], [head.weight_VD.nbytes]) if self.spec.rank == 0 else []
