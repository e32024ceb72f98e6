"""Runtime of a run in which a policy learns from its samples: all of its parts, connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll.config.rlvr_base import RlvrBase
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import Prompt
from roll.distributed.cluster import Cluster, Launcher
from roll.distributed.colocation import Colocation
from roll.runtime.clusters import start_trainers
from roll.runtime.device_sharing import DeviceSharing
from roll.runtime.rollouts.generation import start_generation
from roll.runtime.rollouts.replay import Replay
from roll.runtime.rollouts.stage import Rollouts
from roll.runtime.run_data import RunData
from roll.runtime.sample_keeper import SampleKeeper, start_keeper
from roll.runtime.teachers import Teachers
from roll.workers.actor import ActorWorker
from roll.workers.estimators.critic import CriticWorker
from roll.workers.estimators.process_reward import ProcessRewardWorker
from roll.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class Runtime:
    """All parts of a run that work together, started and connected."""

    actor: Cluster[ActorWorker]
    reference: Cluster[ReferenceWorker] | None
    critic: Cluster[CriticWorker] | None
    process_reward: Cluster[ProcessRewardWorker] | None
    teachers: Teachers
    """All teachers; without any, it has no clusters."""
    colocation: Colocation
    rollouts: Rollouts
    keeper: SampleKeeper | None
    """Keeper of whole samples; None if the run keeps none."""
    read: Callable[[Sequence[int]], str]
    """Function that decodes token ids to text, special tokens included."""

    def close(self) -> None:
        """Stop the source of samples and the keeper of samples."""
        self.rollouts.close()
        if self.keeper is not None:
            self.keeper.close()


def start_runtime(
    config: RlvrBase,
    launcher: Launcher,
    loop: LoopThread,
    data: RunData[Prompt],
    *,
    platform: str,
) -> Runtime:
    """Start all clusters of the run. All generation will run on `loop`; `platform` is `cpu` or
    `cuda`."""
    keeper = start_keeper(config, launcher, data)
    rollouts: Rollouts
    if data.replay is None:
        rollouts, trainers = start_generation(
            config, launcher, loop, data, keeper, platform=platform
        )
        assert trainers is not None
    else:
        rollouts = Replay(config, data.replay)
        sharing = DeviceSharing(config, taking_turns=platform == "cuda")
        trainers = start_trainers(config, launcher, data.tokenizer, sharing)
    return Runtime(
        actor=trainers.actor,
        reference=trainers.reference,
        critic=trainers.critic,
        process_reward=trainers.process_reward,
        teachers=trainers.teachers,
        colocation=trainers.colocation,
        rollouts=rollouts,
        keeper=keeper,
        read=data.tokenizer.decode,
    )
