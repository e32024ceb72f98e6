"""What students keep of their teachers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from roll.core.batches import TrainBatch
from roll.core.teacher_outputs import OutputHead
from roll.distributed.remote_values import RemoteValue, fetch

B = TypeVar("B", bound=TrainBatch)

TIMEOUT_S = 600.0
"""For what teachers outputs to arrive, which lies ready when it is asked for."""


class TeacherHeads:
    """The heads of all teachers, and what they say of the rows at hand."""

    def __init__(self) -> None:
        self._heads: dict[str, OutputHead] = {}

    def receive(self, heads: Mapping[str, RemoteValue[OutputHead]]) -> None:
        """Take the heads, by the teachers' names."""
        remote_values = list(heads.values())
        got = fetch(
            remote_values, timeout_s=TIMEOUT_S, what=f"the heads of teachers {', '.join(heads)}"
        )
        self._heads = dict(zip(heads, got, strict=True))

    def offload(self) -> None:
        """Leave the device to others."""
        for head in self._heads.values():
            head.stay_home()

    def resolve(self, batch: B) -> B:
        """Return the batch with the values that its addresses stand for."""
        if batch.teacher_outputs is None:
            return batch
        rows = fetch(
            batch.teacher_outputs,
            timeout_s=TIMEOUT_S,
            what=f"what teachers say of {len(batch)} rows",
        )
        # A teacher that tells its likeliest tokens hands over no head.
        teacher_outputs = [replace(row, head=self._heads.get(row.teacher)) for row in rows]
        return replace(batch, teacher_outputs=teacher_outputs)
