"""Classes of the whole run file, by the value of `pipeline`."""

from roll.config.agentic import AgenticConfig
from roll.config.offline import DistillationConfig, DpoConfig, RewardModelConfig, SftConfig
from roll.config.rlvr import RlvrConfig
from roll.config.run import RunConfig

PIPELINES: dict[str, type[RunConfig]] = {
    "rlvr": RlvrConfig,
    "agentic": AgenticConfig,
    "sft": SftConfig,
    "distill": DistillationConfig,
    "dpo": DpoConfig,
    "reward_model": RewardModelConfig,
}
