"""Trial of the sandboxes of a run: at which level programs would run on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from roll.commands.trials.result import Trial
from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError
from roll.config.rlvr_base import RlvrBase
from roll.envs.tools.built_in.sandboxed import SANDBOXED
from roll.rewards.code.running.sandboxes import SandboxSettings, new_sandbox
from roll.sandbox import SandboxError
from roll.sandbox.levels import NONE


def try_sandboxes(config: RlvrBase, trial: Trial) -> None:
    """Add to `trial` the level of each sandbox that the run names, and why not a stronger one."""
    told: dict[str, list[str]] = {}
    for where, settings in _sandboxes(config):
        try:
            with new_sandbox(settings.model_copy(update={"workers": 1})) as sandbox:
                lines = [f"programs run at level {sandbox.level}"]
                lines += [f"not {level}: {why}" for level, why in sandbox.refused.items()]
                if sandbox.level == NONE:
                    trial.remarks.append(f"{where}: level `none` isolates nothing")
        except SandboxError as error:
            trial.wrong.append(ConfigError(f"{where}: {error}"))
            continue
        for line in lines:
            told.setdefault(line, []).append(where)
    trial.told += [f"{', '.join(places)}: {line}" for line, places in told.items()]


def _sandboxes(config: RlvrBase) -> Iterator[tuple[str, SandboxSettings]]:
    """Yield the key and the settings of each sandbox; wrong settings are told by other trials."""
    named: dict[str, Any] = {
        f"rewards.{name}.kwargs.sandbox": reward.kwargs.get("sandbox", {})
        for name, reward in config.rewards.items()
        if reward.fn == "code"
    }
    if isinstance(config, AgenticBase):
        for name, one in config.environments.items():
            if one.env == "fix_code":
                named[f"environments.{name}"] = _level_of(one.kwargs)
            tools = one.kwargs.get("tools", ()) if one.env == "tools" else ()
            if any(tool in SANDBOXED for tool in tools):
                where = f"environments.{name}.kwargs.sandbox"
                named[where] = _level_of(one.kwargs.get("sandbox") or {})
    for where, given in named.items():
        try:
            yield where, SandboxSettings.model_validate_json(json.dumps(given))
        except ValidationError:
            continue


def _level_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the level of an environment's settings, and its hosts."""
    return {"level": given.get("level", "auto"), "remote": given.get("remote")}
