"""`WeightLoader`: loads pushed weights inside vLLM's worker processes.

The engine calls the methods through vLLM's `collective_rpc`. Arguments and results are plain JSON.
Failures of any kind are returned as results, because an exception would lose its type on its way to
the engine.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from roll.core.errors import failure
from roll.strategy.serving.report import numbers_of
from roll.strategy.vllm.worker_side.heads import EmbeddingMemory, repack_heads
from roll.strategy.vllm.worker_side.readback import Probes, read_back
from roll.strategy.vllm.worker_side.reload import reload_weights
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import Incoming, receive


class WeightLoader:
    """Part of `RollWorker` that replaces weights and ends the process with its owner.

    The worker provides `rank` and `model_runner`.
    """

    rank: int
    model_runner: Any
    _roll_held: frozenset[str] = frozenset()
    """Names of the tensors received in earlier pushes."""

    def roll_load_weights(
        self,
        channel: dict[str, Any],
        first_index: int,
        expected: dict[str, list[int]],
        optional: list[str],
    ) -> dict[str, Any]:
        """Replace all weights by those of a push.

        Args:
            channel: `Channel` as a dict.
            first_index: receiver index of rank 0 of this replica.
            expected: tensor name -> shape, for every tensor of the checkpoint.
            optional: names of tensors that the push may leave out.

        Returns:
            The numbers of a `LoadReport`; or, after a failure, `error` (text) and `intact` (whether
            the old weights are still complete and in use).
        """

        def check(manifest: Manifest) -> None:
            shapes = {name: tuple(shape) for name, shape in expected.items()}
            check_shapes(manifest, shapes, optional=frozenset(optional), held=self._roll_held)

        intact = True
        try:
            with receive(Channel(**channel), first_index + self.rank, check=check) as incoming:
                intact = False
                self._roll_reload(incoming)
                report = numbers_of(incoming)
            self._roll_held |= {meta.name for meta in incoming.manifest.tensors}
            return report
        except Exception as error:  # noqa: BLE001 - reported as a result
            if not intact:
                self._roll_held = frozenset()
            return {"error": failure(error), "intact": intact}

    def roll_die_with(self, owner: int, processes: int) -> None:
        """Kill this process and the engine's core as soon as process `owner` ends, if it is on the
        owner's node. On other nodes a `VllmFollower` has started this process, and ends it.

        vLLM's core does not notice when the process that started it is killed. If the model runs
        in the core itself, the parent of this process is the owner, which has ended already, or the
        owner's server of forks.

        Args:
            owner: id of the process that has the engine.
            processes: number of ranks on its node, which are the first ones.
        """
        if self.rank >= processes:
            return
        core = os.getppid()
        handle = os.pidfd_open(owner)

        def watch() -> None:
            select.select([handle], [], [])
            if os.getppid() == core:
                os.kill(core, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="die-with-owner", daemon=True).start()

    def _roll_reload(self, incoming: Incoming) -> None:
        """Load a push through vLLM's loader; with `verify`, read the weights back and compare."""
        model = self.model_runner.get_model()
        probes = Probes(model) if incoming.verify else None
        try:
            reload_weights(self.model_runner, _rest(incoming, EmbeddingMemory(model), probes))
        finally:
            repack_heads(model)
        if probes is not None:
            read_back(model, probes)


def _rest(
    incoming: Incoming, memory: EmbeddingMemory, probes: Probes | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that vLLM must still load: those not yet written into its memory."""
    for name, tensor in incoming.tensors(into=memory):
        if probes is not None:
            probes.add(name, tensor)
        if not memory.holds(tensor):
            yield name, tensor
