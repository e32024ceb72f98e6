"""Runs programs that nobody trusts. Imports nothing else of roll, so it can be used alone."""

from roll.sandbox.errors import NoLevelError, SandboxError
from roll.sandbox.levels import LEVELS
from roll.sandbox.outcome import Job, Limits, Outcome, Status
from roll.sandbox.remote.hosts import Remote
from roll.sandbox.sandbox import Sandbox
from roll.sandbox.session import Session

__all__ = [
    "LEVELS",
    "Job",
    "Limits",
    "NoLevelError",
    "Outcome",
    "Remote",
    "Sandbox",
    "SandboxError",
    "Session",
    "Status",
]
