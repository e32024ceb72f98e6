"""Start of the clusters that compute with a model, in an order that suits shared devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.config.sections.training import (
    CriticRole,
    LearnerRole,
    ProcessRewardRole,
    ScoreRole,
    TeacherRole,
)
from roll.core.errors import WaitTimeoutError
from roll.core.threads.fair_lock import FairLock
from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.told_wait import told_wait
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.distributed.pending import Pending
from roll.models.vocabulary import num_tokens
from roll.runtime.device_sharing import DeviceSharing
from roll.runtime.inference_service import InferenceService
from roll.runtime.replicas import Replicas, build_fleet, devices_of_replicas
from roll.runtime.reward_router import RewardCluster
from roll.runtime.reward_workers import reward_model_devices, start_reward_models
from roll.runtime.side_engines.judges import Judges, start_judges
from roll.runtime.side_engines.opponents import Opponents, start_opponents
from roll.runtime.side_engines.start import SideEngines, devices_of
from roll.runtime.teachers import Teachers, other_tokens, start_teacher
from roll.runtime.weight_pusher import WeightPusher
from roll.workers.actor import ActorWorker
from roll.workers.estimators.critic import CriticWorker
from roll.workers.estimators.process_reward import ProcessRewardWorker
from roll.workers.infer import InferWorker
from roll.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class Trainers:
    """Clusters that train models, or score the samples of a step for them."""

    actor: Cluster[ActorWorker]
    reference: Cluster[ReferenceWorker] | None
    critic: Cluster[CriticWorker] | None
    process_reward: Cluster[ProcessRewardWorker] | None
    teachers: Teachers
    colocation: Colocation


@dataclass(frozen=True)
class ModelClusters:
    """Clusters of a run that compute with a model."""

    inference: InferenceService
    judges: Judges
    opponents: Opponents
    reward_models: dict[str, RewardCluster]
    """Name of the reward -> its reward model."""
    trainers: Trainers | None
    """None if nothing is trained: the engines keep the weights of their files."""
    colocation: Colocation


def start_model_clusters(
    config: RlvrBase,
    launcher: Launcher,
    loop: LoopThread,
    platform: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trains: bool = True,
) -> ModelClusters:
    """Start every cluster that computes with a model; one after another where they share GPUs.

    The engines start first, because vLLM needs a GPU without other users when it takes its share of
    the memory; where roles do not take turns, they stay there beside the others. All generation
    will run on `loop`; `platform` is `cpu` or `cuda`; if not `trains`, nothing is started that
    trains.
    """
    # On CPUs memory is not scarce. Roles still take turns if generation runs ahead of training:
    # engines that generate during training would slow it down.
    taking_turns = platform == "cuda" or config.rollout.max_staleness > 0
    played = config.opponents if isinstance(config, AgenticBase) else {}
    searched = config.corpora.values() if isinstance(config, AgenticBase) else ()
    engines = [*config.cluster_judges.values(), *played.values()]
    beside = devices_of(config, [one.pool for one in (*engines, *searched)])
    guests = reward_model_devices(config) | beside
    sharing = DeviceSharing(config, taking_turns=taking_turns, guests=guests)
    colocation = sharing.colocation
    replicas, loading = _start_engines(config, launcher, loop, colocation)
    stays = platform == "cuda" and colocation.beside
    if stays or guests & sharing.devices[Role.ACTOR_INFER]:
        wait_for_engines(loading, config.cluster.start_timeout_s)
    reward_models = start_reward_models(config, launcher, colocation)
    lock, side = FairLock(), SideEngines(config, launcher, loop, colocation)
    judges = start_judges(side, lock)
    others = start_opponents(played, side)
    trainers = start_trainers(config, launcher, tokenizer, sharing) if trains else None
    pusher = None
    if trainers is not None:
        pusher = WeightPusher(trainers.actor, replicas.infer, platform, config.weight_sync)
    models = ModelClusters(
        inference=InferenceService(replicas, colocation, pusher, trainer_lock=lock),
        judges=Judges(judges),
        opponents=Opponents.of(played, others, pusher, trainer_lock=lock, colocation=colocation),
        reward_models=reward_models,
        trainers=trainers,
        colocation=colocation,
    )
    wait_for_engines(loading, config.cluster.start_timeout_s)
    models.inference.start()
    return models


def start_trainers(
    config: RlvrBase,
    launcher: Launcher,
    tokenizer: PreTrainedTokenizerBase,
    sharing: DeviceSharing,
) -> Trainers:
    """Start the clusters that train or score; one after another where they share GPUs."""
    share, reference, critic = sharing.share, config.reference_role, config.critic
    process_reward = config.process_reward
    actor = share(Role.ACTOR_TRAIN, _start_actor(config, launcher, tokenizer))
    return Trainers(
        actor=actor,
        reference=(
            share(Role.REFERENCE, _start_reference(config, reference, launcher))
            if reference
            else None
        ),
        critic=share(Role.CRITIC, _start_critic(config, critic, launcher)) if critic else None,
        process_reward=(
            share(Role.PROCESS_REWARD, _start_process_reward(config, process_reward, launcher))
            if process_reward
            else None
        ),
        teachers=_start_teachers(config, launcher, tokenizer, sharing, actor),
        colocation=sharing.colocation,
    )


def _start_engines(
    config: RlvrBase, launcher: Launcher, loop: LoopThread, colocation: Colocation
) -> tuple[Replicas, Pending[None]]:
    """Start the engines; return their replicas, and a result to wait for until they have loaded.
    Where roles take turns on devices, wait here, and move the engines off their devices."""
    infer = _start_infer(config, launcher)
    replicas = Replicas(infer, loop, build_fleet(config, infer), config.rollout.health)
    loading = infer.submit(InferWorker.start)
    if colocation.enabled:
        wait_for_engines(loading, config.cluster.start_timeout_s)
    role = config.actor_infer
    devices = devices_of_replicas(config.pools[role.pool], role.devices_per_worker)
    colocation.add(Role.ACTOR_INFER, *replicas.residents(devices))
    return replicas, loading


def wait_for_engines(loading: Pending[None], limit_s: float) -> None:
    """Wait until all engines have started.

    Args:
        loading: pending result of `InferWorker.start` on all ranks.
        limit_s: time limit in seconds.

    Raises:
        WaitTimeoutError: an engine that is alive did not start in time; the message lists possible
            reasons.
        WorkerError: an engine failed or died.
    """
    try:
        with told_wait("the engines of actor_infer to load their model"):
            loading.result(limit_s)
    except WaitTimeoutError as error:
        raise WaitTimeoutError(
            f"{error}. The model's files were on the driver's machine before this wait began: the "
            "engine reads weights, compiles kernels or captures graphs, or it hangs. If its log "
            "goes on, raise cluster.start_timeout_s, or set actor_infer.strategy.enforce_eager"
        ) from error


def _start_infer(config: RlvrBase, launcher: Launcher) -> Cluster[InferWorker]:
    """Start the replaceable workers of `actor_infer`; another call starts their engines."""
    role = config.actor_infer
    return launcher.start(
        InferWorker,
        Placement(
            Role.ACTOR_INFER,
            pool=role.pool,
            per_worker=role.devices_per_worker,
            seed=config.seed,
            replaceable=True,
            env=role.env,
        ),
        role,
        config.train_model,
        config.max_sequence_tokens,
    )


def _start_actor(
    config: RlvrBase, launcher: Launcher, tokenizer: PreTrainedTokenizerBase
) -> Cluster[ActorWorker]:
    """Start the cluster that trains the policy."""
    return launcher.start(
        ActorWorker,
        _placed(Role.ACTOR_TRAIN, config.actor_train, config),
        config.actor_train,
        config.train_model,
        config.algorithm,
        config.sampling.temperature,
        config.total_updates(),
        num_tokens(tokenizer),
        config.follow is not None,
    )


def _start_reference(
    config: RlvrBase, role: ScoreRole, launcher: Launcher
) -> Cluster[ReferenceWorker]:
    """Start the frozen cluster that computes the reference's log-probs, at the temperature of
    sampling."""
    return launcher.start(
        ReferenceWorker,
        _placed(Role.REFERENCE, role, config),
        role,
        config.reference_model,
        config.sampling.temperature,
    )


def _start_critic(config: RlvrBase, role: CriticRole, launcher: Launcher) -> Cluster[CriticWorker]:
    """Start the cluster that trains the critic."""
    return launcher.start(
        CriticWorker,
        _placed(Role.CRITIC, role, config),
        role,
        config.critic_model,
        config.total_updates(Role.CRITIC),
    )


def _start_process_reward(
    config: RlvrBase, role: ProcessRewardRole, launcher: Launcher
) -> Cluster[ProcessRewardWorker]:
    """Start the cluster that learns rewards of tokens, at the temperature of sampling."""
    return launcher.start(
        ProcessRewardWorker,
        _placed(Role.PROCESS_REWARD, role, config),
        role,
        config.process_reward_model,
        config.sampling.temperature,
        config.total_updates(Role.PROCESS_REWARD),
    )


def _start_teachers(
    config: RlvrBase,
    launcher: Launcher,
    tokenizer: PreTrainedTokenizerBase,
    sharing: DeviceSharing,
    actor: Cluster[ActorWorker],
) -> Teachers:
    """Start all teachers. If they send hidden states, the workers of `actor` get the output heads,
    which turn these into logits."""
    target = config.algorithm.distill_target
    others = other_tokens(config.teachers, target, tokenizer, config.data)
    clusters: dict[str, Cluster[Any]] = {}
    for name, role in config.teachers.items():
        own = others[name].teacher if name in others else tokenizer
        started = _start_teacher(config, name, role, launcher, own)
        clusters[name] = sharing.share(f"teachers.{name}", started)
    teachers = Teachers(config.teachers, clusters, sharing.colocation, others)
    if target is not None and target.top_k is None:
        teachers.introduce(actor)
    return teachers


def _start_teacher(
    config: RlvrBase,
    name: str,
    role: TeacherRole,
    launcher: Launcher,
    tokenizer: PreTrainedTokenizerBase,
) -> Cluster[Any]:
    """Start one teacher, `tokenizer` its own: of whole distributions if the algorithm has a
    `distill_target`, else of the tokens' log-probs."""
    target = config.algorithm.distill_target
    if target is not None:
        return start_teacher(
            name, role, launcher, target=target, tokenizer=tokenizer, seed=config.seed
        )
    return launcher.start(
        ReferenceWorker,
        _placed(Role.TEACHER, role, config, label=name),
        role,
        role.model,
        config.sampling.temperature,
    )


def _placed(
    role: Role, settings: LearnerRole | ScoreRole, config: RlvrBase, label: str = ""
) -> Placement:
    """Return the placement of a role with one worker per device."""
    return Placement(role, pool=settings.pool, seed=config.seed, label=label, env=settings.env)
