"""The errors that this framework raises on purpose.

A `UserError` is a mistake that the user can correct (exit code 2). Every other `RollError` is a
failure during the run (exit code 1). Messages say what was found, what was expected and what to do.
All errors can be pickled, because they cross process boundaries.
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
    "EnvironmentFailedError",
    "FolderLostError",
    "HostSpentError",
    "IncompleteWeightsError",
    "NotMadeYetError",
    "PictureError",
    "RewardError",
    "RollError",
    "RowError",
    "SettingsChangedError",
    "StoppedEarlyError",
    "UserError",
    "ValidationCutError",
    "WaitTimeoutError",
    "WeightSyncError",
    "WorkerError",
    "WorkerLostError",
]


class DataError(UserError):
    """A mistake in a data file, a row or a column."""


class RowError(DataError):
    """A mistake in one row of a data file. The message begins with the place of the row."""


class NotMadeYetError(DataError):
    """A data file is missing because the command that makes the file has not run yet. The message
    names the command."""


class SettingsChangedError(RollError):
    """The output folder holds a finished run that was trained with other settings. The run file is
    valid, but the results in the folder are not those that the run file asks for (exit code 1)."""


class StoppedEarlyError(RollError):
    """The run was asked to end before its last step. It has saved the step that was under way, and
    goes on when it is started again, after `stop_at` with a later one (exit code 75, with which
    batch systems start a job again)."""


class ValidationCutError(RollError):
    """The run was asked to end before a validation, or in it."""


class FolderLostError(RollError):
    """Another run has taken over the output folder, because this run gave no sign of life for too
    long."""


class CheckpointError(UserError):
    """A checkpoint is missing, is incomplete or belongs to another model."""


class EngineMissingError(UserError):
    """An engine that the config names is not installed, or not in the supported version."""


class PictureError(RollError):
    """A picture of a row cannot be made into patches. The row is left out, and the run goes on."""


class RewardError(RollError):
    """A reward function failed more often than its error budget allows."""


class EnvironmentFailedError(RollError):
    """An environment raised, took too long, answered nonsense, or lost its worker."""


class HostSpentError(EnvironmentFailedError):
    """So many calls hang in the worker of an environment that no other can run there: only another
    worker in its place helps."""


class EngineError(RollError):
    """An inference engine failed to serve a request or a call."""


class EngineDiedError(EngineError):
    """An engine, or one of its processes, has ended. All its requests are lost, and the engine must
    be replaced by a new one."""


class IncompleteWeightsError(EngineError):
    """A weight push broke off, so the engine holds a mixture of two versions. Until a push
    succeeds, the engine ends its requests with this error and accepts no new ones."""


class WeightSyncError(RollError):
    """Weights could not be moved from training to inference, or arrived with changed values."""


def failure(error: BaseException) -> str:
    """Return the text with which a process reports an error in a push of weights to others.

    For errors other than a WeightSyncError the text begins with the type, which often tells more
    than the message and would not reach the others otherwise.
    """
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"


class WorkerError(RollError):
    """A worker died or raised an exception. The message names the role and the rank, and holds the
    traceback or the last lines of the log."""


class WorkerLostError(WorkerError):
    """A worker died, but it can be replaced. Only the calls to this worker are lost."""

    def __init__(self, message: str, role: Role, label: str, rank: int) -> None:
        super().__init__(message)
        self.role = role
        self.label = label
        """Label that distinguishes clusters of the same role; see `Placement.label`."""
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.role, self.label, self.rank), self.__dict__


class WaitTimeoutError(RollError, TimeoutError):
    """A wait reached its time limit. The message names what was waited for."""
