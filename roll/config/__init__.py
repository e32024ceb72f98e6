"""The configuration of a run: strict, frozen pydantic models that import neither torch nor ray."""

from roll.config.loading.compose import LoadedConfig, load_config
from roll.config.pipelines import PIPELINES
from roll.config.rlvr import RlvrConfig
from roll.config.run import RunConfig
from roll.config.sections.roles import Role

__all__ = ["PIPELINES", "LoadedConfig", "RlvrConfig", "Role", "RunConfig", "load_config"]
