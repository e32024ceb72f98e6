"""`TeacherHeads`: the last layers of the teachers, which a student keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from roll.core.batches import TrainBatch
from roll.core.teacher_outputs import OutputHead
from roll.distributed.remote_values import RemoteValue, fetch

B = TypeVar("B", bound=TrainBatch)

TIMEOUT_S = 600.0
"""Time limit of one fetch of heads or outputs, in seconds. They are stored before they are fetched,
so the limit covers only the transfer."""


class TeacherHeads:
    """The heads of all teachers of a student, by teacher name."""

    def __init__(self) -> None:
        self._heads: dict[str, OutputHead] = {}

    def receive(self, heads: Mapping[str, RemoteValue[OutputHead]]) -> None:
        """Fetch the heads of the teachers, by teacher name, and store them in place of all old
        ones. The errors are those of `fetch`."""
        remote_values = list(heads.values())
        got = fetch(
            remote_values, timeout_s=TIMEOUT_S, what=f"the heads of teachers {', '.join(heads)}"
        )
        self._heads = dict(zip(heads, got, strict=True))

    def offload(self) -> None:
        """Drop the copies of the heads on devices."""
        for head in self._heads.values():
            head.drop_copies()

    def resolve(self, batch: B) -> B:
        """Return the batch with its `teacher_outputs` fetched, if it has any: a `TeacherRow`, with
        the head of its teacher, in place of each `RemoteValue`.

        Raises:
            WaitTimeoutError: the outputs did not arrive in time.
            WorkerError: outputs are lost, because the process that stored them is dead.
        """
        if batch.teacher_outputs is None:
            return batch
        rows = fetch(
            batch.teacher_outputs,
            timeout_s=TIMEOUT_S,
            what=f"what teachers say of {len(batch)} rows",
        )
        # A teacher with top-k outputs has no head here: the students need none.
        teacher_outputs = [replace(row, head=self._heads.get(row.teacher)) for row in rows]
        return replace(batch, teacher_outputs=teacher_outputs)
