"""`WeightPusher`: brings the trainer's weights to all engines, or to some."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from roll.config.sections.weights import WeightSyncConfig
from roll.core.errors import RollError, WeightSyncError
from roll.distributed.cluster import Cluster
from roll.distributed.pending import Pending, both
from roll.weight_sync.channel import Channel
from roll.weight_sync.transport_choice import Endpoint, Route, choose_transport
from roll.workers.actor import ActorWorker
from roll.workers.infer import InferWorker

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 600.0
"""For each wait of one side of a weight push on the other."""
GIVE_UP_S = 30.0
"""For both sides to leave a push that has failed."""


@dataclass
class WeightPusher:
    """Pushes from `actor_train` to `actor_infer`, one after the other, never two at once.

    Tensors that never change (frozen parameters) travel once to each engine: in the first push, and
    in the first after `forget`.
    """

    actor: Cluster[ActorWorker]
    infer: Cluster[InferWorker]
    platform: str
    """`cpu` or `cuda`."""
    config: WeightSyncConfig
    _served: set[int] = field(default_factory=set)
    """Replicas that have received all tensors, and hold those that never change."""

    def push(self, version: int, ranks: Sequence[int], *, verify: bool) -> None:
        """Replace the weights of these replicas; returns when they all use them.

        The trainer reads its weights once, however many receive them.

        Args:
            version: what the tokens that follow carry.
            verify: prove by checksums, and by asking the models, that they hold what was sent.

        Raises:
            WeightSyncError: an engine refused, died, or holds something else than was sent.
            WorkerLostError: a replica died.
        """
        engines = self.infer.on(ranks)
        senders = self.actor.call_each(ActorWorker.place)
        places = engines.call_each(InferWorker.places)
        firsts = accumulate(map(len, places[:-1]), initial=0)
        receivers = [place for each in places for place in each]
        channel = self.actor.call(
            ActorWorker.open_channel,
            self._route(senders, receivers),
            len(senders),
            len(receivers),
            timeout_s=SYNC_TIMEOUT_S,
        )
        everything = not self._served.issuperset(ranks)
        self._served.difference_update(ranks)  # until this push has succeeded
        loading = engines.submit(
            InferWorker.load_weights,
            channel,
            version,
            dict(zip(ranks, firsts, strict=True)),
            verify,
        )
        sending = self.actor.submit(ActorWorker.push_weights, channel, everything, verify)
        try:
            sent, _ = both(sending, loading)
        except RollError as error:
            self._give_up(channel, str(error), sending, loading)
            raise
        if verify and sent.checksum is None:
            raise WeightSyncError(
                f"weight version {version}: no checksum came back from the sender"
            )
        self._served.update(ranks)

    def _give_up(
        self, channel: Channel, reason: str, sending: Pending[Any], loading: Pending[Any]
    ) -> None:
        """End the push on all sides: whoever waits in it for one that is gone would do so until
        its limit, and answer nothing else."""
        if not (sending.settle(0) and loading.settle(0)):
            self.actor.beside(ActorWorker.give_up_push, channel, reason).settle(GIVE_UP_S)
        for side, who in ((sending, "trainer"), (loading, "engines")):
            if not side.settle(GIVE_UP_S):
                logger.warning(
                    "waited %g s for the %s to leave a push of weights that was given up: %s",
                    GIVE_UP_S,
                    who,
                    reason,
                )

    def forget(self, rank: int) -> None:
        """This replica was restarted: it holds none of the trainer's weights."""
        self._served.discard(rank)

    def _route(self, senders: list[Endpoint], receivers: list[Endpoint]) -> Route:
        route = choose_transport(self.platform, senders, receivers)
        if self.config.folder is not None:
            route = Route("files", folder=Path(self.config.folder))
        if self.config.bucket_mb is None:
            return route
        return replace(route, bucket_bytes=self.config.bucket_mb << 20)
