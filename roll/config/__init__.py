"""The configuration: strict, frozen pydantic models; no torch, no ray."""

from roll.config.compose import LoadedConfig, load_config
from roll.config.pipelines import PIPELINES, RlvrConfig, RunConfig
from roll.config.roles import Role

__all__ = ["PIPELINES", "LoadedConfig", "RlvrConfig", "Role", "RunConfig", "load_config"]
