"""One class per pipeline: the whole of a run file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.base import Config
from roll.config.data import DataConfig
from roll.config.lifecycle import CheckpointConfig, TrackConfig, ValidationConfig
from roll.config.model import ModelConfig
from roll.config.placement import ClusterConfig, DeviceList
from roll.config.reward import RewardConfig
from roll.config.rollout import RolloutConfig
from roll.config.sampling import SamplingConfig
from roll.config.training import InferRole, ScoreRole, TrainRole


class RunConfig(Config):
    """What every pipeline has."""

    output_dir: str
    """Folder of everything the run writes."""
    seed: int = 0
    max_steps: int = Field(ge=1)
    resume: str = "auto"
    """`auto` goes on from the newest complete checkpoint in output_dir; `never` starts anew;
    anything else is the path of a checkpoint."""
    cluster: ClusterConfig = ClusterConfig()
    pools: dict[str, DeviceList] = Field(min_length=1)
    """Name -> job-wide device numbers, like "0-3". Roles that name the same pool share it."""
    model: ModelConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()


class RlvrConfig(RunConfig):
    """Reinforcement learning from verifiable rewards."""

    pipeline: Literal["rlvr"] = "rlvr"
    actor_train: TrainRole
    actor_infer: InferRole
    reference: ScoreRole | None = None
    """Frozen copy of the start model; needed by a `kl` loss term."""
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    """Name -> reward; the name appears in the metrics."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        from roll.config.checks import check_rlvr

        check_rlvr(self)
        return self


PIPELINES: dict[str, type[RlvrConfig]] = {"rlvr": RlvrConfig}
