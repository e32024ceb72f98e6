"""`ActorWorker`: trains the policy and sends its weights to the engines."""

from __future__ import annotations

from dataclasses import replace

from roll.algorithms.build import build_loss
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.mismatch import mismatch_metrics
from roll.algorithms.teacher_divergence import comparison
from roll.algorithms.update_metrics import advantage_metrics
from roll.config.algorithm import AlgorithmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import (
    PolicyColumns,
    RolloutBatch,
    ScoredSamples,
    TokenBatch,
    TokenColumn,
)
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import BROADCAST, SHARD_BATCH, dispatch
from roll.rollout.dense import dense
from roll.strategy.build import build_train
from roll.strategy.interfaces import KeepsReference
from roll.strategy.training.heads import PolicyHead
from roll.weight_sync.abort import PushAborts
from roll.weight_sync.channel import Channel
from roll.weight_sync.push_plan import unsent_frozen_tensors
from roll.weight_sync.transfer import SendReport, send
from roll.weight_sync.transport_choice import Endpoint, Route, new_channel
from roll.weight_sync.transports.kept_groups import KEPT
from roll.workers.model import TrainWorker
from roll.workers.samples import score_samples
from roll.workers.work import WorkMeter


class ActorWorker(TrainWorker[PolicyTerms]):
    """A worker of `actor_train`: one rank of the policy's training.

    Args:
        temperature: sampling temperature; logits are divided by it.
        total_updates: number of optimizer steps in the run, for the learning rate schedule.
        num_tokens: size of the vocabulary that policy and teachers share, in tokens; used only if
            the policy learns from a teacher.
        keeps_reference: True to keep a copy of the policy that follows it, as the reference.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        role: TrainRole,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_updates: int,
        num_tokens: int,
        keeps_reference: bool,
    ) -> None:
        target = algorithm.distill_target
        compared = None if target is None else comparison(target, num_tokens)
        head = PolicyHead(temperature, role.logprob_chunk_tokens, compared)
        strategy = build_train(
            role,
            model,
            spec,
            head,
            total_steps=total_updates,
            keeps_reference=keeps_reference,
        )
        super().__init__(spec, strategy, WorkMeter(model, trains=True))
        self.loss = build_loss(algorithm)
        self.pushes_adapter = model.serves_adapter
        self.aborts = PushAborts()

    @dispatch(SHARD_BATCH)
    def logprobs(self, batch: TokenBatch, squares: bool = False) -> PolicyColumns:
        """Return the log-probability of each token under the policy. The driver calls this before
        the first update of a step.

        Args:
            squares: also return the sum of the squared probabilities at each token.
        """
        terms = self.score(batch, squares=squares)
        return PolicyColumns(
            lengths=batch.lengths, values=terms.logprobs_BT, squares=terms.squares_BT
        )

    @dispatch(SHARD_BATCH)
    def base_logprobs(self, batch: TokenBatch) -> TokenColumn:
        """Return the log-probability of each token under a reference that is part of the policy's
        model: its base, of a policy with a LoRA adapter, or a copy that follows the policy."""
        scored = self.score_base(batch)
        return TokenColumn(lengths=batch.lengths, values=scored.logprobs_BT)

    @dispatch(SHARD_BATCH)
    def score_samples(self, table: SampleTable) -> ScoredSamples:
        """Compute the log-probability of each token under the policy, and leave it in the object
        store of this node. Return an address for each row, and metrics that compare the
        log-probabilities with those of the engine. See `logprobs`."""
        return score_samples(
            table,
            lambda batch: self.score(batch).logprobs_BT,
            measure=mismatch_metrics,
            keeps=self.rank_info.is_dp_leader,
        )

    @dispatch(SHARD_BATCH)
    def score_samples_base(self, table: SampleTable) -> ScoredSamples:
        """Compute the log-probability of each token under the reference, and leave it in the object
        store of this node. Return an address for each row, without metrics. See
        `base_logprobs`."""
        return score_samples(
            table,
            lambda batch: self.score_base(batch).logprobs_BT,
            keeps=self.rank_info.is_dp_leader,
        )

    @dispatch(SHARD_BATCH)
    def train(self, batch: RolloutBatch | SampleTable, progress: float) -> Metrics:
        """Do one optimizer step on the rows of all ranks; return the metrics. The errors are those
        of `TrainStrategy.train`.

        Args:
            progress: part of the run that is done, on which factors of the loss can depend.
        """
        batch = dense(batch) if isinstance(batch, SampleTable) else batch
        seen = advantage_metrics(batch, ranks=self.rank_info.dp_size)
        return seen | self.update(self.taught(batch), self.loss.at(progress))

    @dispatch(BROADCAST)
    def move_reference(self, decay: float) -> None:
        """Move the copy that is the reference towards the policy; see `KeepsReference`."""
        assert isinstance(self.strategy, KeepsReference)
        self.strategy.move_reference(decay)

    @dispatch(BROADCAST)
    def place(self) -> Endpoint:
        """Return node, device and host of this rank, which is a sender of a weight push."""
        return Endpoint(self.spec.node, self.spec.devices[0], self.spec.host)

    @dispatch(BROADCAST)
    def open_channel(
        self, route: Route, num_senders: int, receivers: tuple[str, ...], timeout_s: float
    ) -> Channel:
        """Open a channel for one weight push. Every rank opens one, but only that of rank 0, the
        leading sender, is returned and used.

        Args:
            receivers: place of each receiver in the run.
            timeout_s: time limit of each wait for another process of the push, in seconds.

        Raises:
            ConfigError: the route is through files, but has no folder.
        """
        channel = new_channel(
            route.kind,
            num_receivers=len(receivers),
            num_senders=num_senders,
            bucket_bytes=route.bucket_bytes,
            timeout_s=timeout_s,
            host=self.spec.host,
            collective=route.collective,
            folder=route.folder,
        )
        return replace(channel, receivers=receivers, kept_groups=route.kept_groups)

    @dispatch(BROADCAST)
    def push_weights(self, channel: Channel, everything: bool, verify: bool) -> SendReport:
        """Send this rank's part of the weights to the engines. Send only the adapter if the engines
        serve the adapter separately. The caller gets the report of rank 0, the leading sender.

        Args:
            everything: also send tensors that never change; if False, the receivers must have these
                tensors already.
            verify: also send a checksum, with which the receivers check the weights.

        Raises:
            WeightSyncError: see `roll.weight_sync.transfer.send`.
        """
        adapter = self.pushes_adapter
        manifest = self.strategy.weight_manifest(adapter=adapter)
        parts = self.strategy.export_parts(adapter=adapter)
        if not everything and not adapter:
            away = unsent_frozen_tensors(manifest, self.strategy.frozen_weights())
            manifest = manifest.without(away)
            parts = ((name, part) for name, part in parts if name not in away)
        abort = self.aborts.of(channel)
        return send(channel, parts, manifest, verify=verify, sender=self.spec.rank, abort=abort)

    @dispatch(BROADCAST)
    def give_up_push(self, channel: Channel, reason: str) -> None:
        """End the `push_weights` call on this channel, at once or as soon as it begins. The driver
        calls this method through `Cluster.beside`, while `push_weights` runs.

        Args:
            reason: text for the error that `push_weights` raises.
        """
        self.aborts.of(channel).give_up(reason)

    def close(self) -> None:
        KEPT.close()  # before the strategy's: engines end after the trainer, and wait for nothing
        super().close()
