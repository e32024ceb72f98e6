"""Every error this framework raises on purpose.

`UserError` is what the user can mend (exit code 2); every other `RollError` is something that
broke (exit code 1). Messages say what was found, what was expected and what to do. All of them
survive pickling, because they cross process boundaries.
"""

from roll.config.errors import ConfigError, RollError, UserError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EngineMissingError",
    "NotMadeYetError",
    "RewardError",
    "RollError",
    "UserError",
    "WaitTimeoutError",
    "WeightSyncError",
    "WorkerError",
]


class DataError(UserError):
    """A data file, a row or a column."""


class NotMadeYetError(DataError):
    """A data file that a named command makes, and that command has not run yet."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or belongs to another model."""


class EngineMissingError(UserError):
    """An engine that the config names is not installed, or not in the supported version."""


class RewardError(RollError):
    """A reward function failed more often than its budget allows."""


class EngineError(RollError):
    """An inference engine failed or died."""


class WeightSyncError(RollError):
    """Weights could not be moved from training to inference, or arrived changed."""


class WorkerError(RollError):
    """A worker died or raised; names its role and rank and carries its last traceback."""


class WaitTimeoutError(RollError, TimeoutError):
    """A wait ran out of time; names what it waited for."""
