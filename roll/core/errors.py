"""Every error this framework raises on purpose.

`UserError` is what the user can mend (exit code 2); every other `RollError` is something that
broke (exit code 1). Messages say what was found, what was expected and what to do. All of them
survive pickling, because they cross process boundaries.
"""

from __future__ import annotations

from typing import Any

from roll.config.errors import ConfigError, RollError, UserError
from roll.config.sections.roles import Role

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineDiedError",
    "EngineError",
    "EngineMissingError",
    "FolderLostError",
    "IncompleteWeightsError",
    "NotMadeYetError",
    "RewardError",
    "RollError",
    "SettingsChangedError",
    "UserError",
    "WaitTimeoutError",
    "WeightSyncError",
    "WorkerError",
    "WorkerLostError",
]


class DataError(UserError):
    """A data file, a row or a column."""


class NotMadeYetError(DataError):
    """A data file that a named command makes, and that command has not run yet."""


class SettingsChangedError(RollError):
    """A finished run is asked for with other settings than it had: no mistake of the file, but its
    results are not the ones that are asked for (exit code 1)."""


class FolderLostError(RollError):
    """Another run has taken the output folder of this one, which was silent for too long."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or belongs to another model."""


class EngineMissingError(UserError):
    """An engine that the config names is not installed, or not in the supported version."""


class RewardError(RollError):
    """A reward function failed more often than its budget allows."""


class EngineError(RollError):
    """An inference engine failed at a request."""


class EngineDiedError(EngineError):
    """An engine, or one of its processes, is gone with all its requests; only a new one helps."""


class IncompleteWeightsError(EngineError):
    """A push of weights broke off, so the engine's weights are of no version: it ends its requests
    with this error, and takes none, until a push has succeeded."""


class WeightSyncError(RollError):
    """Weights could not be moved from training to inference, or arrived changed."""


class WorkerError(RollError):
    """A worker died or raised; names its role and rank and carries its last traceback."""


class WorkerLostError(WorkerError):
    """A worker died that can be replaced; only what concerns that worker is lost."""

    def __init__(self, message: str, role: Role, label: str, rank: int) -> None:
        super().__init__(message)
        self.role = role
        self.label = label
        """Tells clusters of one role apart; see `Placement.label`."""
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.role, self.label, self.rank), self.__dict__


class WaitTimeoutError(RollError, TimeoutError):
    """A wait ran out of time; names what it waited for."""
