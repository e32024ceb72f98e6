"""The cast of an RLVR run: clusters, data, rewards and schedulers, built from the config."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config.algorithm import Need
from roll.config.pipelines import RlvrConfig
from roll.config.roles import Role
from roll.config.sampling import SamplingConfig
from roll.core.errors import CheckpointError, WeightSyncError
from roll.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from roll.data.mixing import PromptSampler
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.distributed.pending import both
from roll.distributed.worker import Worker
from roll.pipeline.data import RunData, tag_shares
from roll.pipeline.models import start_models
from roll.pipeline.scoring import HostedReward, Scorer
from roll.pipeline.validate import Validator, answer_key
from roll.rollout.engines import Replica
from roll.rollout.filters import build_filters
from roll.rollout.routing import Engines, Sticky
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.single_turn import SingleTurn
from roll.weight_sync.plan import choose_transport
from roll.workers.actor import ActorWorker
from roll.workers.critic import CriticWorker
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
    critic: Cluster[CriticWorker] | None
    teachers: Mapping[str, Cluster[ReferenceWorker]]
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
        clusters: list[Cluster[Any] | None] = [self.actor, self.infer, self.reference, self.critic]
        clusters.extend(self.teachers.values())
        return max(
            size
            for cluster in clusters
            if cluster is not None
            for size in cluster.call_each(Worker.memory_gb)
        )


def open_cast(config: RlvrConfig, launcher: Launcher, data: RunData, *, platform: str) -> Cast:
    """Start everybody."""
    filters = build_filters(config.rollout.filters)  # first: the user may have to mend one
    tokenizer, dataset, held_out = data.tokenizer, data.train, data.held_out
    scorer = Scorer(_start_rewards(config, launcher))
    models = start_models(config, launcher, platform)
    infer = models.infer
    capacity = config.actor_infer.capacity
    engines = Engines([_replica(infer, i, capacity) for i in range(infer.world_size)], Sticky())

    def single_turn(
        sampling: SamplingConfig, samples: int, *, greedy_baseline: bool = False
    ) -> SingleTurn:
        return SingleTurn(
            engines=engines,
            decode=partial(_decode, tokenizer),
            score=scorer.score,
            sampling=SamplingParams(**sampling.model_dump()),
            samples_per_prompt=samples,
            seed=config.seed,
            request_timeout_s=config.rollout.request_timeout_s,
            greedy_baseline=greedy_baseline,
        )

    prompts = PromptSampler(dataset, seed=config.seed, shuffle=config.data.shuffle)
    return Cast(
        actor=models.actor,
        infer=infer,
        reference=models.reference,
        critic=models.critic,
        teachers=models.teachers,
        scorer=scorer,
        prompts=prompts,
        scheduler=GenerateScheduler(
            prompts=prompts,
            run_group=single_turn(
                config.sampling,
                config.data.samples_per_prompt,
                greedy_baseline=Need.GREEDY_BASELINE in config.algorithm.needs,
            ).run,
            filters=filters,
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
        colocation=models.colocation,
        find_prompt=partial(_find_prompt, {prompt.id: prompt for prompt in dataset.prompts}),
        tag_shares=tag_shares(dataset),
        platform=platform,
    )


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _find_prompt(by_id: Mapping[str, Prompt], prompt_id: str) -> Prompt:
    if prompt_id not in by_id:
        raise CheckpointError(f"the checkpoint names prompt {prompt_id!r}, the data has none")
    return by_id[prompt_id]


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


def _replica(cluster: Cluster[InferWorker], rank: int, capacity: int) -> Replica:
    def generate(request: GenerateRequest) -> Awaitable[list[Completion]]:
        return cluster.ask(rank, InferWorker.generate, request)

    def abort(request_id: str) -> Awaitable[None]:
        return cluster.ask(rank, InferWorker.abort, request_id)

    return Replica(rank, generate, abort, capacity)
