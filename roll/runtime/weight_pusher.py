"""`WeightPusher`: sends the trainer's weights to all engines, or to some of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from roll.config.sections.weights import WeightSyncConfig
from roll.core.errors import RollError, WeightSyncError
from roll.core.metrics import Metrics, Sum
from roll.distributed.cluster import Cluster, Workers
from roll.distributed.pending import Pending, both
from roll.weight_sync.channel import Channel
from roll.weight_sync.transport_choice import Endpoint, Route, choose_transport
from roll.workers.actor import ActorWorker
from roll.workers.infer import InferWorker

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 600.0
"""Time limit of each wait of one side of a weight push for the other side, in seconds."""
GIVE_UP_S = 30.0
"""Time that each side of a weight push has to end a push that has failed, in seconds."""


@dataclass
class WeightPusher:
    """Sender of weights from `actor_train` to `actor_infer`; only one push may run at a time.

    Tensors that never change (frozen parameters) are sent to each engine only once: in its first
    push, and in the first push after `forget`.
    """

    actor: Cluster[ActorWorker]
    infer: Cluster[InferWorker]
    platform: str
    """`cpu` or `cuda`."""
    config: WeightSyncConfig
    _served: set[int] = field(default_factory=set)
    """Ranks of the replicas that hold all tensors that never change."""
    _groups_made: int | None = None
    """Number of process groups that pushes have made since `take_metrics`; None if there was no
    push by broadcast."""

    def to(self, infer: Cluster[InferWorker]) -> WeightPusher:
        """Return a pusher of the same weights to other engines."""
        return replace(self, infer=infer, _served=set(), _groups_made=None)

    def push(self, version: int, ranks: Sequence[int], *, verify: bool) -> None:
        """Replace the weights of some replicas; return when all of them use the new weights.

        The trainer reads its weights once, whatever the number of replicas.

        Args:
            version: version of these weights, which later tokens carry.
            ranks: ranks of the replicas.
            verify: check by checksums that the engines received what was sent. vLLM also checks by
                probes that its model computes with these weights.

        Raises:
            WeightSyncError: an engine refused the weights, died, or holds other weights than were
                sent; or the sender returned no checksum although `verify` is True.
            WorkerLostError: a replica died.
        """
        engines = self.infer.on(ranks)
        channel, firsts = self._open_channel(engines, ranks)
        everything = not self._served.issuperset(ranks)
        self._served.difference_update(ranks)  # added again when this push has succeeded
        receivers = dict(zip(ranks, firsts, strict=True))
        loading = engines.submit(InferWorker.load_weights, channel, version, receivers, verify)
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
        if channel.kind == "broadcast":
            self._groups_made = (self._groups_made or 0) + sent.groups_made

    def take_metrics(self) -> Metrics:
        """Return `weight_sync/groups_made`: number of process groups that successful pushes have
        made since the last call. Without a push by broadcast there is no metric."""
        made, self._groups_made = self._groups_made, None
        return Metrics({} if made is None else {"weight_sync/groups_made": Sum(made)})

    def _open_channel(
        self, engines: Workers[InferWorker], ranks: Sequence[int]
    ) -> tuple[Channel, list[int]]:
        """Open the channel of one push from all ranks of the trainer to these engines.

        Args:
            ranks: ranks of the engines.

        Returns:
            The channel, and the index of each engine's first process among the receivers.
        """
        senders = self.actor.call_each(ActorWorker.place)
        places = engines.call_each(InferWorker.places)
        receivers = [place for each in places for place in each]
        names = tuple(
            f"{self.infer.on([rank]).name}.{process}"
            for rank, each in zip(ranks, places, strict=True)
            for process in range(len(each))
        )
        channel = self.actor.call(
            ActorWorker.open_channel,
            self._route(senders, receivers),
            len(senders),
            names,
            timeout_s=SYNC_TIMEOUT_S,
        )
        return channel, list(accumulate(map(len, places[:-1]), initial=0))

    def _give_up(
        self, channel: Channel, reason: str, sending: Pending[Any], loading: Pending[Any]
    ) -> None:
        """End a failed push in the trainer and in all engines. Otherwise a worker that waits for
        one that is gone would wait until its time limit, and answer no other call until then."""
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
        """Note that a replica was restarted, so that it holds none of the trainer's weights."""
        self._served.discard(rank)

    def _route(self, senders: list[Endpoint], receivers: list[Endpoint]) -> Route:
        """Return the configured route: by files if there is a folder, else the cheapest."""
        route = choose_transport(self.platform, senders, receivers)
        if self.config.folder is not None:
            route = Route("files", folder=Path(self.config.folder))
        route = replace(route, kept_groups=self.config.kept_groups)
        if self.config.bucket_mb is None:
            return route
        return replace(route, bucket_bytes=self.config.bucket_mb << 20)
