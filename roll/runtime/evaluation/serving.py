"""Models on engines that nobody trains, and the rewards that judge what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from roll.config.evaluation import EvalConfig, QuestionSet
from roll.config.sections.roles import Role
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import SamplingParams
from roll.distributed.cluster import Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.rewards.execution.counters import Purpose
from roll.rollout.fleet.routing import Sticky
from roll.rollout.single_turn import SingleTurn
from roll.rollout.types import RunGroup
from roll.runtime.inference_service import InferenceService
from roll.runtime.replicas import devices_of_replicas, start_replicas
from roll.runtime.reward_router import RewardRouter
from roll.runtime.reward_workers import start_reward


@dataclass(frozen=True)
class ServedModel:
    """A model on engines, which answers questions."""

    config: EvalConfig
    inference: InferenceService
    decode: Callable[[Sequence[int]], str]
    """Function that turns the token ids of a response into text."""

    def run_group(self, questions: QuestionSet, router: RewardRouter) -> RunGroup:
        """Return the function that answers a question, as in the validation of a run, with the
        sampling of its set."""
        score_group = None
        if router.scores_groups:
            score_group = partial(router.score_group, purpose=Purpose.VALIDATION)
        return SingleTurn(
            fleet=self.inference.fleet,
            decode=self.decode,
            score=partial(router.score, purpose=Purpose.VALIDATION),
            score_group=score_group,
            sampling=SamplingParams(**questions.sampling.model_dump()),
            samples_per_prompt=questions.samples_per_prompt,
            seed=self.config.seed,
            request_timeout_s=self.config.request_timeout_s,
        ).run


@contextmanager
def serving(
    config: EvalConfig,
    launcher: Launcher,
    loop: LoopThread,
    decode: Callable[[Sequence[int]], str],
    max_tokens: int,
) -> Iterator[ServedModel]:
    """Serve a model on engines inside the block; afterwards their devices are free.

    Args:
        launcher: starts the engines.
        loop: event loop on which all generation runs.
        decode: function that turns the token ids of a response into text.
        max_tokens: largest number of tokens of a prompt and its response together.
    """
    role = config.actor_infer
    place = Placement(
        Role.ACTOR_INFER,
        pool=role.pool,
        per_worker=role.devices_per_worker,
        seed=config.seed,
        replaceable=True,
        env=role.env,
    )
    replicas = start_replicas(
        launcher,
        loop,
        place,
        role,
        config.model,
        max_tokens,
        health=config.health,
        routing=Sticky(),
        start_timeout_s=config.cluster.start_timeout_s,
    )
    replicas.fleet.decode = decode
    colocation = Colocation(enabled=False)
    devices = devices_of_replicas(config.pools[role.pool], role.devices_per_worker)
    colocation.add(Role.ACTOR_INFER, *replicas.residents(devices))
    inference = InferenceService(replicas, colocation, pusher=None)
    with ExitStack() as undo:
        undo.callback(replicas.infer.close)
        inference.start()
        undo.callback(inference.close)
        yield ServedModel(config, inference, decode)


@contextmanager
def judging(
    name: str, questions: QuestionSet, config: EvalConfig, launcher: Launcher
) -> Iterator[RewardRouter]:
    """Start the rewards of a set inside the block, and end their workers after it; `name` is that
    of the set."""
    with ExitStack() as undo:
        hosted = {}
        for reward_name, reward in questions.rewards.items():
            place = Placement(
                Role.REWARD,
                pool=config.actor_infer.pool,
                workers=reward.workers,
                seed=config.seed,
                label=f"{name}.{reward_name}",
                env=reward.env,
            )
            sharers = 1 if reward.judge is None else questions.sharers(reward.judge.by)
            started = start_reward(
                reward_name,
                reward,
                launcher,
                place,
                judges=questions.judges,
                sharers=sharers,
            )
            undo.callback(started.cluster.close)
            hosted[reward_name] = started
        yield RewardRouter(hosted)
