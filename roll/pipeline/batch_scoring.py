"""Forward passes without gradients over the samples of a step: log-probs, values, implicit rewards,
teacher outputs.

Each function returns the batch with further fields, and leaves the given batch as it is.
"""

from __future__ import annotations

from dataclasses import replace

from roll.algorithms.implicit.rewards import implicit_rewards
from roll.config.algorithm import Need
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.distributed.cluster import Cluster
from roll.distributed.colocation import Colocation
from roll.runtime.runtime import Runtime
from roll.workers.actor import ActorWorker
from roll.workers.estimators.critic import CriticWorker
from roll.workers.estimators.process_reward import ProcessRewardWorker
from roll.workers.reference import ReferenceWorker


def add_logprobs(batch: RolloutBatch, config: RlvrBase, runtime: Runtime) -> RolloutBatch:
    """Add `ref_logprobs` if there is a reference, and `old_logprobs` if the updates need them.

    `old_logprobs` are those of the policy before the first update of the step; `squared_probs` come
    with them if the algorithm needs them. For a policy with an adapter, the reference may be the
    model without the adapter; or it is a copy in the policy's workers.
    """
    if runtime.reference is not None:
        with runtime.colocation.use(Role.REFERENCE):
            scored = runtime.reference.call(ReferenceWorker.logprobs, batch.inputs())
        batch = replace(batch, ref_logprobs=scored.aligned(batch))
    elif Need.REFERENCE in config.needs:  # it is with the policy
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            scored = runtime.actor.call(ActorWorker.base_logprobs, batch.inputs())
        batch = replace(batch, ref_logprobs=scored.aligned(batch))
    if config.scores_old_logprobs:
        squares = Need.SQUARED_PROBS in config.needs
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            found = runtime.actor.call(ActorWorker.logprobs, batch.inputs(), squares)
        batch = replace(
            batch, old_logprobs=found.aligned(batch), squared_probs=found.aligned_squares(batch)
        )
    return batch


def add_sample_logprobs(
    table: SampleTable, config: RlvrBase, runtime: Runtime
) -> tuple[SampleTable, Metrics]:
    """Do what `add_logprobs` does to samples whose tokens the driver does not have; return the
    table and the metrics of the policy's log-probs."""
    metrics, inputs = Metrics(), table.inputs()
    if runtime.reference is not None:
        with runtime.colocation.use(Role.REFERENCE):
            scored = runtime.reference.call(ReferenceWorker.score_samples, inputs)
        table = replace(table, ref_logprobs=scored.logprobs)
    elif Need.REFERENCE in config.needs:
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            scored = runtime.actor.call(ActorWorker.score_samples_base, inputs)
        table = replace(table, ref_logprobs=scored.logprobs)
    if config.scores_old_logprobs:
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            scored = runtime.actor.call(ActorWorker.score_samples, inputs)
        table, metrics = replace(table, old_logprobs=scored.logprobs), scored.metrics
    return table, metrics


def add_values(
    batch: RolloutBatch, critic: Cluster[CriticWorker], colocation: Colocation
) -> RolloutBatch:
    """Add `values`: the critic's value of the state of each token."""
    with colocation.use(Role.CRITIC):
        scored = critic.call(CriticWorker.values, batch.inputs())
    return replace(batch, values=scored.aligned(batch))


def add_implicit_rewards(
    batch: RolloutBatch,
    process_reward: Cluster[ProcessRewardWorker],
    colocation: Colocation,
    *,
    beta: float,
) -> RolloutBatch:
    """Add `implicit_rewards`: beta * (log-prob under `process_reward` - `ref_logprobs`) of each
    token; ValueError without `ref_logprobs`."""
    ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
    with colocation.use(Role.PROCESS_REWARD):
        scored = process_reward.call(ProcessRewardWorker.logprobs, batch.inputs())
    rewards_BT = implicit_rewards(scored.aligned(batch), ref_BT, batch.loss_mask, beta=beta)
    return replace(batch, implicit_rewards=rewards_BT)


def add_teacher_outputs(batch: RolloutBatch, config: RlvrBase, runtime: Runtime) -> RolloutBatch:
    """Add what the teacher of each row's tag computes, if the run has teachers.

    If the algorithm learns from whole distributions, these are `teacher_outputs`: only addresses of
    values that stay in the object stores of the workers' nodes. Otherwise these are
    `teacher_logprobs`, the log-probs of the response tokens.
    """
    if not config.teachers:
        return batch
    if config.algorithm.distill_target is None:
        return replace(batch, teacher_logprobs=runtime.teachers.logprobs(batch, batch.tags))
    return replace(batch, teacher_outputs=runtime.teachers.outputs(batch, batch.tags))
