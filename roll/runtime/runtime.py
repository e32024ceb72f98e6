"""Runtime of an RLVR run: clusters, data, rewards and scheduler, built from the config."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import Prompt
from roll.data.curriculum import Curriculum
from roll.data.datasets import Dataset
from roll.data.mixing import Sampler
from roll.distributed.cluster import Cluster, Launcher
from roll.distributed.colocation import Colocation
from roll.distributed.worker import Worker
from roll.rewards.decoding import make_decode
from roll.rewards.execution.counters import Purpose
from roll.rollout.budget import Budget
from roll.rollout.filters import build_filters
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.types import GroupFilter
from roll.runtime.clusters import start_model_clusters
from roll.runtime.environments import start_environments
from roll.runtime.group_makers import EpisodeMakers, GroupMakers
from roll.runtime.inference_service import InferenceService
from roll.runtime.pictures.maker import PictureMaker, start_pictures
from roll.runtime.reward_router import RewardRouter
from roll.runtime.reward_workers import start_functions
from roll.runtime.run_data import RunData, tag_shares
from roll.runtime.sample_keeper import SampleKeeper, start_keeper
from roll.runtime.side_engines.corpora import Corpora, start_corpora
from roll.runtime.side_engines.judges import Judges
from roll.runtime.side_engines.opponents import Opponents
from roll.runtime.validator import Validator, answer_key
from roll.workers.actor import ActorWorker
from roll.workers.critic import CriticWorker
from roll.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class Runtime:
    """All parts of an RLVR run that work together, started and connected."""

    actor: Cluster[ActorWorker]
    inference: InferenceService
    reference: Cluster[ReferenceWorker] | None
    critic: Cluster[CriticWorker] | None
    teachers: Mapping[str, Cluster[Any]]
    """Name of the teacher -> its cluster: of `TeacherWorker`s if students learn from whole
    distributions, otherwise of `ReferenceWorker`s."""
    judges: Judges
    opponents: Opponents
    corpora: Corpora
    reward_router: RewardRouter
    pictures: PictureMaker | None
    """Maker of the patches of pictures; None if no prompt has pictures."""
    begin_step: Callable[[Mapping[str, float]], None]
    """Function that begins to count failures of rewards and environments anew, for a step with so
    many samples of each tag."""
    prompts: Sampler[Prompt]
    curriculum: Curriculum | None
    """Preference for prompts by their pass rate, if the run has one."""
    scheduler: GenerateScheduler
    validator: Validator
    keeper: SampleKeeper | None
    """Keeper of whole samples; None if the run keeps none."""
    colocation: Colocation
    find_prompt: Callable[[str], Prompt]
    tag_shares: Mapping[str, float]
    """Tag -> expected share of the drawn training prompts."""
    read: Callable[[Sequence[int]], str]
    """Function that decodes token ids to text, special tokens included."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data and the groups of the scheduler, as JSON objects
        and arrays. Groups whose tokens are lost begin again first."""

        async def on_loop() -> dict[str, Any]:
            await self.scheduler.begin_lost_again()
            # Without a wait between the two: no group can end there.
            return {"position": self.prompts.state(), "scheduler": self.scheduler.state()}

        return self.inference.run(on_loop())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned in an earlier session. Patches of groups that wait are made
        again.

        Raises:
            CheckpointError: it is of other data or settings.
            PictureError: a picture of a group that waits is broken now.
        """
        self.prompts.restore(state["position"], self.find_prompt)
        seen: dict[str, Prompt] = {}
        if self.pictures is not None:
            waiting = [row["group"]["prompt"] for row in state["scheduler"]["waiting"]]
            seen = self.inference.run(self.pictures.prompts(map(self.find_prompt, waiting)))
        self.scheduler.restore(
            state["scheduler"], lambda name: seen.get(name) or self.find_prompt(name)
        )

    def close(self) -> None:
        """Stop the scheduler, the keeper of samples, the corpora, the judges, the opponents and the
        inference service."""
        self.inference.run(self.scheduler.close())
        if self.keeper is not None:
            self.keeper.close()
        self.inference.run(self.corpora.close())
        self.judges.close()
        self.opponents.close()
        self.inference.close()

    def memory_gb(self) -> float:
        """Return the resident memory of the largest worker with its child processes, in GiB.

        Counts actor, reference, critic, teachers and the engines of the policy; not rewards,
        judges, opponents and environments. If an engine ends during the call, no engine is counted.
        """
        clusters: list[Cluster[Any] | None] = [self.actor, self.reference, self.critic]
        clusters.extend(self.teachers.values())
        sizes = [cluster.call_each(Worker.memory_gb) for cluster in clusters if cluster is not None]
        return max(size for each in (*sizes, self.inference.memory_gb()) for size in each)


def start_runtime(
    config: RlvrBase,
    launcher: Launcher,
    loop: LoopThread,
    data: RunData[Prompt],
    *,
    platform: str,
) -> Runtime:
    """Start all clusters of the run, and build its scheduler, validator and reward router. All
    generation will run on `loop`."""
    # First, so that a user's error shows at once.
    filters = build_filters(config.rollout.filters, config.domains)
    tokenizer, dataset = data.tokenizer, data.train
    functions = start_functions(config, launcher)  # so their errors show before a model is loaded
    models = start_model_clusters(config, launcher, loop, platform, tokenizer)
    hosted = functions | models.reward_models
    reward_router = RewardRouter({n: hosted[n] for n in config.rewards}, config.reward_weights)
    fleet, decode = models.inference.fleet, make_decode(tokenizer)
    models.judges.start(config, functions)
    models.opponents.start()
    pictures, corpora = _pictures(config, launcher, data), Corpora({})
    makers = GroupMakers(config, fleet, decode, reward_router, pictures, _encode(tokenizer))
    if isinstance(config, AgenticBase):
        corpora = Corpora(start_corpora(config, launcher, models.colocation))
        hosts = start_environments(config, launcher, data)
        models.inference.run(corpora.start({one.cluster for one in hosts.values()}))
        makers = EpisodeMakers(
            config,
            fleet,
            decode,
            reward_router,
            hosts=hosts,
            opponents=models.opponents.fleets,
        )
    curriculum, keeper = _curriculum(config, dataset), start_keeper(config, launcher, data)
    prompts = Sampler(
        dataset, seed=config.seed, shuffle=config.data.shuffle, preferences=curriculum
    )
    return Runtime(
        actor=models.actor,
        inference=models.inference,
        reference=models.reference,
        critic=models.critic,
        teachers=models.teachers,
        judges=models.judges,
        opponents=models.opponents,
        corpora=corpora,
        reward_router=reward_router,
        pictures=pictures,
        begin_step=makers.begin_step,
        prompts=prompts,
        curriculum=curriculum,
        scheduler=_scheduler(config, prompts, curriculum, filters, makers),
        validator=_validator(config, data.held_out, makers, keeper),
        keeper=keeper,
        colocation=models.colocation,
        find_prompt=dataset.find,
        tag_shares=tag_shares(dataset),
        read=tokenizer.decode,
    )


def _pictures(config: RlvrBase, launcher: Launcher, data: RunData[Prompt]) -> PictureMaker | None:
    """Start the workers that make patches; None if no prompt has pictures."""
    prompts = itertools.chain(data.train.in_memory, data.held_out.in_memory)
    rows = (prompt.pictures for prompt in prompts)
    return start_pictures(rows, config.data.pictures, config.train_model, launcher)


def _encode(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return the function that returns the tokens of a text, without special ones around it."""
    return partial(tokenizer.encode, add_special_tokens=False)


def _curriculum(config: RlvrBase, dataset: Dataset[Prompt]) -> Curriculum | None:
    """Return the curriculum of a run in its initial state; None if it has none."""
    if config.data.curriculum is None:
        return None
    curriculum = Curriculum(config.data.curriculum.model_copy(deep=True), config.seed)
    curriculum.begin_with(dataset.items)
    return curriculum


def _scheduler(
    config: RlvrBase,
    prompts: Sampler[Prompt],
    curriculum: Curriculum | None,
    filters: Sequence[GroupFilter],
    makers: GroupMakers,
) -> GenerateScheduler:
    """Return the scheduler of training."""
    rollout = config.rollout
    return GenerateScheduler(
        prompts=prompts,
        run_group=makers.training(),
        budget=Budget(
            config.data.prompts_per_step,
            max_staleness=rollout.max_staleness,
            extra=rollout.extra_prompts,
            max_in_flight=rollout.max_in_flight_groups,
            max_prompts_factor=rollout.max_prompts_factor,
        ),
        filters=filters,
        outcomes=curriculum,
    )


def _validator(
    config: RlvrBase, held_out: Dataset[Prompt], makers: GroupMakers, keeper: SampleKeeper | None
) -> Validator:
    """Return the validator of all held-out prompts."""
    math_tags = frozenset(t for r in config.rewards.values() if r.fn == "math" for t in r.tags)
    return Validator(
        config=config.validation,
        sets={source.name: source.items for source in held_out.sources},
        run_group=makers.validation(),
        begin_step=partial(makers.begin_step, purpose=Purpose.VALIDATION),
        reward_router=makers.reward_router,
        extract=partial(answer_key, math_tags=math_tags),
        max_in_flight=config.rollout.max_in_flight_groups,
        keep=None if keeper is None else keeper.keep_validation,
    )
