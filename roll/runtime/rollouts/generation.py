"""`Generation`: groups that engines write and rewards score while the run goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError, ValidationCutError
from roll.core.metrics import Last, Metrics
from roll.core.threads.loop_thread import LoopThread
from roll.core.timing import Timers
from roll.core.types import Prompt
from roll.data.curriculum import Curriculum
from roll.data.datasets import Dataset
from roll.data.mixing import Sampler
from roll.distributed.cluster import Launcher
from roll.distributed.colocation import Colocation
from roll.rewards.decoding import make_decode
from roll.rewards.execution.counters import Purpose
from roll.rollout.async_utils import ended_by
from roll.rollout.budget import Budget
from roll.rollout.collect_stats import CollectStats
from roll.rollout.filters import build_filters
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.types import Group, GroupFilter
from roll.runtime.clusters import Trainers, start_model_clusters
from roll.runtime.environments import start_environments
from roll.runtime.group_makers import EpisodeMakers, GroupMakers, reward_limits_s
from roll.runtime.inference_service import InferenceService
from roll.runtime.pictures.maker import PictureMaker, start_pictures
from roll.runtime.reward_router import RewardRouter
from roll.runtime.reward_workers import start_functions
from roll.runtime.run_data import RunData, samples_by_tag, tag_shares
from roll.runtime.sample_keeper import SampleKeeper
from roll.runtime.side_engines.corpora import Corpora, start_corpora
from roll.runtime.side_engines.judges import Judges
from roll.runtime.side_engines.opponents import Opponents
from roll.runtime.validator import Validator, answer_key


@dataclass(frozen=True)
class Generation:
    """Engines, rewards, data and scheduler of a run, started and connected; see `Rollouts`."""

    inference: InferenceService
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
    colocation: Colocation
    find_prompt: Callable[[str], Prompt]
    """Function that returns the prompt with this id; CheckpointError if the data has none."""
    fits: Callable[[Group], bool]
    """Function that tells whether a group that waited in a checkpoint is such as this run makes."""
    tag_samples: Mapping[str, float]
    """Tag -> expected number of samples of a step."""

    def collect(self, step: int, timers: Timers) -> tuple[list[Group], Metrics]:
        """Have the groups of a step generated and scored; see `Rollouts.collect`."""
        self.begin_step(self.tag_samples)
        with timers.timed("rollout"):
            self.inference.take_devices()
            result = self.inference.run(self.scheduler.collect(step))
        timers.add("generate", result.stats.generate_s)
        timers.add("reward", result.stats.reward_s)
        return result.groups, self._metrics(result.stats)

    def _metrics(self, stats: CollectStats) -> Metrics:
        """Return the metrics of engines, judges, opponents, pictures and data since the last
        step."""
        fleet = self.inference.fleet
        metrics = stats.metrics() | fleet.take_metrics()
        metrics = metrics | self.inference.run(fleet.take_utilisation())
        metrics = metrics | self.judges.take_metrics() | self.opponents.take_metrics()
        if self.pictures is not None:
            metrics = metrics | self.pictures.take_metrics()
        if self.curriculum is not None:
            metrics = metrics | self.curriculum.metrics
        if len(self.tag_samples) > 1:
            metrics = metrics | stats.tag_metrics(self.tag_samples)
        rate = stats.generated_tokens / max(stats.elapsed_s, 1e-9)
        return metrics | {"perf/generated_tokens_per_s": Last(rate)}

    def take_rates(self) -> Metrics:
        """See `RewardRouter.take_rates` and `WeightPusher.take_metrics`."""
        pushes = [self.inference.take_push_metrics(), self.opponents.take_push_metrics()]
        return self.reward_router.take_rates() | Metrics.concat(pushes)

    def trainer_busy(self) -> AbstractContextManager[None]:
        """See `InferenceService.trainer_busy`."""
        return self.inference.trainer_busy()

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Push the trained weights to all engines of the policy, whose later tokens carry
        `version`, and to those opponents whose turn it is; see `Rollouts.update_weights`."""
        with self.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER):
            self.inference.update_weights(version, verify=verify)
        self.opponents.update_weights(version, verify=verify)

    def validate(self, step: int, asked_to_end: Callable[[], bool]) -> dict[str, float]:
        """Return the scores of the weights that the engines have; see `Rollouts.validate` and
        `Validator.run`."""
        self.inference.take_devices()
        scores = self.inference.run(ended_by(asked_to_end, self.validator.run(step)))
        if scores is None:
            raise ValidationCutError(f"the validation after {step} steps")
        return scores

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
            CheckpointError: it is of other data or settings, or of a run that has not generated.
            PictureError: a picture of a group that waits is broken now.
        """
        if "position" not in state:
            raise CheckpointError(
                "the checkpoint is of a run that trained on kept samples (rollout.replay), so it "
                "has no position in the data to generate from; go on with rollout.replay, or begin "
                "a new run from its hf/"
            )
        self.prompts.restore(state["position"], self.find_prompt)
        seen: dict[str, Prompt] = {}
        if self.pictures is not None:
            waiting = [row["group"]["prompt"] for row in state["scheduler"]["waiting"]]
            seen = self.inference.run(self.pictures.prompts(map(self.find_prompt, waiting)))
        self.scheduler.restore(
            state["scheduler"],
            lambda name: seen.get(name) or self.find_prompt(name),
            fits=self.fits,
        )

    def close(self) -> None:
        """Stop the scheduler, the corpora, the judges, the opponents and the inference service."""
        self.inference.run(self.scheduler.close())
        self.inference.run(self.corpora.close())
        self.judges.close()
        self.opponents.close()
        self.inference.close()


def start_generation(
    config: RlvrBase,
    launcher: Launcher,
    loop: LoopThread,
    data: RunData[Prompt],
    keeper: SampleKeeper | None,
    *,
    platform: str,
    trains: bool = True,
) -> tuple[Generation, Trainers | None]:
    """Start all that generates and scores, and the trainers, whose weights the engines get.

    Args:
        loop: event loop on which all generation runs.
        keeper: keeps the samples of validations; None: they are not kept.
        platform: `cpu` or `cuda`.
        trains: whether there are trainers; without them the engines keep the weights of their
            files.
    """
    # First, so that a user's error shows at once.
    filters = build_filters(config.rollout.filters, config.domains)
    tokenizer, dataset = data.tokenizer, data.train
    functions = start_functions(config, launcher)  # so their errors show before a model is loaded
    models = start_model_clusters(config, launcher, loop, platform, tokenizer, trains=trains)
    hosted = functions | models.reward_models
    rewards = {name: hosted[name] for name in config.rewards}
    reward_router = RewardRouter(rewards, config.reward_weights, reward_limits_s(config))
    fleet = models.inference.fleet
    fleet.decode = decode = make_decode(tokenizer)
    models.judges.start(config, functions)
    models.opponents.start()
    pictures, corpora = _pictures(config, launcher, data), Corpora({})
    makers = GroupMakers(config, fleet, decode, reward_router, pictures, _encode(tokenizer))
    if isinstance(config, AgenticBase):
        corpora = Corpora(start_corpora(config, launcher, models.colocation))
        hosts = start_environments(config, launcher, data)
        models.inference.run(corpora.start({one.cluster for one in hosts.values()}))
        others = models.opponents.fleets
        makers = EpisodeMakers(config, fleet, decode, reward_router, hosts=hosts, opponents=others)
    curriculum, shuffle = _curriculum(config, dataset), config.data.shuffle
    prompts = Sampler(dataset, seed=config.seed, shuffle=shuffle, preferences=curriculum)
    generation = Generation(
        inference=models.inference,
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
        colocation=models.colocation,
        find_prompt=dataset.find,
        fits=makers.fits,
        tag_samples=samples_by_tag(tag_shares(dataset), config.samples_per_step),
    )
    return generation, models.trainers


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
