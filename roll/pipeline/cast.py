"""The cast of an RLVR run: clusters, data, rewards and schedulers, built from the config."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from roll.config.pipelines import RlvrConfig
from roll.config.placement import parse_devices
from roll.config.roles import Role
from roll.config.sampling import SamplingConfig
from roll.core.errors import CheckpointError, WeightSyncError
from roll.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from roll.data.mixing import PromptSampler
from roll.distributed.cluster import Cluster, Launcher, Placement, both
from roll.distributed.colocation import Colocation, Resident
from roll.distributed.worker import Worker
from roll.pipeline.data import RunData, tag_shares
from roll.pipeline.scoring import HostedReward, Scorer
from roll.pipeline.validate import Validator, answer_key
from roll.rollout.engines import Replica
from roll.rollout.filters import drop_equal_rewards
from roll.rollout.routing import Engines, Sticky
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.single_turn import SingleTurn
from roll.weight_sync.plan import choose_transport
from roll.workers.actor import ActorWorker
from roll.workers.infer import InferWorker
from roll.workers.reference import ReferenceWorker
from roll.workers.reward import RewardWorker, reward_worker_class

SYNC_TIMEOUT_S = 600.0
"""For each wait of one side of a weight push on the other."""


@dataclass(frozen=True)
class Cast:
    """Who takes part, and what they work with."""

    actor: Cluster[ActorWorker]
    infer: Cluster[InferWorker]
    reference: Cluster[ReferenceWorker] | None
    scorer: Scorer
    prompts: PromptSampler
    scheduler: GenerateScheduler
    validator: Validator
    colocation: Colocation
    find_prompt: Callable[[str], Prompt]
    tag_shares: Mapping[str, float]
    """Tag -> share of the training prompts."""
    platform: str

    def push_weights(self, version: int, *, verify: bool) -> None:
        """One push from `actor_train` to all engines; returns when they all use it.

        Raises:
            WeightSyncError: an engine refused, died, or holds something else than was sent.
        """
        sender = self.actor.call(ActorWorker.place)
        receivers = [p for places in self.infer.call_each(InferWorker.places) for p in places]
        route = choose_transport(self.platform, sender, receivers)
        channel = self.actor.call(
            ActorWorker.open_channel, route, len(receivers), timeout_s=SYNC_TIMEOUT_S
        )
        loading = self.infer.submit(InferWorker.load_weights, channel, version, verify)
        sending = self.actor.submit(ActorWorker.push_weights, channel, verify)
        sent, _ = both(sending, loading)
        if verify and (sent is None or sent.checksum is None):
            raise WeightSyncError(
                f"weight version {version}: no checksum came back from the sender"
            )

    def memory_gb(self) -> float:
        """Resident memory, GiB, of the worker that has the most, its children included."""
        sizes = [*self.actor.call_each(Worker.memory_gb), *self.infer.call_each(Worker.memory_gb)]
        if self.reference is not None:
            sizes += self.reference.call_each(Worker.memory_gb)
        return max(sizes)


def open_cast(config: RlvrConfig, launcher: Launcher, data: RunData, *, platform: str) -> Cast:
    """Start everybody."""
    tokenizer, dataset, held_out = data.tokenizer, data.train, data.held_out
    scorer = Scorer(_start_rewards(config, launcher))
    infer, actor, reference, colocation = start_models(config, launcher, platform)
    capacity = config.actor_infer.capacity
    engines = Engines([_replica(infer, i, capacity) for i in range(infer.world_size)], Sticky())

    def decode(tokens: object) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def single_turn(sampling: SamplingConfig, samples: int) -> SingleTurn:
        return SingleTurn(
            engines=engines,
            decode=decode,
            score=scorer.score,
            sampling=SamplingParams(**sampling.model_dump()),
            samples_per_prompt=samples,
            seed=config.seed,
            request_timeout_s=config.rollout.request_timeout_s,
        )

    prompts = PromptSampler(dataset, seed=config.seed, shuffle=config.data.shuffle)
    by_id = {prompt.id: prompt for prompt in dataset.prompts}

    def find_prompt(prompt_id: str) -> Prompt:
        if prompt_id not in by_id:
            raise CheckpointError(f"the checkpoint names prompt {prompt_id!r}, the data has none")
        return by_id[prompt_id]

    return Cast(
        actor=actor,
        infer=infer,
        reference=reference,
        scorer=scorer,
        prompts=prompts,
        scheduler=GenerateScheduler(
            prompts=prompts,
            run_group=single_turn(config.sampling, config.data.samples_per_prompt).run,
            filters=[drop_equal_rewards] if config.rollout.drop_equal_rewards else [],
            extra_prompts=config.rollout.extra_prompts,
            max_in_flight=config.rollout.max_in_flight_groups,
            max_prompts_factor=config.rollout.max_prompts_factor,
        ),
        validator=Validator(
            config=config.validation,
            sets={source.name: source.prompts for source in held_out.sources},
            single_turn=single_turn(
                config.validation_sampling, config.validation.samples_per_prompt
            ),
            scorer=scorer,
            extract=partial(answer_key, math_tags=_math_tags(config)),
            max_in_flight=config.rollout.max_in_flight_groups,
        ),
        colocation=colocation,
        find_prompt=find_prompt,
        tag_shares=tag_shares(dataset),
        platform=platform,
    )


def _math_tags(config: RlvrConfig) -> frozenset[str]:
    return frozenset(t for r in config.rewards.values() if r.fn == "math" for t in r.tags)


def _start_rewards(config: RlvrConfig, launcher: Launcher) -> dict[str, HostedReward]:
    hosted = {}
    for name, reward in config.rewards.items():
        place = Placement(
            Role.REWARD,
            pool=reward.pool or config.actor_infer.pool,
            workers=reward.workers,
            seed=config.seed,
            label=name,
        )
        cluster = launcher.start(reward_worker_class(name, reward), place, name, reward)
        cluster.call(RewardWorker.start)
        hosted[name] = HostedReward(reward, cluster)
    return hosted


def start_models(
    config: RlvrConfig, launcher: Launcher, platform: str
) -> tuple[Cluster[InferWorker], Cluster[ActorWorker], Cluster[ReferenceWorker] | None, Colocation]:
    """Start what computes with the model; where they share GPUs, one after the other.

    Engines go first: vLLM wants its share of a GPU that nobody else is on.
    """
    devices = {
        role: frozenset(parse_devices(config.pools[pool]))
        for role, pool in config.role_pools.items()
    }
    colocation = Colocation(enabled=platform == "cuda" and _any_shared(devices))
    infer = _start_infer(config, launcher)
    serving = infer.submit(InferWorker.start)
    if colocation.enabled:
        serving.result(config.cluster.start_timeout_s)
    colocation.add(
        Role.ACTOR_INFER,
        Resident(
            devices[Role.ACTOR_INFER],
            onload=partial(infer.call, InferWorker.wake),
            offload=partial(infer.call, InferWorker.sleep),
            onload_weights=partial(infer.call, InferWorker.wake, weights_only=True),
        ),
    )
    actor = _start_actor(config, launcher)
    colocation.add(
        Role.ACTOR_TRAIN,
        Resident(
            devices[Role.ACTOR_TRAIN],
            onload=partial(actor.call, ActorWorker.onload),
            offload=partial(actor.call, ActorWorker.offload),
        ),
    )
    reference = _start_reference(config, launcher)
    if reference is not None:
        colocation.add(
            Role.REFERENCE,
            Resident(
                devices[Role.REFERENCE],
                onload=partial(reference.call, ReferenceWorker.onload),
                offload=partial(reference.call, ReferenceWorker.offload),
            ),
        )
    serving.result(config.cluster.start_timeout_s)
    return infer, actor, reference, colocation


def _any_shared(devices: Mapping[Role, frozenset[int]]) -> bool:
    return len(frozenset().union(*devices.values())) < sum(map(len, devices.values()))


def _start_infer(config: RlvrConfig, launcher: Launcher) -> Cluster[InferWorker]:
    role = config.actor_infer
    return launcher.start(
        InferWorker,
        Placement(
            Role.ACTOR_INFER,
            pool=role.pool,
            per_worker=role.devices_per_worker,
            seed=config.seed,
        ),
        role,
        config.train_model,
        config.max_sequence_tokens,
    )


def _replica(cluster: Cluster[InferWorker], rank: int, capacity: int) -> Replica:
    def generate(request: GenerateRequest) -> Awaitable[list[Completion]]:
        return cluster.ask(rank, InferWorker.generate, request)

    def abort(request_id: str) -> Awaitable[None]:
        return cluster.ask(rank, InferWorker.abort, request_id)

    return Replica(rank, generate, abort, capacity)


def _start_actor(config: RlvrConfig, launcher: Launcher) -> Cluster[ActorWorker]:
    return launcher.start(
        ActorWorker,
        Placement(Role.ACTOR_TRAIN, pool=config.actor_train.pool, seed=config.seed),
        config.actor_train,
        config.train_model,
        config.algorithm,
        config.sampling.temperature,
        config.max_steps * config.updates_per_step,
    )


def _start_reference(config: RlvrConfig, launcher: Launcher) -> Cluster[ReferenceWorker] | None:
    if config.reference is None:
        return None
    return launcher.start(
        ReferenceWorker,
        Placement(Role.REFERENCE, pool=config.reference.pool, seed=config.seed),
        config.reference,
        config.reference_model,
        config.sampling.temperature,
    )
