"""What models other than the one that wrote them think of a step's samples; without gradients."""

from __future__ import annotations

from dataclasses import replace

from roll.config.algorithm import Need
from roll.config.rlvr import RlvrConfig
from roll.config.sections.roles import Role
from roll.core.batches import RolloutBatch
from roll.distributed.cluster import Cluster
from roll.distributed.colocation import Colocation
from roll.runtime.runtime import Runtime
from roll.runtime.teachers import Teachers
from roll.workers.actor import ActorWorker
from roll.workers.critic import CriticWorker
from roll.workers.reference import ReferenceWorker


def add_logprobs(batch: RolloutBatch, config: RlvrConfig, runtime: Runtime) -> RolloutBatch:
    """The reference's and, where updates need them, the policy's own before the first."""
    if runtime.reference is not None:
        with runtime.colocation.use(Role.REFERENCE):
            scored = runtime.reference.call(ReferenceWorker.add_ref_logprobs, batch)
        batch = replace(batch, ref_logprobs=scored.ref_logprobs)
    elif Need.REFERENCE in config.algorithm.needs:  # of an adapter: its base
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            scored = runtime.actor.call(ActorWorker.add_base_logprobs, batch)
        batch = replace(batch, ref_logprobs=scored.ref_logprobs)
    if config.scores_old_logprobs:
        with runtime.colocation.use(Role.ACTOR_TRAIN):
            scored = runtime.actor.call(ActorWorker.add_old_logprobs, batch)
        batch = replace(batch, old_logprobs=scored.old_logprobs)
    return batch


def add_values(
    batch: RolloutBatch, critic: Cluster[CriticWorker], colocation: Colocation
) -> RolloutBatch:
    """What the critic expected of each token's state."""
    with colocation.use(Role.CRITIC):
        scored = critic.call(CriticWorker.add_values, replace(batch, teacher_outputs=None))
    return replace(batch, values=scored.values)


def add_teacher_outputs(batch: RolloutBatch, config: RlvrConfig, runtime: Runtime) -> RolloutBatch:
    """What the teacher of each row's tag, where there are some, expects of its tokens: log-probs of
    those that were written, or whole distributions, which never pass through here."""
    if not config.teachers:
        return batch
    teachers = Teachers(config.teachers, runtime.teachers, runtime.colocation)
    if config.algorithm.distill_target is None:
        return replace(batch, teacher_logprobs=teachers.logprobs(batch, batch.tags))
    return replace(batch, teacher_outputs=teachers.outputs(batch, batch.tags))
