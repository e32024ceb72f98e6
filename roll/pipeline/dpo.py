"""Direct preference optimization: make good responses more likely than bad ones.

A row is a pair of responses to one prompt; for KTO it is a single response with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from roll.algorithms.losses.preferences import LabelledLoss, PairedLoss
from roll.config.algorithm import Aggregation
from roll.config.algorithm.preferences import KtoConfig
from roll.config.offline import DpoConfig
from roll.config.sections.roles import Role
from roll.core.batches import LabelledBatch, PreferenceBatch
from roll.data.collate import labelled_batch, mismatched, pair_batch
from roll.data.examples import Example
from roll.distributed.cluster import Cluster, Placement
from roll.output_dir.checkpoints import RunState
from roll.pipeline.offline import OfflinePipeline, filled
from roll.pipeline.outputs.reference_sums import KeptSums
from roll.strategy.training.heads import PolicyHead
from roll.workers.learner import PreferenceWorker
from roll.workers.reference import ReferenceWorker

Preferences = PreferenceBatch | LabelledBatch
P = TypeVar("P", PreferenceBatch, LabelledBatch)


class DpoPipeline(OfflinePipeline[DpoConfig, Preferences, PreferenceWorker]):
    """Pipeline that minimises a preference loss. Most of these losses depend on the log ratio
    between policy and reference of each response; some need no reference."""

    config_class = DpoConfig

    aggregation = Aggregation.SEQUENCE_MEAN
    reference: Cluster[ReferenceWorker] | None = None

    def open(self) -> None:
        """Start the cluster that learns and, if there is one, the reference."""
        config, loss = self.config, self.config.loss
        head = PolicyHead(1.0, config.actor_train.logprob_chunk_tokens)
        made = LabelledLoss(loss) if isinstance(loss, KtoConfig) else PairedLoss(loss)
        self.start_learner(PreferenceWorker, head, made)
        # By ids, so that neither tokens nor pictures of a row stay in memory with its sums.
        self.known_sums: dict[str, list[float]] = {}
        scorer = (config.reference and config.reference.model) or config.train_model
        # The rows of training cannot change: `rows` would refuse the checkpoint.
        made_of = f"{scorer.model_dump_json()} {self.data.held_out.fingerprint}"
        self.kept_sums = KeptSums(made_of)
        if (role := config.reference) is not None:
            reference = self.launcher.start(
                ReferenceWorker,
                Placement(Role.REFERENCE, pool=role.pool, seed=config.seed, env=role.env),
                role,
                role.model or config.train_model,
                1.0,
            )
            self.reference = self.sharing.share(Role.REFERENCE, reference)

    def make_batch(self, examples: Sequence[Example]) -> Preferences:
        """Return the rows with `ref_sums` if the loss needs them, and for KTO with `divergence`.

        The reference computes the sums, unless they were kept; the divergence takes a pass of the
        reference and one of the policy.
        """
        if isinstance(self.config.loss, KtoConfig):
            batch = self.add_reference(labelled_batch(examples), examples)
            return replace(batch, divergence=self.divergence(examples).expand(len(batch)))
        return self.add_reference(pair_batch(examples), examples)

    def add_reference(self, batch: P, examples: Sequence[Example]) -> P:
        """Add `ref_sums`, the summed log-probs of each response under the reference, if the loss
        needs them. With `reference_logprobs: once`, the sums are kept and used again."""
        if not self.config.loss.needs_reference:
            return batch
        known = self.known_sums
        if all(each.id in known for each in examples):
            return replace(batch, ref_sums=torch.tensor([x for e in examples for x in known[e.id]]))
        batch = self.score_reference(batch)
        if self.config.reference_logprobs == "once":
            sums = iter(batch.require("ref_sums", made_by="score_reference").tolist())
            known.update({e.id: [next(sums) for _ in e.sequences] for e in examples})
        return batch

    def save(self, folder: Path) -> None:
        """See `Pipeline.save`; with `reference_logprobs: once`, the sums that are known go along. A
        resumed run would compute them beside other rows, and not to the bit."""
        if self.known_sums:
            self.kept_sums.write(folder, self.known_sums)
        super().save(folder)

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """See `OfflinePipeline.restore`."""
        super().restore(checkpoint, state)
        if checkpoint is not None and self.config.reference_logprobs == "once":
            self.known_sums = self.kept_sums.read(checkpoint)

    def score_reference(self, batch: P) -> P:
        """Return the batch with the sums of reference log-probs; without a reference role, the
        adapter's base computes them."""
        role = Role.REFERENCE if self.reference else Role.ACTOR_TRAIN
        with self.sharing.colocation.use(role), self.timers.timed("logprob"):
            if self.reference is not None:
                rows = filled(batch, self.reference.dp_size).trained_inputs()
                scored = self.reference.call(ReferenceWorker.response_sums, rows)
            else:  # an adapter's base is its reference
                rows = filled(batch, self.learner.dp_size).trained_inputs()
                scored = self.learner.call(PreferenceWorker.base_sums, rows)
        return replace(batch, ref_sums=scored.values[: len(batch)])

    def divergence(self, examples: Sequence[Example]) -> torch.Tensor:
        """Estimate the divergence of the policy from the reference (KTO, arXiv 2402.01306).

        The estimate is the mean log ratio of policy and reference on responses to other prompts,
        but at least 0; a float scalar through which no gradient flows. It is 0 for a single row
        (a validation set of one), which has no other: its own would make its loss 1/2 for ever.
        """
        if len(examples) < 2:
            return torch.zeros(())
        rows = self.score_reference(
            labelled_batch(mismatched(examples, self.config.data.max_tokens))
        )
        with self.sharing.colocation.use(Role.ACTOR_TRAIN), self.timers.timed("logprob"):
            scored = self.learner.call(
                PreferenceWorker.log_ratios, filled(rows, self.learner.dp_size)
            )
        return scored.values[: len(rows)].mean().clamp(min=0)
