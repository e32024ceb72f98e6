"""The cast of an RLVR run: clusters, data, rewards and schedulers, built from the config."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from roll.config.pipelines import RlvrConfig
from roll.config.placement import parse_devices
from roll.config.roles import Role
from roll.config.sampling import SamplingConfig
from roll.core.errors import CheckpointError, DataError, WeightSyncError
from roll.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from roll.data.datasets import PromptDataset
from roll.data.mixing import PromptSampler
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation, Resident
from roll.distributed.worker import Worker
from roll.models.load import load_tokenizer
from roll.pipeline.scoring import HostedReward, Scorer
from roll.pipeline.validate import Validator
from roll.rewards.answers import find_answer
from roll.rollout.engines import Replica
from roll.rollout.filters import drop_equal_rewards
from roll.rollout.routing import Engines, Sticky
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.single_turn import SingleTurn
from roll.weight_sync.plan import choose_transport, new_channel
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
    platform: str

    def push_weights(self, version: int, *, verify: bool) -> None:
        """One push from `actor_train` to all engines; returns when they all use it.

        Raises:
            WeightSyncError: an engine refused, died, or holds something else than was sent.
        """
        sender = self.actor.call(ActorWorker.place)
        receivers = [p for places in self.infer.call_each(InferWorker.places) for p in places]
        kind = choose_transport(self.platform, sender, receivers)
        channel = new_channel(
            kind,
            num_receivers=len(receivers),
            timeout_s=SYNC_TIMEOUT_S,
            host=sender.host,
            collective="nccl" if self.platform == "cuda" else "gloo",
        )
        loading = self.infer.submit(InferWorker.load_weights, channel, version, verify)
        sent = self.actor.call(ActorWorker.push_weights, channel, verify)
        loading.result()
        if verify and (sent is None or sent.checksum is None):
            raise WeightSyncError(f"weight version {version}: no checksum came back from the sender")

    def memory_gb(self) -> float:
        """Resident memory, GiB, of the worker that has the most, its children included."""
        sizes = [*self.actor.call_each(Worker.memory_gb), *self.infer.call_each(Worker.memory_gb)]
        if self.reference is not None:
            sizes += self.reference.call_each(Worker.memory_gb)
        return max(sizes)


def open_cast(config: RlvrConfig, launcher: Launcher, *, platform: str) -> Cast:
    """Load the data, then start everybody; data errors come before anything expensive."""
    tokenizer = load_tokenizer(config.train_model)
    dataset = PromptDataset.load(config.data.sources, config.data, tokenizer)
    held_out = PromptDataset.load(config.validation.sets, config.data, tokenizer)
    _check_tags(config, dataset, held_out)
    scorer = Scorer(_start_rewards(config, launcher))
    infer = _start_infer(config, launcher)
    serving = infer.submit(InferWorker.start)  # engines load while the trainer does
    actor = _start_actor(config, launcher)
    reference = _start_reference(config, launcher)
    serving.result(config.cluster.start_timeout_s)
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
            extract=_answer_key,
            max_in_flight=config.rollout.max_in_flight_groups,
        ),
        colocation=_colocation(config, platform, actor, infer, reference),
        find_prompt=find_prompt,
        platform=platform,
    )


def _answer_key(response: str) -> str | None:
    """What the majority vote compares: the final answer, or the whole text where there is none."""
    return find_answer(response).text or response.strip() or None


def _check_tags(config: RlvrConfig, *datasets: PromptDataset) -> None:
    """Tags that come from a column are known only now."""
    rewarded = {tag for reward in config.rewards.values() for tag in reward.tags}
    for dataset in datasets:
        for source in dataset.sources:
            for prompt in source.prompts:
                if prompt.tag not in rewarded:
                    raise DataError(
                        f"prompt {prompt.id} has the tag {prompt.tag!r}, which no reward takes "
                        f"(tags with a reward: {', '.join(sorted(rewarded))})"
                    )


def _start_rewards(config: RlvrConfig, launcher: Launcher) -> dict[str, HostedReward]:
    hosted = {}
    for name, reward in config.rewards.items():
        place = Placement(
            Role.REWARD,
            pool=reward.pool or config.actor_infer.pool,
            workers=reward.workers,
            seed=config.seed,
        )
        cluster = launcher.start(reward_worker_class(name, reward), place, name, reward)
        cluster.call(RewardWorker.start)
        hosted[name] = HostedReward(reward, cluster)
    return hosted


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


def _colocation(
    config: RlvrConfig,
    platform: str,
    actor: Cluster[ActorWorker],
    infer: Cluster[InferWorker],
    reference: Cluster[ReferenceWorker] | None,
) -> Colocation:
    """Devices change hands only where roles share GPUs; on CPUs everybody fits."""

    def devices(role: Role) -> frozenset[int]:
        return frozenset(parse_devices(config.pools[config.role_pools[role]]))

    residents = {
        Role.ACTOR_TRAIN: Resident(
            devices(Role.ACTOR_TRAIN),
            partial(actor.call, ActorWorker.onload),
            partial(actor.call, ActorWorker.offload),
        ),
        Role.ACTOR_INFER: Resident(
            devices(Role.ACTOR_INFER),
            partial(infer.call, InferWorker.wake),
            partial(infer.call, InferWorker.sleep),
        ),
    }
    if reference is not None:
        residents[Role.REFERENCE] = Resident(
            devices(Role.REFERENCE),
            partial(reference.call, ReferenceWorker.onload),
            partial(reference.call, ReferenceWorker.offload),
        )
    return Colocation(residents, enabled=platform == "cuda")
